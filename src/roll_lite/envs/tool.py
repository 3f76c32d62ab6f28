"""A question with a Python tool: a reply that calls it reads the output, any other is scored.

An example of an environment that is a coroutine.
"""

import asyncio
import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from roll_lite.checks import UserError
from roll_lite.envs.env import Conversation
from roll_lite.rewards.maths import math_answer
from roll_lite.sandbox.sandbox import Isolation, Limits, Outcome, run_program
from roll_lite.types import Message, Prompt, Score

STOP = "</python>"
_CALLS = (("<python>", STOP), ("```python\n", "```"))
"""What may enclose a program."""
HELD_OUT_SHARE = 0.1
"""Rows of a file that only held-out tasks ask."""


async def python_tool(
    chat: Conversation,
    task: Prompt,
    *,
    data: str = "",
    max_calls: int = 1,
    seconds: float = 5.0,
    max_output: int = 1000,
    isolation: Isolation = "full",
) -> Score:
    """Asks a row of the file `data`, which has prompt and ground_truth; without it, a product."""
    question = draw_row(data, task) if data else draw_product(task.seed)
    messages = _with_rules(question.messages, max_calls)
    num_calls = 0
    while True:
        reply = await chat(messages, stop=(STOP,))
        program = call_of(reply["content"])
        if program is None or num_calls == max_calls:
            break
        limits = Limits(seconds=seconds)
        outcome = await asyncio.to_thread(run_program, program, isolation=isolation, limits=limits)
        num_calls += 1
        chat.result(sum={"tool_calls": 1.0, "tool_errors": float(outcome.kind != "ok")})
        shown = show(outcome, max_output, num_left=max_calls - num_calls)
        messages = [*messages, reply, {"role": "user", "content": shown}]
    if chat.finish_reason == "length":
        question = replace(question, extra=question.extra | {"finish_reason": "length"})
    score = math_answer(question, reply["content"])
    chat.result(sum={"tool_calls": 0.0, "tool_errors": 0.0}, last={"success": score.value})
    return score


def call_of(reply: str) -> str | None:
    r"""The last program of a reply; None if there is none, or a \boxed answer after it."""
    for opening, closing in _CALLS:
        _, opened, rest = reply.rpartition(opening)
        program, closed, after = rest.partition(closing)
        if opened and closed and r"\boxed" not in after:
            return program.strip()
    return None


def show(outcome: Outcome, max_output: int, num_left: int) -> str:
    """For a user's message, as not every chat template has a role for tools."""
    text = (outcome.stdout + outcome.stderr).strip() or "It printed nothing."
    if len(text) > max_output:
        text = f"{text[:max_output]}\n[{len(text) - max_output} more characters]"
    end = "" if outcome.kind in ("ok", "error") else f"\n[stopped: {outcome.kind} limit]"
    return f"<output>\n{text}{end}\n</output>\nRuns left: {num_left}."


def draw_product(seed: int) -> Prompt:
    """A product of two numbers that is tedious without a tool."""
    a, b = Random(seed).sample(range(1000, 10000), 2)
    return _question(f"product-{seed}", f"What is {a} * {b}?", str(a * b))


def draw_row(path: str, task: Prompt) -> Prompt:
    """The row of a task: held-out tasks have rows of their own, which depend on the text alone."""
    rows = _read_rows(path)[task.extra.get("split") == "held_out"]
    return Random(task.seed).choice(rows)


@cache
def _read_rows(path: str) -> tuple[list[Prompt], list[Prompt]]:
    """The questions of a file: to train on, and held out."""
    found: tuple[list[Prompt], list[Prompt]] = ([], [])
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        row = _read_row(f"{path} line {number}", line)
        digest = hashlib.blake2b(json.dumps(row.messages).encode(), digest_size=8).digest()
        found[int.from_bytes(digest) < HELD_OUT_SHARE * 2**64].append(row)
    if not all(found):
        raise UserError(f"{path} has too few rows to hold out a share of {HELD_OUT_SHARE}")
    return found


def _read_row(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
        return _question(where, row["prompt"], str(row["ground_truth"]))
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{where}: {line:.80} is not a row with prompt and ground_truth, as in "
            '{"prompt": "What is 6 * 7?", "ground_truth": "42"}'
        ) from None


def _question(id: str, text: str | list[Message], truth: str) -> Prompt:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return Prompt(id=id, messages=tuple(messages), domain="math", ground_truth=truth)


def _with_rules(messages: tuple[Message, ...], max_calls: int) -> list[dict[str, Any]]:
    *earlier, last = messages
    rules = (
        f"You may run Python programs, {max_calls} at most: write one as <python> program {STOP}, "
        "end your reply there, and you are shown what it prints. Otherwise reply with the final "
        r"answer in \boxed{}."
    )
    return [*earlier, last | {"content": f"{last['content']}\n\n{rules}"}]
