"""From groups of scored samples to the sequences that are trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.options import where
from roll_lite.train.advantages import (
    AdvantageOptions,
    PerSample,
    PerToken,
    PerTurn,
    mean_by_group,
    standardise,
)
from roll_lite.train.batch import join_numbers
from roll_lite.train.kl import NO_KL, KLController, KLOptions, estimate_kl
from roll_lite.train.sequences import TrainingSequence, name_of, samples_of, with_field
from roll_lite.train.shaping import RunningMoments, normalise
from roll_lite.types import Group, Sample, Score, TokenSequence


class Part(NamedTuple):
    """A sequence of a sample."""

    number: int
    """Number of the sample over all groups."""
    sample: Sample
    tokens: TokenSequence
    loss_mask: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScores:
    """What models say of the samples; give what the estimator reads, no more.

    Lists have an entry per sequence, in the order of `plain_sequences`, and in it a number per
    token.
    """

    reference_logprobs: Sequence[Sequence[float]] | None = None
    """Logprobs under the reference model, with KL in the reward."""
    values: Sequence[Sequence[float]] | None = None
    """The critic's value of the state before each token."""
    teacher_logprobs: Sequence[Sequence[float] | None] | None = None
    """Logprobs under the teacher of the prompt's domain; None for a sequence without a teacher."""
    reprompted_logprobs: Sequence[Sequence[float] | None] | None = None
    """Logprobs after another prompt; None for a sequence whose prompt has no other."""


