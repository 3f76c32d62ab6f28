"""On-policy distillation: samples of the student, judged by a teacher."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from roll_lite.chat import Chat
from roll_lite.cluster.role import RoleHandle
from roll_lite.envs.question import Question
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.groups import drop_failed
from roll_lite.rollout.options import RolloutOptions
from roll_lite.rollout.sample import derive_seed
from roll_lite.train.advantage_options import AdvantageOptions
from roll_lite.train.advantages import Evidence, with_advantages
from roll_lite.train.packing import MicroBatch, TrainingSequence, pack
from roll_lite.train.scoring import score_over_ranks
from roll_lite.types import Group, Prompt, SamplingParams


class JudgedSamples:
    """Batches of what the student samples; the advantage of a token is the teacher's opinion."""

    def __init__(
        self,
        *,
        trainer: RoleHandle,
        teacher: RoleHandle,
        engines: RoleHandle,
        sync: RoleHandle,
        chat: Chat,
        params: SamplingParams,
        num_samples: int,
        tokens_per_microbatch: int,
        seed: int,
    ):
        """`engines` have the weights that the trainer started from; `sync` brings new ones."""
        self.trainer, self.teacher, self.engines, self.sync = trainer, teacher, engines, sync
        self.chat = chat
        self._version = engines.version()
        self.params, self.num_samples, self.seed = params, num_samples, seed
        self.tokens_per_microbatch = tokens_per_microbatch

    def __call__(
        self, prompts: Sequence[Prompt], num_updates: int
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """A batch sampled after so many updates, and its reverse KL to the teacher per token."""
        if self._version != num_updates:
            self.sync.sync(num_updates)
            self._version = num_updates
        start = time.perf_counter()
        groups = self._sample(prompts, num_updates)
        sampled = time.perf_counter()
        sequences = self._judge(groups)
        num_tokens = sum(sum(sequence.loss_mask) for sequence in sequences)
        num_shards = self.trainer.role.num_replicas
        return pack(sequences, self.tokens_per_microbatch, num_shards=num_shards), {
            # An advantage is log p_teacher - log p_student.
            "rollout/kl": -sum(sum(sequence.advantages) for sequence in sequences) / num_tokens,
            "rollout/reply_tokens": fmean(sum(sequence.loss_mask) for sequence in sequences),
            "rollout/tokens_per_second": num_tokens / (sampled - start),
            "time/rollout": sampled - start,
            "time/teacher": time.perf_counter() - sampled,
        }

    def _sample(self, prompts: Sequence[Prompt], num_updates: int) -> list[Group]:
        with Coordinator(
            engines=self.engines,
            chat=self.chat,
            make_env=partial(Question, reward=_unscored),
            prompts=iter(()),
            params=self.params,
            options=RolloutOptions(samples_per_prompt=self.num_samples),
            # One of its own for every update: a resumed run samples as it would have.
            seed=derive_seed(self.seed, num_updates),
        ) as rollout:
            answered = rollout.answer(prompts, num_samples=self.num_samples, params=self.params)
        return drop_failed(answered, min_samples=1)

    def _judge(self, groups: list[Group]) -> list[TrainingSequence]:
        samples = [
            TrainingSequence(token_ids=sample.token_ids, loss_mask=sample.loss_mask)
            for group in groups
            for sample in group.samples
        ]
        judged = score_over_ranks(self.teacher.logprobs, samples, self.tokens_per_microbatch)
        evidence = Evidence(teacher_logprobs=[judged])
        return with_advantages(groups, AdvantageOptions(kind="opd"), evidence)


def _unscored(prompt: Prompt, reply: str) -> float:
    return 0.0
