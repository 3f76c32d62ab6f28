"""From groups of scored samples to the sequences that are trained on."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_lite.train import estimators
from roll_lite.train.advantage_options import (
    BY_SAMPLE,
    BY_TOKEN,
    AdvantageOptions,
    AdvantageState,
)
from roll_lite.train.kl import estimate_kl
from roll_lite.train.normalise import normalise
from roll_lite.train.packing import TrainingSequence, join_numbers
from roll_lite.types import Group, Sample

PerToken = Sequence[Sequence[float]]
"""For each sample, in the order of the groups, a number per token."""
READERS = {
    "values": ("gae",),
    "teacher_logprobs": ("opd",),
    "turn_rewards": ("gigpo",),
    "observations": ("gigpo",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What some kinds read besides the samples, and nothing else may be given.

    Lists have an entry per sample, in the order of the groups.
    """

    reference_logprobs: PerToken | None = None
    """With kl_coef."""
    values: PerToken | None = None
    """gae: the critic's value of what comes before each token."""
    teacher_logprobs: Sequence[PerToken] | None = None
    """opd: one for each teacher."""
    turn_rewards: PerToken | None = None
    """gigpo: a number per turn instead of per token."""
    observations: Sequence[Sequence[Hashable]] | None = None
    """gigpo: a key per turn; equal keys are the same state of the environment."""


GRPO = AdvantageOptions()
NOTHING_MORE = Evidence()


def with_advantages(
    groups: list[Group],
    options: AdvantageOptions = GRPO,
    evidence: Evidence = NOTHING_MORE,
    state: AdvantageState | None = None,
) -> list[TrainingSequence]:
    """Every sample of every group as a sequence with the advantage of each token."""
    if not groups:
        return []
    rows = _Rows([sample for group in groups for sample in group.samples])
    groups_S = torch.tensor([i for i, group in enumerate(groups) for _ in group.samples])
    _check(options, evidence, state, rows.samples)
    returns_R = None
    if options.kind == "opd":
        advantages_R = _distilled(options, evidence, rows)
    elif options.kind == "gigpo":
        advantages_R = _by_turn(options, evidence, rows, groups_S)
    else:
        rewards_S = _rewards(options, state, rows.samples, groups_S)
        kl_R = _penalty(options, evidence, state, rows)
        if options.kind in BY_SAMPLE:
            rewards_S = rewards_S - rows.sum(kl_R)
            advantages_R = _by_sample(options, rewards_S, groups_S)[rows.sequence_R]
        else:
            advantages_R, returns_R = _by_token(options, evidence, rows, rewards_S, kl_R, groups_S)
    if options.is_whitened:
        advantages_R = estimators.whiten(advantages_R)
    if options.advantage_clip is not None:
        advantages_R = advantages_R.clamp(-options.advantage_clip, options.advantage_clip)
    return _sequences(rows, evidence, advantages_R, returns_R)


class _Rows:
    """The tokens that carry loss, of all samples end to end. The first token has no prediction."""

    def __init__(self, samples: list[Sample]):
        self.samples = samples
        self.lengths = [len(sample.token_ids) for sample in samples]
        sequence_N = torch.arange(len(samples)).repeat_interleave(torch.tensor(self.lengths))
        masks = ([False, *sample.loss_mask[1:]] for sample in samples)
        self.learned_R = join_numbers(masks, "b").nonzero()[:, 0]
        self.sequence_R = sequence_N[self.learned_R]
        self.logprobs_R = self.of([sample.logprobs for sample in samples])

    def of(self, per_token: PerToken) -> Tensor:
        return join_numbers(per_token, "d")[self.learned_R]

    def sum(self, values_R: Tensor) -> Tensor:
        """(S,): over the rows of each sample."""
        zeros_S = values_R.new_zeros(len(self.samples))
        return zeros_S.index_add(0, self.sequence_R, values_R)

    def at_end(self, values_S: Tensor) -> Tensor:
        """(R,): the sample's number on its last row, 0 on others."""
        following_R = torch.cat([self.sequence_R[1:], self.sequence_R.new_full((1,), -1)])
        is_last_R = self.sequence_R != following_R[: len(self.sequence_R)]
        return torch.where(is_last_R, values_S[self.sequence_R], 0.0)

    def lists(self, values_R: Tensor) -> list[list[float]]:
        """Per sample and token, 0 where there is no loss."""
        flat_N = values_R.new_zeros(sum(self.lengths)).index_copy(0, self.learned_R, values_R)
        return [part.tolist() for part in flat_N.split(self.lengths)]


def _check(
    options: AdvantageOptions,
    evidence: Evidence,
    state: AdvantageState | None,
    samples: list[Sample],
) -> None:
    if options.needs_state and state is None:
        raise ValueError(
            f"reward_norm={options.reward_norm!r} or kl_target={options.kl_target} carries numbers "
            "from batch to batch; give the run's AdvantageState"
        )
    wanted = {name: options.kind in kinds for name, kinds in READERS.items()}
    wanted["reference_logprobs"] = options.kl_coef > 0
    for name, is_wanted in wanted.items():
        given = getattr(evidence, name)
        if is_wanted != (given is not None):
            verb = "needs" if is_wanted else "does not read"
            raise ValueError(
                f"kind={options.kind!r} with kl_coef={options.kl_coef} {verb} {name}; "
                f"{'give' if is_wanted else 'leave out'} Evidence({name}=...)"
            )
        if is_wanted:
            is_by_turn = name in ("turn_rewards", "observations")
            for lists in given if name == "teacher_logprobs" else [given]:
                _check_lengths(name, lists, samples, is_by_turn)