class AdvantageState:
    """What advantages carry from batch to batch; a checkpoint keeps `state_dict()`."""

    def __init__(self, kl: KLOptions = NO_KL):
        self.rewards = RunningMoments()
        self.kl_options = kl
        self.kl = KLController(kl.kl_coef, target=kl.kl_target, horizon=kl.kl_horizon)
        self.metrics: dict[str, float] = {}
        """Metrics of the last batch: of its advantages, its KL to a reference and to teachers."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"rewards": self.rewards.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.kl.load_state_dict(state["kl"])


GRPO = AdvantageOptions()
NO_SCORES = ModelScores()


def with_advantages(
    groups: list[Group],
    options: AdvantageOptions = GRPO,
    scores: ModelScores = NO_SCORES,
    state: AdvantageState | None = None,
) -> list[TrainingSequence]:
    """Every sample of every group as one or several sequences with the advantage of each token."""
    if not groups:
        return []
    rows = Rows(groups, options, scores, state)
    return rows.sequences(options.estimate(rows))


class Rows:
    """All samples end to end, with the inputs of the estimators under their names, as advantages.py
    lists them: rewards_S, groups_S, ...

    Rows are in the order of samples, and in a sample in the order in which they were sampled.
    """

    def __init__(
        self,
        groups: list[Group],
        options: AdvantageOptions,
        scores: ModelScores = NO_SCORES,
        state: AdvantageState | None = None,
    ):
        """`state` is what advantages carry from step to step."""
        if state is None and options.reward_norm == "running":
            raise UserError("reward_norm='running' needs the run's AdvantageState; give `state`")
        state = state or AdvantageState()
        state.metrics = {}
        self._state = state
        self._options = options
        self._scores = scores
        self.samples = samples = samples_of(groups)
        self.parts = [
            Part(i, s, part, part.loss_mask) for i, s in enumerate(samples) for part in s.sequences
        ]
        _check_scores(options, scores, state.kl_options, self.parts)
        self.lengths = [len(part.tokens.token_ids) for part in self.parts]
        self.groups_S = torch.tensor([i for i, group in enumerate(groups) for _ in group.samples])
        number_P = torch.tensor([part.number for part in self.parts])
        sample_N = number_P.repeat_interleave(torch.tensor(self.lengths))
        mask_N = join_numbers((part.loss_mask for part in self.parts), "b")
        # A row is a token with loss; the first token of a sequence is never predicted.
        mask_N[torch.tensor([0, *self.lengths[:-1]]).cumsum(0)] = 0
        self.learned_R = mask_N.nonzero()[:, 0]
        if len(self.parts) > len(samples):  # turns may alternate between sequences
            turn_N = join_numbers((part.tokens.segments for part in self.parts), "q")
            time_R = (sample_N * 2**32 + turn_N)[self.learned_R]
            self.learned_R = self.learned_R[time_R.argsort(stable=True)]
        self.sequence_R = sample_N[self.learned_R]
        self.logprobs_R = self.of([part.tokens.logprobs for part in self.parts])
        self.values_R = self.of(scores.values) if scores.values is not None else None
        self.reprompted_logprobs_R = self._given_or_own(scores.reprompted_logprobs)
        self.teacher_logprobs_R = self._given_or_own(scores.teacher_logprobs)
        if scores.teacher_logprobs is not None:
            self._measure_teacher(scores.teacher_logprobs, state)
        self.turn_rewards = [_turn_rewards(sample) for sample in samples]
        self.observations = [[turn.state for turn in s.turns] for s in samples]
        if options.reads_rewards:
            self._add_rewards(options, scores, state)

    def _add_rewards(
        self, options: AdvantageOptions, scores: ModelScores, state: AdvantageState
    ) -> None:
        """Scores, normalised, then clipped; the KL counts against the sample, or token by token."""
        scores_S = torch.tensor([_score(s).value for s in self.samples], dtype=torch.float64)
        scores_S = normalise(scores_S, self.groups_S, options.reward_norm, state.rewards)
        if options.reward_clip is not None:
            scores_S = scores_S.clamp(-options.reward_clip, options.reward_clip)
        self.scores_S = self.rewards_S = scores_S
        self.rewards_R = self.at_end(scores_S)
        if state.kl_options.is_in("reward"):
            reference_R = self.of(scores.reference_logprobs)
            kl_R = state.kl_options.estimate(self.logprobs_R, reference_R)
            self.rewards_S = scores_S - self.sum(state.kl.coef * kl_R)
            self.rewards_R = self.rewards_R - state.kl.coef * kl_R
            state.metrics |= {"loss/kl": kl_R.mean().item(), "loss/kl_coef": state.kl.coef}
            state.kl.update(self.sum(kl_R).mean().item(), len(self.samples))

    def _measure_teacher(
        self, logprobs: Sequence[Sequence[float] | None], state: AdvantageState
    ) -> None:
        """The KL from the policy to its teachers, estimated by the tokens that have one."""
        has_teacher = zip(logprobs, self.lengths, strict=True)
        is_taught_R = self.of([[float(t is not None)] * length for t, length in has_teacher])
        if is_taught_R.any():
            kl = -self.teacher_gain_R.sum() / is_taught_R.sum()
            state.metrics["rollout/kl"] = kl.item()

    def measure_reference(self, logprobs: Sequence[Sequence[float]]) -> None:
        """The KL to the reference of the policy that sampled, by k3, whatever is trained with."""
        kl_R = estimate_kl(self.logprobs_R, self.of(logprobs), "k3")
        self._state.metrics["reference/kl"] = kl_R.mean().item()

    def _given_or_own(self, logprobs: Sequence[Sequence[float] | None] | None) -> Tensor | None:
        """(R,): where a sequence has no teacher nothing pulls, as its logprobs are the policy's."""
        if logprobs is None:
            return None
        given = zip(logprobs, self.parts, strict=True)
        return self.of([numbers or part.tokens.logprobs for numbers, part in given])

    @property
    def reward_parts(self) -> dict[str, Tensor]:
        """The parts of the scores by name, each (S,); 0 where a sample lacks it."""
        parts = [_score(sample).parts for sample in self.samples]
        names = dict.fromkeys(name for part in parts for name in part)
        return {
            name: torch.tensor([part.get(name, 0.0) for part in parts], dtype=torch.float64)
            for name in names
        }

    def of(self, per_token: Sequence[Sequence[float]]) -> Tensor:
        return join_numbers(per_token, "d")[self.learned_R]

    def sum(self, values_R: Tensor) -> Tensor:
        """(S,): over the rows of each sample."""
        zeros_S = values_R.new_zeros(len(self.samples))
        return zeros_S.index_add(0, self.sequence_R, values_R)

    def mean_of_group(self, values_S: Tensor) -> Tensor:
        """(S,): the mean over the samples of each sample's group."""
        return mean_by_group(values_S, self.groups_S)

    def at_end(self, values_S: Tensor) -> Tensor:
        """(R,): the sample's number on its last row, 0 on the rows before."""
        following_R = torch.cat([self.sequence_R[1:], self.sequence_R.new_full((1,), -1)])
        is_last_R = self.sequence_R != following_R[: len(self.sequence_R)]
        return torch.where(is_last_R, values_S[self.sequence_R], 0.0)

    def sequences(
        self,
        advantages: Tensor | Sequence,
        *,
        teacher_weight: float = 0.0,
        with_observations: bool = False,
    ) -> list[TrainingSequence]:
        """What is trained on: the advantages of samples, turns or tokens on every token.

        They are whitened if the options say so; then `teacher_weight` times log p_teacher - log p
        is added, and the sum is clipped. `with_observations` is for losses that read them.
        """
        advantages_R = self._by_token(advantages)
        self.check_finite(advantages_R)
        returns = None
        if self._options.needs_critic:  # which learns the return itself, as it is before whitening
            returns = self.lists(advantages_R + self.values_R)
        if self._options.is_whitened:
            advantages_R = standardise(advantages_R, torch.zeros_like(self.sequence_R))
        if teacher_weight:
            advantages_R = advantages_R + teacher_weight * self.teacher_gain_R
        if (most := self._options.advantage_clip) is not None:
            advantages_R = advantages_R.clamp(-most, most)
        self._state.metrics |= _spread(advantages_R)
        sequences = _sequences(self.parts, self.lists(advantages_R), returns, self._scores)
        if with_observations:
            return with_field(sequences, "observed", [part.tokens.observed for part in self.parts])
        return sequences

    @property
    def teacher_gain_R(self) -> Tensor:
        """log p_teacher - log p of each token, of which the mean is minus their KL."""
        return self.teacher_logprobs_R - self.logprobs_R

    def _by_token(self, advantages: Tensor | Sequence) -> Tensor:
        """From a number for each sample or token, or a list of numbers for each sample's turns."""
        if isinstance(advantages, Sequence) and advantages and isinstance(advantages[0], Sequence):
            return self.of(
                [[advantages[p.number][i] for i in p.tokens.segments] for p in self.parts]
            )
        advantages = torch.as_tensor(advantages, dtype=torch.float64)
        is_per_sample = len(advantages) == len(self.samples)
        is_per_token = len(advantages) == len(self.sequence_R)
        if is_per_token and (self._options.unit == PerToken or not is_per_sample):
            return advantages
        if is_per_sample:
            return advantages[self.sequence_R]
        raise UserError(
            f"{len(advantages)} advantages for {len(self.samples)} samples with "
            f"{len(self.sequence_R)} tokens; give one for each sample or each token, or a list "
            "for each sample with one for each turn"
        )

    def check_shape(self, found: Any, options: AdvantageOptions) -> None:
        """Refuse advantages of an estimator that are not what its return type says."""
        if options.unit == PerTurn:
            shape = [len(n) if isinstance(n, list) else n for n in found]
            expected = [len(s.turns) for s in self.samples]
        else:
            shape = tuple(getattr(found, "shape", ()))
            expected = (len(self.samples if options.unit == PerSample else self.sequence_R),)
        if shape != expected:
            unit = {PerSample: "sample", PerToken: "token with loss", PerTurn: "turn"}[options.unit]
            raise UserError(
                f"{where(options.chosen)}: advantage={options.advantage!r} returned a "
                f"{type(found).__name__} of shape {shape} instead of {expected}, a number for "
                f"each {unit} as its return type says"
            )

    def check_finite(self, advantages_R: Tensor) -> None:
        if (bad_R := ~advantages_R.isfinite()).any():
            first = bad_R.nonzero()[0, 0]
            raise UserError(
                f"advantage={self._options.advantage!r} gave {advantages_R[first].item()} to "
                f"{name_of(self.samples[self.sequence_R[first]])}, and numbers that are not finite "
                f"to {bad_R.sum().item()} of {len(bad_R)} tokens"
            )

    def lists(self, values_R: Tensor) -> list[list[float]]:
        """Per sequence and token, 0 where there is no loss."""
        flat_N = values_R.new_zeros(sum(self.lengths)).index_copy(0, self.learned_R, values_R)
        return [part.tolist() for part in flat_N.split(self.lengths)]


