"""Which samples are trained on."""

from roll_lite.types import Group


def drop_failed(groups: list[Group]) -> list[Group]:
    """Groups without their failed samples; a group with fewer than two left teaches nothing."""
    kept = [
        Group(prompt=group.prompt, samples=[s for s in group.samples if s.state == "done"])
        for group in groups
    ]
    kept = [group for group in kept if len(group.samples) >= 2]
    if not kept:
        errors = [sample.error for group in groups for sample in group.samples if sample.error]
        raise RuntimeError(
            f"no group has two samples left: {len(errors)} samples failed. The first error:\n"
            + (errors[0] if errors else "(none)")
        )
    return kept