def _check_lengths(name: str, lists: Sequence, samples: list[Sample], is_by_turn: bool) -> None:
    if len(lists) != len(samples):
        raise ValueError(f"{name} has {len(lists)} lists for {len(samples)} samples")
    for values, sample in zip(lists, samples, strict=True):
        length = len(sample.turns) if is_by_turn else len(sample.token_ids)
        if len(values) != length:
            raise ValueError(
                f"{name} of {_name(sample)} has {len(values)} entries for {length} "
                f"{'turns' if is_by_turn else 'tokens'}"
            )


def _rewards(
    options: AdvantageOptions,
    state: AdvantageState | None,
    samples: list[Sample],
    groups_S: Tensor,
) -> Tensor:
    """Scores, normalised, then clipped."""
    for sample in samples:
        if sample.score is None or not math.isfinite(sample.score.value):
            raise ValueError(
                f"{_name(sample)} has score {sample.score}; rewards must be finite numbers. "
                "Leave failed samples out with drop_failed(), and see its error"
            )
    rewards_S = torch.tensor([sample.score.value for sample in samples], dtype=torch.float64)
    moments = state.rewards if state else None
    rewards_S = normalise(rewards_S, groups_S, options.reward_norm, moments)
    if options.reward_clip is not None:
        rewards_S = rewards_S.clamp(-options.reward_clip, options.reward_clip)
    return rewards_S


def _penalty(
    options: AdvantageOptions, evidence: Evidence, state: AdvantageState | None, rows: _Rows
) -> Tensor:
    """Each row's KL to the reference times the coefficient, which then adapts."""
    if options.kl_coef == 0:
        return torch.zeros_like(rows.logprobs_R)
    reference_R = rows.of(evidence.reference_logprobs)
    kl_R = estimate_kl(rows.logprobs_R, reference_R, options.kl_estimator)
    if state is None:
        return options.kl_coef * kl_R
    penalty_R = state.kl.coef * kl_R
    state.metrics = {"loss/kl": kl_R.mean().item(), "loss/kl_coef": state.kl.coef}
    state.kl.update(rows.sum(kl_R).mean().item(), len(rows.samples))
    return penalty_R


def _by_sample(options: AdvantageOptions, rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    if options.kind == "grpo":
        return estimators.grpo(rewards_S, groups_S, divide_by_std=options.divide_by_std)
    if options.kind == "rloo":
        return estimators.rloo(rewards_S, groups_S)
    return estimators.lite_ppo(rewards_S, groups_S)


def _by_token(
    options: AdvantageOptions,
    evidence: Evidence,
    rows: _Rows,
    rewards_S: Tensor,
    penalty_R: Tensor,
    groups_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns; a sample's reward comes with its last row."""
    assert options.kind in BY_TOKEN
    rewards_R = rows.at_end(rewards_S) - penalty_R
    if options.kind == "gae":
        values_R = rows.of(evidence.values)
        return estimators.gae(
            rewards_R, values_R, rows.sequence_R, gamma=options.discount, lam=options.lam
        )
    returns_R = estimators.discounted_returns(rewards_R, rows.sequence_R, options.discount)
    if options.baseline == "none":
        return returns_R, returns_R
    is_by_batch = options.baseline == "batch"
    peers_S = torch.zeros_like(groups_S) if is_by_batch else groups_S
    baseline_S = estimators.group_means(rewards_S, peers_S)
    return returns_R - baseline_S[rows.sequence_R], returns_R


def _by_turn(
    options: AdvantageOptions, evidence: Evidence, rows: _Rows, groups_S: Tensor
) -> Tensor:
    """gigpo: every token has the advantage of its turn."""
    for sample, rewards in zip(rows.samples, evidence.turn_rewards, strict=True):
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"{_name(sample)} has turn rewards {rewards}; they must be finite")
    by_turn = estimators.gigpo(
        evidence.turn_rewards,
        evidence.observations,
        groups_S,
        gamma=options.discount,
        step_weight=options.step_weight,
        divide_by_std=options.divide_by_std,
    )
    return rows.of(
        [
            [turns[number] for number in _segments(sample)]
            for sample, turns in zip(rows.samples, by_turn, strict=True)
        ]
    )


def _distilled(options: AdvantageOptions, evidence: Evidence, rows: _Rows) -> Tensor:
    teachers = [rows.of(teacher) for teacher in evidence.teacher_logprobs]
    weights = options.teacher_weights or (1 / len(teachers),) * len(teachers)
    if len(weights) != len(teachers):
        raise ValueError(
            f"teacher_weights={weights} has {len(weights)} numbers for {len(teachers)} teachers"
        )
    return estimators.opd(rows.logprobs_R, teachers, coef=options.teacher_coef, weights=weights)


def _sequences(
    rows: _Rows, evidence: Evidence, advantages_R: Tensor, returns_R: Tensor | None
) -> list[TrainingSequence]:
    advantages = rows.lists(advantages_R)
    num = len(rows.samples)
    has_values = evidence.values is not None
    values = evidence.values if has_values else [[]] * num
    returns = rows.lists(returns_R) if has_values else [[]] * num
    references = evidence.reference_logprobs or [[]] * num
    return [
        TrainingSequence(
            id=_name(sample),
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            logprobs=sample.logprobs,
            reference_logprobs=list(references[i]),
            advantages=advantages[i],
            values=list(values[i]),
            returns=returns[i],
            segments=_segments(sample),
        )
        for i, sample in enumerate(rows.samples)
    ]


def _segments(sample: Sample) -> list[int]:
    """The turn of each token: what a turn read since the last one belongs to it."""
    segments: list[int] = []
    for number, turn in enumerate(sample.turns):
        num_known = len(turn.prompt_ids) + len(turn.token_ids)
        segments += [number] * (num_known - len(segments))
    return segments


def _name(sample: Sample) -> str:
    return f"sample {sample.index} of prompt {sample.prompt.id}"
