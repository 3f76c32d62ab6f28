"""Rewards that are models on ranks of their own: a judge that is asked, a model with a scalar head.

Both are awaited like any other reward of a coordinator, one sample at a time; what comes together
is computed together.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from roll_lite.chat import Chat
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.engine.request import Request
from roll_lite.rewards.judging import VERDICTS, VerdictError, judge_messages, parse_verdict
from roll_lite.rollout.asking import Asking
from roll_lite.rollout.turns import derive_seed
from roll_lite.train.packing import TrainingSequence, pack, unpack
from roll_lite.types import Message, Prompt, SamplingParams, Score


class Judge(Asking):
    """Asks a model whether a reply is right. Give it to the coordinator as one of its `asked`."""

    def __init__(
        self,
        engines: RoleHandle,
        chat: Chat,
        *,
        max_tokens: int = 256,
        max_tries: int = 3,
        messages: Callable[[Prompt, str], tuple[Message, ...]] = judge_messages,
        verdicts: Mapping[str, float] = VERDICTS,
        seed: int = 0,
    ):
        """The likeliest verdict counts. One that cannot be read is asked for again, up to
        `max_tries` times in all, and sampled then.
        """
        super().__init__(engines)
        self._chat, self._messages, self._verdicts = chat, messages, verdicts
        self._max_tries, self._seed = max_tries, seed
        greedy = SamplingParams(max_tokens=max_tokens, stop_ids=chat.stop_ids, temperature=0.0)
        self._params = [greedy, replace(greedy, temperature=1.0)]

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        token_ids = self._chat.encode(self._messages(prompt, reply))
        for attempt in range(1, self._max_tries + 1):
            seed = derive_seed(self._seed, prompt.id, reply, attempt)
            params = self._params[attempt > 1]
            request = Request(prompt_ids=token_ids, params=params, seed=seed)
            turn = await self.ask(request)
            try:
                value = parse_verdict(self._chat.decode(turn.token_ids), self._verdicts)
            except VerdictError:
                if attempt == self._max_tries:
                    raise
            else:
                return Score(value=value, parts={"judge": value, "judge_tries": float(attempt)})
        raise AssertionError("the last try returns or raises")


class RewardModel:
    """The number that a model with a scalar head gives to a reply, at its last token."""

    def __init__(self, scorer: RoleHandle, chat: Chat, *, tokens_per_microbatch: int = 16384):
        """`scorer` is a role of `Scorer(head="value")`; `chat` is of its folder."""
        self._values, self._chat = scorer.values, chat
        self._budget = tokens_per_microbatch
        self._waiting: list[tuple[TrainingSequence, asyncio.Future]] = []
        self._task: asyncio.Task | None = None
        self._numbers = count()

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        said = (*prompt.messages, {"role": "assistant", "content": reply})
        token_ids = self._chat.encode_whole(said)
        if len(token_ids) > self._budget:
            raise ValueError(
                f"prompt {prompt.id} and its reply have {len(token_ids)} tokens, more than the "
                f"reward model's tokens_per_microbatch={self._budget}"
            )
        # A row belongs to the token before the one that has loss: one more makes the last a row.
        sequence = TrainingSequence(
            id=f"reply {next(self._numbers)} to prompt {prompt.id}",
            token_ids=[*token_ids, token_ids[-1]],
            loss_mask=[*([False] * len(token_ids)), True],
        )
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((sequence, future))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._answer_all())
        value = await future
        return Score(value=value, parts={"reward_model": value})

    async def _answer_all(self) -> None:
        """What has come while the model was busy is its next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            sequences = [sequence for sequence, _ in batch]
            try:
                values = await self._score(sequences)
            except Exception as error:  # of any kind: whoever waits has to hear of it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), value in zip(batch, values, strict=True):
                    if not future.done():
                        future.set_result(value)

    async def _score(self, sequences: list[TrainingSequence]) -> list[float]:
        packed = pack(sequences, self._budget, num_shards=self._values.role.num_replicas)
        replicas = await asyncio.wrap_future(self._values.start(split(packed)))
        rows = [rows_R for replica in replicas for rows_R in replica]
        return [numbers[-1] for numbers in unpack(packed, rows, sequences)]
