"""Which samples are trained on."""

from roll_lite.types import Group


def drop_failed(groups: list[Group], *, min_samples: int = 2) -> list[Group]:
    """Groups without their failed and aborted samples.

    A group with fewer than `min_samples` left is dropped: one sample has nothing to compare with.
    """
    kept = [
        Group(prompt=group.prompt, samples=[s for s in group.samples if s.state == "done"])
        for group in groups
    ]
    kept = [group for group in kept if len(group.samples) >= min_samples]
    if not kept:
        raise _nothing_left(groups, min_samples)
    return kept


def refuse_all_failed(groups: list[Group]) -> None:
    if not any(sample.state == "done" for group in groups for sample in group.samples):
        raise _nothing_left(groups, 1)


def _nothing_left(groups: list[Group], min_samples: int) -> RuntimeError:
    errors = [sample.error for group in groups for sample in group.samples if sample.error]
    return RuntimeError(
        f"no group has {min_samples} samples left: {len(errors)} samples failed. "
        "The first error:\n" + (errors[0] if errors else "(none)")
    )
