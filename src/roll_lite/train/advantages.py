"""Advantage estimators: from rewards to advantages.

An estimator of your own is a function named in ADVANTAGES, of this file or of one given with
--code. Its positional parameters name what it reads, in float64:

    rewards_S         score of each sample (normalised, clipped), minus the KL of its tokens
    rewards_R         the same by token: the score on the last one, minus the KL of each
    scores_S          score of each sample, without KL
    groups_S          the group of each sample, counted from 0
    sequence_R        the sample of each row
    logprobs_R        behaviour logprobs
    values_R          the critic's values; an estimator that reads them gets a critic
    turn_rewards      a list for each sample, with the reward of each turn
    observations      the same with the key of what the model saw before the turn
    teacher_logprobs_R  the teacher's logprobs of the same tokens
    reprompted_logprobs_R  the policy's logprobs of the same tokens after another prompt, which
                      AdvantageFacts(reprompt=...) makes
    reward_parts      the parts of the scores by name, each a tensor (S,); 0 where a sample lacks it

S counts samples. R counts rows: the tokens with loss, of all samples end to end. Keyword-only
parameters are its options on the command line. The return type says what an advantage belongs to.
What else the loop must know of it, AdvantageFacts say above the function.

Tensors come as arguments and are changed by their methods: the options are read without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typing_extensions import Doc

from roll_lite.checks import AtLeast, AtMost, UserError, above, read_only_if
from roll_lite.options import FunctionOptions, facts_of, hints_of, where
from roll_lite.types import Group, Message, Prompt, has_equal_rewards

if TYPE_CHECKING:
    from torch import Tensor

EQUAL = 1e-12  # numbers of a smaller variance are the same number, but for rounding
EPSILON = 1e-6

INPUTS = (
    "rewards_S", "rewards_R", "scores_S", "groups_S", "sequence_R", "logprobs_R", "values_R",
    "teacher_logprobs_R", "reprompted_logprobs_R", "reward_parts", "turn_rewards", "observations",
)  # fmt: skip
REWARD_INPUTS = ("rewards_S", "rewards_R", "scores_S", "reward_parts", "turn_rewards")
PerSample = Annotated[Any, "a tensor (S,)"]
PerToken = Annotated[Any, "a tensor (R,)"]
PerTurn = Annotated[list[list[float]], "a list for each sample"]

DivideByStd = Annotated[bool, Doc("Divide by the group's standard deviation; off is Dr. GRPO.")]
Gamma = Annotated[float, Doc("Discount from token to token."), AtLeast(0), AtMost(1)]
TurnGamma = Annotated[float, Doc("Discount from turn to turn."), AtLeast(0), AtMost(1)]
Lam = Annotated[
    float,
    Doc("Lambda; 1 is return minus value, lower trusts the critic more."),
    AtLeast(0),
    AtMost(1),
]
Baseline = Annotated[
    Literal["none", "batch", "group"], Doc("Subtract the mean reward of the batch or group.")
]
StepWeight = Annotated[float, Doc("Weight of a turn's advantage beside the episode's.")]


@dataclass(frozen=True, kw_only=True)
class AdvantageFacts:
    """What the loop must know of an estimator, said above it: @AdvantageFacts(whitened=True)."""

    whitened: bool = False
    """Its advantages are whitened over the batch's tokens, unless --no-whiten."""
    compares_group: bool | Callable[..., bool] | None = None
    """Whether a sample alone in its group has nothing to learn from. It may depend on the
    estimator's options; None is whether it reads groups_S."""
    same_for_sample: Callable[..., bool] | None = None
    """With which of its options a PerToken estimator gives all tokens of a sample one advantage,
    where there is no KL in the reward; None is never."""
    nothing_to_learn: Callable[..., bool] | None = None
    """Whether all advantages of a group are 0, for --drop-equal; it may read options of the
    estimator. None: a PerSample estimator that compares rewards learns nothing from equal ones; of
    any other it is not known."""
    reprompt: Callable[[Prompt], tuple[Message, ...] | None] | None = None
    """Other messages in the place of a prompt, for reprompted_logprobs_R; None: this prompt has
    none."""

    def __call__(self, estimator: Callable) -> Callable:
        estimator.facts = self
        return estimator