def _spread(advantages_R: Tensor) -> dict[str, float]:
    if not len(advantages_R):
        return {}
    return {
        "advantage/abs_mean": advantages_R.abs().mean().item(),
        "advantage/std": advantages_R.std(correction=0).item(),
        "advantage/zero_share": (advantages_R == 0).double().mean().item(),
    }


def _check_scores(
    options: AdvantageOptions, scores: ModelScores, kl: KLOptions, parts: list[Part]
) -> None:
    """Refuse what is missing, what nothing reads, and lists of the wrong length."""
    if kl.is_in("reward") and not options.reads_rewards:
        raise UserError(
            f"kl_in='reward' with advantage={options.advantage!r}, which reads no rewards; "
            "use kl_in='loss'"
        )
    wanted = {
        "values": options.needs_critic,
        "reference_logprobs": kl.is_in("reward"),
        # A teacher may also stand beside any other estimator.
        "teacher_logprobs": options.needs_teacher or scores.teacher_logprobs is not None,
        "reprompted_logprobs": options.needs_reprompts,
    }
    for name, is_wanted in wanted.items():
        given = getattr(scores, name)
        if is_wanted != (given is not None):
            verb, remedy = ("needs", "give") if is_wanted else ("does not read", "leave out")
            raise UserError(
                f"advantage={options.advantage!r} with kl_coef={kl.kl_coef} {verb} {name}; "
                f"{remedy} ModelScores({name}=...)"
            )
        if is_wanted:
            _check_lengths(name, given, parts)


