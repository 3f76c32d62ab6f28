"""Models that score replies: a judge, which says if one is right, and a reward model, which gives a
number. Both compute together what arrives together."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.engine.request import Request
from roll_lite.rollout.engines import EngineClient
from roll_lite.rollout.prompts import derive_seed
from roll_lite.train.batch import pack, unpack
from roll_lite.train.sequences import TrainingSequence
from roll_lite.types import Message, Prompt, SamplingParams, Score

VERDICTS: Mapping[str, float] = {"yes": 1.0, "no": 0.0}
QUESTION = """\
Is the answer right? Compare it with the reference; how it is worded does not matter.

Question:
{question}

Reference:
{reference}

Answer:
{answer}

Think if you need to. The last line of your reply must be one word: yes or no."""


class VerdictError(UserError):
    """The judge's reply does not end with a verdict."""


def judge_messages(prompt: Prompt, reply: str) -> tuple[Message, ...]:
    """One message for the judge with the question, the reference and the answer."""
    question = "\n\n".join(message["content"] for message in prompt.messages)
    text = QUESTION.format(question=question, reference=prompt.ground_truth, answer=reply)
    return ({"role": "user", "content": text},)


def parse_verdict(text: str, verdicts: Mapping[str, float] = VERDICTS) -> float:
    """The value of the last line, which must be a verdict; punctuation around it is ignored."""
    lines = text.strip().splitlines()
    found = re.search(r"\w(.*\w)?", lines[-1]) if lines else None
    word = found[0].casefold() if found else ""
    if word not in verdicts:
        raise VerdictError(
            f"the judge's last line is {lines[-1][:80]!r} instead of {' or '.join(verdicts)}"
            if lines
            else "the judge said nothing"
        )
    return verdicts[word]


class Judge(EngineClient):
    """Asks a model whether a reply is right. Pass it to the Coordinator in `reward_engines`."""

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
        """The first verdict is greedy. One that cannot be parsed is sampled again, up to
        `max_tries` tries in all.
        """
        super().__init__(engines)
        self._chat = chat
        self._messages = messages
        self._verdicts = verdicts
        self._max_tries = max_tries
        self._seed = seed
        greedy = SamplingParams(max_tokens=max_tokens, stop_ids=chat.stop_ids, temperature=0.0)
        self._params = [greedy, replace(greedy, temperature=1.0)]

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        token_ids = self._chat.encode_quoted(self._messages(prompt, reply))
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
    """Scores a reply by a model with a scalar head, at the reply's last token."""

    def __init__(self, scorer: RoleHandle, chat: Chat, *, tokens_per_microbatch: int = 16384):
        """`scorer` is a role of `Scorer(head="value")`; `chat` has the same folder."""
        self._values = scorer.values
        self._chat = chat
        self._budget = tokens_per_microbatch
        self._waiting: list[tuple[TrainingSequence, asyncio.Future]] = []
        self._task: asyncio.Task | None = None
        self._numbers = count()

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        said = (*prompt.messages, {"role": "assistant", "content": reply})
        token_ids = self._chat.encode_quoted(said, add_generation_prompt=False)
        if len(token_ids) > self._budget:
            raise UserError(
                f"prompt {prompt.id} and its reply have {len(token_ids)} tokens, more than the "
                f"reward model's tokens_per_microbatch={self._budget}"
            )
        # A row predicts the next token, so one more token makes the last one a row.
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
        """Requests that arrive while the model is busy form its next batch."""
        while self._waiting:
            batch = self._waiting
            self._waiting = []
            sequences = [sequence for sequence, _ in batch]
            try:
                values = await self._score(sequences)
            except Exception as error:  # of any kind: every waiting sample must get it
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