NO_FACTS = AdvantageFacts()


def no_turn_was_rewarded(group: Group) -> bool:
    """A question's only turn has the reward of its reply, which is compared."""
    if group.prompt.is_question:
        return has_equal_rewards(group)
    return not any(turn.result.reward for sample in group.samples for turn in sample.turns)


def grpo(rewards_S, groups_S, *, divide_by_std: DivideByStd = True) -> PerSample:
    """Reward minus the group's mean, over its (sample) standard deviation.

    Equal rewards, or a group of one, give 0. Without the division this is Dr. GRPO.
    """
    return standardise(rewards_S, groups_S, divide_by_std=divide_by_std)


def rloo(rewards_S, groups_S) -> PerSample:
    """Reward minus the mean of the group's other rewards; a group of one gives 0."""
    centred_S, _, count_S = moments_by_group(rewards_S, groups_S)
    return centred_S * count_S / (count_S - 1).clamp(min=1)


def lite_ppo(rewards_S, groups_S) -> PerSample:
    """Reward minus the group's mean, over the standard deviation of the whole batch."""
    centred_S, _, _ = moments_by_group(rewards_S, groups_S)
    return standardise(rewards_S, 0 * groups_S, centred_S=centred_S)


@AdvantageFacts(
    whitened=True,
    compares_group=lambda baseline, **_: baseline == "group",
    same_for_sample=lambda gamma, **_: gamma == 1,
)
def reinforce(
    rewards_R,
    sequence_R,
    scores_S,
    groups_S,
    *,
    gamma: Gamma = 1.0,
    baseline: Baseline = "none",
) -> PerToken:
    """Discounted return, minus a baseline."""
    returns_R = discounted_returns(rewards_R, sequence_R, gamma)
    if baseline == "none":
        return returns_R
    peers_S = 0 * groups_S if baseline == "batch" else groups_S
    mean_S = scores_S - moments_by_group(scores_S, peers_S)[0]
    return returns_R - mean_S[sequence_R]


@AdvantageFacts(whitened=True, same_for_sample=lambda gamma: gamma == 1)
def reinforce_plus_plus(rewards_R, sequence_R, *, gamma: Gamma = 1.0) -> PerToken:
    """Discounted return; whitened over the batch unless the options say otherwise."""
    return discounted_returns(rewards_R, sequence_R, gamma)


def gae(rewards_R, values_R, sequence_R, *, gamma: Gamma = 1.0, lam: Lam = 0.95) -> PerToken:
    """Generalised advantage estimation. The value after the last row is 0.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}
    """
    has_next_R = sequence_R == sequence_R.roll(-1)
    has_next_R[-1:] = False
    next_R = values_R.roll(-1).where(has_next_R, 0.0)
    delta_R = rewards_R + gamma * next_R - values_R
    return discounted_returns(delta_R, sequence_R, gamma * lam)


@AdvantageFacts(nothing_to_learn=no_turn_was_rewarded)
def gigpo(
    turn_rewards,
    observations,
    groups_S,
    *,
    gamma: TurnGamma = 0.95,
    step_weight: StepWeight = 1.0,
    divide_by_std: DivideByStd = True,
) -> PerTurn:
    """The episode's advantage in its group, plus that of the turn among its peers.

    Peers are the turns of the group that began with the same observation; they are compared by
    their discounted returns. The episode's reward is the sum of its turns' rewards.
    """
    lengths = [len(rewards) for rewards in turn_rewards]
    sample_N = groups_S.new_tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    rewards_N = groups_S.double().new_tensor([r for rewards in turn_rewards for r in rewards])
    totals_S = rewards_N.new_zeros(len(lengths)).index_add(0, sample_N, rewards_N)
    groups_N = groups_S[sample_N].tolist()
    keys = zip(groups_N, [key for sample in observations for key in sample], strict=True)
    numbers: dict[Hashable, int] = {}
    peers_N = groups_S.new_tensor([numbers.setdefault(key, len(numbers)) for key in keys])
    returns_N = discounted_returns(rewards_N, sample_N, gamma)
    episode_S = grpo(totals_S, groups_S, divide_by_std=divide_by_std)
    step_N = grpo(returns_N, peers_N, divide_by_std=divide_by_std)
    advantages_N = episode_S[sample_N] + step_weight * step_N
    return [part.tolist() for part in advantages_N.split(lengths)]