def _check_lengths(name: str, lists: Sequence[Sequence | None], parts: list[Part]) -> None:
    if len(lists) != len(parts):
        raise UserError(f"{name} has {len(lists)} lists for {len(parts)} sequences")
    for values, part in zip(lists, parts, strict=True):
        if values is not None and len(values) != len(part.tokens.token_ids):
            raise UserError(
                f"{name} of {name_of(part.sample)} has {len(values)} entries for "
                f"{len(part.tokens.token_ids)} token_ids"
            )


def _turn_rewards(sample: Sample) -> list[float]:
    """An environment rewards turns; a question has one turn, with the reward of its reply."""
    if sample.prompt.is_question and len(sample.turns) == 1 and sample.score is not None:
        return [sample.score.value]
    return [turn.result.reward for turn in sample.turns]


def _score(sample: Sample) -> Score:
    if sample.score is None or not math.isfinite(sample.score.value):
        raise UserError(
            f"{name_of(sample)} has score {sample.score}; rewards must be finite numbers. "
            "Leave failed samples out; their `error` says why they failed"
        )
    return sample.score


def _sequences(
    parts: list[Part],
    advantages: list[list[float]],
    returns: list[list[float]] | None,
    scores: ModelScores,
) -> list[TrainingSequence]:
    references = scores.reference_logprobs
    return [
        TrainingSequence(
            id=name_of(part.sample),
            sample=part.number,
            token_ids=part.tokens.token_ids,
            loss_mask=part.loss_mask,
            logprobs=part.tokens.logprobs,
            reference_logprobs=list(references[i]) if references else [],
            advantages=advantages[i],
            values=list(scores.values[i]) if returns else [],
            returns=returns[i] if returns else [],
            segments=part.tokens.segments,
            experts=part.tokens.experts,
        )
        for i, part in enumerate(parts)
    ]
