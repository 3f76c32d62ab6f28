"""On-policy distillation: samples of the student, judged by a teacher. Generates in one process."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from roll_lite.chat import Chat
from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.engine import Engine
from roll_lite.envs.question import Question
from roll_lite.rollout.filters import drop_failed
from roll_lite.rollout.one_process import Rollout
from roll_lite.rollout.turns import derive_seed
from roll_lite.sync import sync_weights
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
        engine: Engine,
        chat: Chat,
        params: SamplingParams,
        num_samples: int,
        tokens_per_microbatch: int,
        seed: int,
    ):
        """`engine`, in the controller's process, has the weights that the trainer started from."""
        if trainer.role.ranks != (0,):
            raise ValueError(
                f"the student is on {len(trainer.role.ranks)} ranks, and on policy it samples in "
                "one process so far; start the run with `python`, or leave on_policy off"
            )
        self.trainer, self.teacher, self.engine, self.chat = trainer, teacher, engine, chat
        self.params, self.num_samples, self.seed = params, num_samples, seed
        self.tokens_per_microbatch = tokens_per_microbatch

    def __call__(
        self, prompts: Sequence[Prompt], num_updates: int
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """A batch sampled after so many updates, and its reverse KL to the teacher per token."""
        if self.engine.policy_version != num_updates:
            sync_weights(self.trainer, self.engine, version=num_updates)
        start = time.perf_counter()
        groups = self._sample(prompts, num_updates)
        sampled = time.perf_counter()
        sequences = self._judge(groups)
        num_tokens = sum(sum(sequence.loss_mask) for sequence in sequences)
        return pack(sequences, self.tokens_per_microbatch), {
            # An advantage is log p_teacher - log p_student.
            "rollout/kl": -sum(sum(sequence.advantages) for sequence in sequences) / num_tokens,
            "rollout/reply_tokens": fmean(sum(sequence.loss_mask) for sequence in sequences),
            "rollout/tokens_per_second": num_tokens / (sampled - start),
            "time/rollout": sampled - start,
            "time/teacher": time.perf_counter() - sampled,
        }

    def _sample(self, prompts: Sequence[Prompt], num_updates: int) -> list[Group]:
        # A seed of its own for every update: a resumed run samples as it would have.
        rollout = Rollout(
            engine=self.engine,
            chat=self.chat,
            make_env=partial(Question, reward=_unscored),
            seed=derive_seed(self.seed, num_updates),
        )
        groups = rollout.collect(prompts, num_samples=self.num_samples, params=self.params)
        return drop_failed(groups, min_samples=1)

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
