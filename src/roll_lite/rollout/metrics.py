"""What a round of samples looks like, in numbers."""

from statistics import fmean

from roll_lite.types import Group


def describe_groups(groups: list[Group]) -> dict[str, float]:
    """Rewards and lengths of all samples, failures included."""
    samples = [sample for group in groups for sample in group.samples]
    done = [sample for sample in samples if sample.state == "done"]
    rewards = [[s.score.value for s in g.samples if s.score] for g in groups]
    parts = sorted({name for sample in done for name in sample.score.parts})
    return {
        "reward/mean": fmean(s.score.value for s in done) if done else 0.0,
        "reward/solved_groups": fmean(any(r > 0 for r in group) for group in rewards),
        "reward/equal_groups": fmean(len(set(group)) < 2 for group in rewards),
        **{f"reward/{part}": fmean(s.score.parts.get(part, 0.0) for s in done) for part in parts},
        "rollout/failed": len(samples) - len(done),
        "rollout/reply_tokens": fmean(sum(s.loss_mask) for s in samples),
        "rollout/truncated": fmean(
            any(turn.finish_reason == "length" for turn in s.turns) for s in samples
        ),
    }