@AdvantageFacts(whitened=True)
def agentic_reinforce(turn_rewards, *, gamma: TurnGamma = 1.0) -> PerTurn:
    """Discounted return of the turns from this one on; whitened over the batch's tokens unless the
    options say otherwise."""
    return [
        list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]
        for rewards in turn_rewards
    ]


def opd(logprobs_R, teacher_logprobs_R) -> PerToken:
    """On-policy distillation: log p_teacher - log p_behaviour, which rewards play no part in."""
    return teacher_logprobs_R - logprobs_R


ADVANTAGES: dict[str, Callable] = {
    "grpo": grpo,
    "rloo": rloo,
    "lite_ppo": lite_ppo,
    "reinforce": reinforce,
    "reinforce++": reinforce_plus_plus,
    "gae": gae,
    "gigpo": gigpo,
    "agentic_reinforce": agentic_reinforce,
    "opd": opd,
}


def discounted_returns(rewards_R: Tensor, sequence_R: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, from each sequence's last row backwards."""
    if not len(rewards_R):
        return rewards_R
    counts_S = sequence_R.bincount()
    starts_S = counts_S.cumsum(0) - counts_S
    place_R = sequence_R.new_ones(len(sequence_R)).cumsum(0) - 1 - starts_S[sequence_R]
    # Sequences side by side: as many steps as the longest has rows. Zeros after an end stay zero.
    table_LS = rewards_R.new_zeros(int(counts_S.max()), len(counts_S))
    table_LS[place_R, sequence_R] = rewards_R
    for step in range(len(table_LS) - 2, -1, -1):
        table_LS[step] += gamma * table_LS[step + 1]
    return table_LS[place_R, sequence_R]


def sum_by_group(values_S: Tensor, groups_S: Tensor) -> Tensor:
    """Per sample: the sum over its group."""
    num_groups = int(groups_S.max()) + 1 if len(groups_S) else 0
    return values_S.new_zeros(num_groups).index_add(0, groups_S, values_S)[groups_S]


def size_by_group(groups_S: Tensor) -> Tensor:
    """Per sample: how many samples its group has."""
    return groups_S.bincount()[groups_S]


def mean_by_group(values_S: Tensor, groups_S: Tensor) -> Tensor:
    """Per sample: the mean over its group."""
    return sum_by_group(values_S, groups_S) / size_by_group(groups_S)


def moments_by_group(rewards_S: Tensor, groups_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per sample: reward minus its group's mean, the group's variance (n - 1) and its size."""
    rewards_S = rewards_S.double()
    count_S = size_by_group(groups_S).double()
    centred_S = rewards_S - mean_by_group(rewards_S, groups_S)
    squares_S = sum_by_group(centred_S.square(), groups_S)
    return centred_S, squares_S / (count_S - 1).clamp(min=1), count_S


def standardise(
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    divide_by_std: bool = True,
    centred_S: Tensor | None = None,
) -> Tensor:
    """Minus the group's mean, over its (sample) standard deviation; equal numbers give 0.

    `centred_S` replaces the difference to the mean.
    """
    own_S, variance_S, _ = moments_by_group(rewards_S, groups_S)
    centred_S = own_S if centred_S is None else centred_S
    scale_S = variance_S.sqrt() + EPSILON if divide_by_std else 1.0
    return (centred_S / scale_S).masked_fill(variance_S < EQUAL, 0.0)


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(FunctionOptions):
    """Advantages: how the reward of a sample becomes the advantage of its tokens."""

    advantage: str = "grpo"
    """Advantage estimator; gae trains a critic."""
    whiten: bool | None = None
    """Whiten advantages over the batch's tokens; left open, as the estimator says."""
    advantage_clip: float | None = None
    """Clip advantages to this magnitude, after whitening."""
    reward_norm: Literal["none", "batch", "group", "running"] = "none"
    """Rewards minus mean, over standard deviation: of the batch, the group, or all so far."""
    reward_clip: float | None = None
    """Clip rewards to this magnitude, after normalisation."""

    TABLE: ClassVar = ADVANTAGES
    CHOICE: ClassVar = "advantage"

    def __post_init__(self):
        self.check_function()
        _ = self.inputs, self.unit  # refuse a wrong signature
        above(0, self, "reward_clip", "advantage_clip")
        condition = f"an advantage that reads rewards, not {self.advantage!r}"
        read_only_if(self.reads_rewards, condition, self, "reward_norm", "reward_clip")

    @property
    def facts(self) -> AdvantageFacts:
        return facts_of(self.chosen, NO_FACTS)

    @property
    def open_defaults(self) -> dict[str, Any]:
        """What the estimator says of options that are left open."""
        return {"whiten": self.facts.whitened}

    def estimate(self, rows: Any) -> Tensor | list[list[float]]:
        """The advantages of `Rows`: a number for each sample, turn or token."""
        found = self.function(*(getattr(rows, name) for name in self.inputs))
        rows.check_shape(found, self)
        return found

    @property
    def inputs(self) -> list[str]:
        """What the estimator reads: its positional parameters."""
        parameters = inspect.signature(self.chosen).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if unknown := [name for name in names if name not in INPUTS]:
            raise UserError(
                f"{where(self.chosen)}: advantage {self.advantage} asks for {', '.join(unknown)}; "
                f"the positional parameters of an estimator are among {', '.join(INPUTS)}, options "
                "keyword-only"
            )
        return names

    @property
    def reads_rewards(self) -> bool:
        return not {"rewards_S", "rewards_R", "scores_S"}.isdisjoint(self.inputs)

    def differs_by_token(self, kl_in_reward: bool) -> bool:
        """Whether the tokens of a sequence may have different advantages."""
        if self.unit == PerSample:
            return False
        is_same = self.facts.same_for_sample
        return kl_in_reward or is_same is None or not is_same(**self.values)

    @property
    def reads_turns(self) -> bool:
        return "turn_rewards" in self.inputs

    @property
    def needs_teacher(self) -> bool:
        return "teacher_logprobs_R" in self.inputs

    @property
    def needs_reprompts(self) -> bool:
        return "reprompted_logprobs_R" in self.inputs

    @property
    def needs_rewards(self) -> bool:
        """Whether every prompt needs a reward; no, where a model teaches and nothing reads one."""
        is_taught = self.needs_teacher or self.needs_reprompts
        return not is_taught or not {*REWARD_INPUTS}.isdisjoint(self.inputs)

    @property
    def needs_critic(self) -> bool:
        return "values_R" in self.inputs

    @property
    def is_whitened(self) -> bool:
        return self.facts.whitened if self.whiten is None else self.whiten

    @property
    def unit(self) -> object:
        """What an advantage belongs to: PerSample, PerTurn or PerToken."""
        unit = hints_of(self.chosen).get("return")
        if unit not in (PerSample, PerTurn, PerToken):
            raise UserError(
                f"{where(self.chosen)}: advantage {self.advantage} needs a return type, one of "
                "rl.PerSample, rl.PerTurn and rl.PerToken, as in -> rl.PerSample"
            )
        return unit

    @property
    def compares_samples(self) -> bool:
        """Whether a sample alone in its group has nothing to learn from."""
        compares = self.facts.compares_group
        if compares is None:
            compares = "groups_S" in self.inputs
        elif callable(compares):
            compares = compares(**self.values)
        return compares or self.reward_norm == "group"

    @property
    def nothing_to_learn(self) -> Callable[[Group], bool] | None:
        """Whether a group has no advantage; None if its rewards do not tell."""
        if self.facts.nothing_to_learn:
            read = inspect.signature(self.facts.nothing_to_learn).parameters
            options = {name: value for name, value in self.values.items() if name in read}
            return partial(self.facts.nothing_to_learn, **options)
        compares_rewards = {*self.inputs} <= {"rewards_S", "scores_S", "groups_S"}
        is_plain = self.unit == PerSample and self.compares_samples and compares_rewards
        return has_equal_rewards if is_plain else None
