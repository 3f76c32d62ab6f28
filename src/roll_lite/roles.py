"""The models of a run, each a role on its ranks, and which of those that share a device has it."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import Method, RoleHandle, split
from roll_lite.engine.engine import OnNewWeights
from roll_lite.engine.service import EngineService
from roll_lite.models.cost import SequenceCost
from roll_lite.report.digests import digest_text
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.sync import SharingService, WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.reprompting import Reprompt, at_sampled_places, reprompted_sequences
from roll_lite.train.scorer import score_over_ranks
from roll_lite.train.sequences import TrainingSequence, plain_sequences
from roll_lite.train.trainer import note_numbers
from roll_lite.types import Group


class Roles:
    """Roles of the cluster, as the recipe adds them; the controller's part.

    Trainers and engines that share devices take turns:

    |          | engines (engines_sleep) | trainers (offload)                             |
    |----------|-------------------------|------------------------------------------------|
    | generate | weights and KV cache    | in host memory                                 |
    | train    | nothing                 | on the device                                  |
    | sync     | weights, which are new  | a policy without adapters; others leave before |

    Without the option in brackets that side stays on the device. A policy with adapters is as large
    as the engine, and its frozen weights are on the host anyway: the engine reads them from there.
    Where both hold the same parts, they share the frozen weights, which stay on the device, and the
    adapters are there for the sync.
    """

    policy: RoleHandle
    """What is trained, and exported at the end."""
    engines: RoleHandle | None = None
    critic: RoleHandle | None = None
    reference: RoleHandle | None = None

    def __init__(
        self,
        cluster: Cluster,
        *,
        engines_sleep: bool = False,
        offload: bool = False,
        on_new_weights: OnNewWeights = "go_on",
        tokens_per_microbatch: int = 16384,
    ):
        self.cluster = cluster
        self._budget = tokens_per_microbatch
        self._sleeps = engines_sleep
        self._offloads = offload
        self._on_new_weights = on_new_weights
        self._taking_turns: list[RoleHandle] = []
        self._source: RoleHandle | None = None
        """The policy, if it stays until the engines have its weights."""
        self._sync: RoleHandle | None = None
        self._shares = False
        """Whether engines compute with the frozen weights of the policy."""
        self.teachers: dict[str, RoleHandle] = {}
        """By the domain of the prompts that each teaches; the empty name is for all others."""
        self.on_phase: Callable[[str], None] = lambda phase: None
        """Called with the name of the phase that a step enters."""
        self.seconds: dict[str, float] = {}
        """Seconds of each part of the last hand-over of devices."""
        self._digests: dict[str, str] = {}
        self.digest_seconds = 0.0
        """Of the last digests."""
        if engines_sleep or offload:
            self._check_shared("engines_sleep" if engines_sleep else "offload")

    def _check_shared(self, option: str) -> None:
        device_map = self.cluster.device_map
        if set(device_map["train"].ranks).isdisjoint(device_map["generate"].ranks):
            raise UserError(
                f"{option}=True is for ranks that train and generate in turn, and device_map="
                f"{device_map.text!r} has none; leave it out"
            )

    @property
    def trained(self) -> list[RoleHandle]:
        return [self.policy, self.critic] if self.critic else [self.policy]

    def add(
        self, name: str, kind: type, *, stays_for_sync: bool = False, **options: Any
    ) -> RoleHandle:
        """A role that only works between generations; it leaves the device for the next role."""
        shares = name == "train" and bool(options.get("lora")) and self._has_one_copy()
        if shares:
            options["is_shared"] = self._shares = True
        role = self.cluster.role(name, kind, **options)
        self._taking_turns.append(role)
        if stays_for_sync or shares:
            self._source = role
        if self._offloads:
            role.offload()
        return role

    def _has_one_copy(self) -> bool:
        return self.cluster.device_map.shares_weights

    def add_engines(self, **options: Any) -> RoleHandle:
        """The engines, which have the devices until `to_training`."""
        kind = SharingService if self._shares else EngineService
        engines = self.cluster.role("generate", kind, **options)
        print(engines.describe())
        self._sync = self.cluster.role("sync", WeightSync)
        return engines

    def to_training(self) -> None:
        """Generation has ended, for the next update."""
        self.on_phase("prepare")
        self.seconds = {}
        if self._sleeps:
            self._timed("sleep", self.engines.sleep)
        if self._offloads:
            self._timed("reload", *(role.reload for role in self._taking_turns))

    def score(self, name: str, groups: list[Group]) -> list[list[float] | None]:
        """What a model says of each token: logprobs under the policy, the reference or the teacher
        of the prompt's domain, values of the critic. A list for each of `plain_sequences(groups)`.
        """
        sequences = plain_sequences(groups, with_experts=name == "policy")
        return self._score(name, groups, sequences)

    def score_reprompted(
        self, name: str, groups: list[Group], chat: Chat, reprompt: Reprompt | None
    ) -> list[list[float] | None]:
        """What `score` says of the same tokens after another first prompt, whose messages
        `reprompt` makes from a prompt; None for the sequences of a prompt without another."""
        longest = min(self._budget, self.policy.max_positions())
        moved = reprompted_sequences(groups, chat, reprompt, longest)
        method = self.policy.whole_logprobs if name == "policy" else None
        scored = iter(self._score(name, groups, list(filter(None, moved)), method))
        found = (next(scored) if sequence else None for sequence in moved)
        places = zip(found, plain_sequences(groups), strict=True)
        return [numbers and at_sampled_places(numbers, sequence) for numbers, sequence in places]

    def _score(
        self,
        name: str,
        groups: list[Group],
        sequences: list[TrainingSequence],
        method: Method | None = None,
    ) -> list[list[float] | None]:
        """Logprobs, or values of the critic, of some sequences of the groups' samples."""
        if name == "critic":
            return score_over_ranks(self.critic.values, sequences, self._budget)
        if name == "teacher":
            return self._taught(groups, sequences)
        role = getattr(self, name)
        if role is None:  # the policy is its own reference, without its adapters
            return score_over_ranks(self.policy.reference_logprobs, sequences, self._budget)
        return score_over_ranks(method or role.logprobs, sequences, self._budget)

    def _taught(
        self, groups: list[Group], sequences: list[TrainingSequence]
    ) -> list[list[float] | None]:
        """Logprobs under the teacher of each domain; None for sequences that have no teacher."""
        domains = [group.prompt.domain for group in groups for _ in group.samples]
        names = [domain if domain in self.teachers else "" for domain in domains]
        found: list[list[float] | None] = [None] * len(sequences)
        for name, teacher in self.teachers.items():
            places = [i for i, sequence in enumerate(sequences) if names[sequence.sample] == name]
            wanted = [sequences[i] for i in places]
            taught = score_over_ranks(teacher.logprobs, wanted, self._budget)
            for place, logprobs in zip(places, taught, strict=True):
                found[place] = logprobs
        return found

    def kl_to_teacher(self, groups: list[Group]) -> float:
        """KL from the policy to its teachers, in nats per token, estimated by the sampled tokens;
        between two steps, when engines have the devices."""
        done = [[s for s in group.samples if s.state == "done"] for group in groups]
        groups = [Group(prompt=g.prompt, samples=s) for g, s in zip(groups, done, strict=True)]
        teachers = self.teachers.values() if self._offloads else ()
        for teacher in teachers:
            teacher.reload()
        taught = self._taught(groups, plain_sequences(groups))
        for teacher in teachers:
            teacher.offload()
        parts = [part for group in groups for s in group.samples for part in s.sequences]
        return fmean(
            own - teachers_own
            for part, logprobs in zip(parts, taught, strict=True)
            if logprobs
            for own, teachers_own, is_sampled in zip(
                part.logprobs, logprobs, part.loss_mask, strict=True
            )
            if is_sampled
        )

    def train(
        self, trainer: RoleHandle, sequences: list[TrainingSequence], *,
        cost: SequenceCost, scheduled_at: int, is_recorded: bool = False, **pack_options: Any,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer update on the sequences, packed without padding into micro-batches of at
        most `tokens_per_microbatch` tokens. If they are recorded, it notes in them the entropies
        and mismatches of their tokens."""
        self.on_phase("train")
        shards = trainer.role.num_replicas
        batch = pack(sequences, self._budget, num_shards=shards, cost=cost, **pack_options)
        metrics = trainer.step(split(batch), scheduled_at=scheduled_at)[0]
        if is_recorded:
            note_numbers(trainer, batch, sequences)
        return metrics

    def sync(self, version: int, rollout: Coordinator) -> None:
        """New weights to the engines, and their version to the samples that follow."""
        self.on_phase("sync")
        self._digests = self._make_digests()  # before weights leave the device
        if self._offloads:
            first = (role for role in self._taking_turns if role is not self._source)
            self._timed("offload", *(role.offload for role in first))
        if self._sleeps:
            self._timed("wake", lambda: self.engines.wake("weights"))
        self._timed("sync", lambda: self._sync.sync(version, self._on_new_weights))
        if self._offloads and self._source:
            self._timed("offload", self._source.offload)
        if self._sleeps:
            self._timed("wake", self.engines.wake)
        rollout.set_version(version)

    def digests(self, *, with_frozen: bool = False) -> dict[str, str]:
        """Digests of the batches and gradients of the step that ends, and of the weights now."""
        found = self._digests or self._make_digests(with_frozen=with_frozen)
        self._digests = {}
        return found

    def _make_digests(self, **options: bool) -> dict[str, str]:
        found = {}
        self.digest_seconds = 0.0
        for role in self.trained:
            of_ranks = role.digests.options(collect="all")(**options)
            self.digest_seconds += max(of_rank.pop("seconds") for of_rank in of_ranks)
            prefix = "" if role is self.policy else "critic/"
            for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
                texts = [of_rank.get(name, "") for of_rank in of_ranks]
                found[prefix + name] = texts[0] if len(texts) == 1 else digest_text(name, texts)
        return found

    def digest(self) -> str:
        """A digest of the engines' weights; another text for other weights."""
        return "".join(sorted({*self._sync.digest.options(collect="all")()}))

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds of handing over, where memory changes hands; time/sync and time/prepare include
        them."""
        is_shared = self._sleeps or self._offloads
        return {f"colocated/{k}": v for k, v in self.seconds.items()} if is_shared else {}

    def _timed(self, name: str, *calls: Callable[[], Any]) -> None:
        start = time.perf_counter()
        for call in calls:
            call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
