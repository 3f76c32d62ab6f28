"""The life of one sample: read, generate, step the environment, until the episode ends."""

import bdb
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable

from roll_lite.chat import Chat
from roll_lite.envs.env import Env
from roll_lite.types import Sample, Score, Turn

Generate = Callable[[list[int]], Awaitable[Turn]]
"""From the ids of a conversation to the model's next turn."""


async def run_sample(
    sample: Sample,
    env: Env,
    seed: int,
    chat: Chat,
    generate: Generate,
    version: Callable[[], int],
) -> None:
    """Drive one episode. An environment or reward that raises fails the sample, visibly."""
    total, parts = 0.0, Counter()
    try:
        messages, _ = env.reset(seed)
        token_ids = chat.encode(messages)
        while True:
            sample.enter("generating", version())
            turn = await generate(token_ids)
            sample.add_turn(turn)
            if turn.finish_reason == "abort":
                sample.enter("aborted", version())
                return
            if turn.finish_reason == "error":
                raise ArithmeticError("the model gave logits that are not finite")
            sample.reply = chat.decode(turn.token_ids)
            sample.enter("stepping", version())
            messages, reward, terminated, truncated, info = env.step(sample.reply)
            if not math.isfinite(reward):
                raise ValueError(f"reward={reward} is not a finite number")
            total += reward
            parts.update(info.get("parts", {}))
            if terminated or truncated:
                break
            token_ids = chat.continue_with(sample.token_ids, messages)
    except bdb.BdbQuit:  # the person at the debugger wants to leave
        raise
    except Exception:
        sample.error = traceback.format_exc()
        sample.enter("failed", version())
        return
    sample.score = Score(value=total, parts=dict(parts))
    sample.enter("done", version())
