"""Metrics of groups: rewards, lengths, shares of domains, pass rates."""

from collections.abc import Iterable
from statistics import fmean

from roll_lite.types import Group, Sample


def describe_groups(groups: list[Group]) -> dict[str, float]:
    """Rewards and lengths of all samples, and the same for each of several domains and files.

    A group is solved if any of its rewards is above 0, and equal if all its rewards are.
    """
    samples = [sample for group in groups for sample in group.samples]
    done = [sample for sample in samples if sample.state == "done"]
    rewards = [[s.score.value for s in g.samples if s.score] for g in groups]
    return {
        **_parts("reward", done),
        "reward/mean": fmean(s.score.value for s in done) if done else 0.0,
        "reward/solved_groups": fmean(any(r > 0 for r in group) for group in rewards),
        "reward/equal_groups": fmean(len(set(group)) < 2 for group in rewards),
        **_by_subset(groups),
        "rollout/reply_tokens": fmean(s.num_sampled for s in samples),
        "rollout/longest_reply": max(s.num_sampled for s in samples),
        "rollout/truncated": fmean(s.is_cut for s in samples),
        **_episodes("rollout", samples),
    }


def _parts(prefix: str, done: list[Sample]) -> dict[str, float]:
    """Mean of each part of the reward, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in done:
        for name, value in sample.score.parts.items():
            values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": fmean(values[name]) for name in sorted(values)}


def _episodes(prefix: str, samples: list[Sample]) -> dict[str, float]:
    """Turns, and shares of the reasons why episodes ended, if there are episodes."""
    ended = [sample.end for sample in samples if sample.end not in ("", "returned")]
    if not ended and all(len(sample.turns) < 2 for sample in samples):
        return {}
    return {
        f"{prefix}/turns": fmean(len(sample.turns) for sample in samples),
        f"{prefix}/sequences": fmean(len(sample.sequences) for sample in samples),
        **{f"{prefix}/end_{end}": ended.count(end) / len(samples) for end in sorted(set(ended))},
    }


def _by_subset(groups: list[Group]) -> dict[str, float]:
    """Reward, its parts and the share of groups."""
    metrics: dict[str, float] = {}
    for name, members in subsets_of(groups).items():
        done = [s for group in members for s in group.samples if s.state == "done"]
        metrics[f"rollout/{name}/share"] = len(members) / len(groups)
        if done:
            metrics |= _parts(f"reward/{name}", done)
            metrics[f"reward/{name}/mean"] = fmean(s.score.value for s in done)
    return metrics


def pass_rates(groups: list[Group], pass_reward: float = 1.0) -> dict[str, float]:
    """Share of samples that pass (pass@1), and of prompts with one that does (pass@k).

    An episode passes with a `success` of 1, if it measures that; any other sample with a reward of
    at least `pass_reward`. Failed samples count neither as passed nor as not passed. Several
    domains, and several files of one domain, also have metrics of their own.
    """
    metrics = _pass_rates("eval", groups, pass_reward)
    for name, members in subsets_of(groups).items():
        metrics |= _pass_rates(f"eval/{name}", members, pass_reward)
    samples = [sample for group in groups for sample in group.samples]
    return metrics | {
        "eval/failed": sum(sample.state != "done" for sample in samples),
        "eval/reply_tokens": fmean(sample.num_sampled for sample in samples),
        "eval/truncated": fmean(sample.is_cut for sample in samples),
    }


def _pass_rates(prefix: str, groups: list[Group], pass_reward: float) -> dict[str, float]:
    done = [[s for s in g.samples if s.state == "done"] for g in groups]
    passed = [[has_passed(s, pass_reward) for s in samples] for samples in done if samples]
    if not passed:
        return {}
    num_samples = max(len(group.samples) for group in groups)
    finished = [sample for samples in done for sample in samples]
    metrics = {
        f"{prefix}/reward": fmean(s.score.value for s in finished),
        # The mean of the groups' means: every prompt has the same weight.
        f"{prefix}/pass@1": fmean(map(fmean, passed)),
    }
    if episodes := _episodes(prefix, finished):
        metrics = _parts(prefix, finished) | episodes | metrics
    return metrics | (
        {f"{prefix}/pass@{num_samples}": fmean(map(any, passed))} if num_samples > 1 else {}
    )


def has_passed(sample: Sample, pass_reward: float) -> bool:
    score = sample.score
    return score.parts["success"] >= 1 if "success" in score.parts else score.value >= pass_reward


def subsets_of(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups by domain, if there are several, and by file, where a domain has several."""
    by_domain: dict[str, list[Group]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).append(group)
    subsets = dict(sorted(by_domain.items())) if len(by_domain) > 1 else {}
    for domain, members in sorted(by_domain.items()):
        files: dict[str, list[Group]] = {}
        for group in members:
            files.setdefault(group.prompt.source, []).append(group)
        for source, own in sorted(files.items()) if len(files) > 1 else ():
            name = source or "generated"
            subsets[f"{domain}-{name}" if name in subsets or name in by_domain else name] = own
    return subsets
