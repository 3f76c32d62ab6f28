"""The life of one sample: read, generate, step the environment, until the episode ends."""

import bdb
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable

from roll_lite.chat import Chat
from roll_lite.cluster.errors import RoleError
from roll_lite.envs.env import Env, Observation
from roll_lite.types import Sample, Score, Turn
from roll_lite.workers.failures import RewardsBroken

ENDING = (bdb.BdbQuit, RewardsBroken, RoleError)
"""The person at the debugger wants to leave, going on is pointless, or a role is broken."""
Generate = Callable[[list[int]], Awaitable[Turn]]
"""From the ids of a conversation to the model's next turn; the sample is queued till it begins."""


async def run_sample(
    sample: Sample,
    env: Env,
    seed: int,
    chat: Chat,
    generate: Generate,
    version: Callable[[], int],
    max_retries: int = 0,
    on_retry: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Drive one episode. An environment or reward that goes on raising fails the sample, visibly.

    A step is tried again up to `max_retries` times, and `on_retry` is told of it.
    """
    total, parts = 0.0, Counter()
    try:
        messages, _ = env.reset(seed)
        token_ids = chat.encode(messages)
        while True:
            turn = await generate(token_ids)
            sample.add_turn(turn)
            if turn.finish_reason == "error":
                raise ArithmeticError("the model gave logits that are not finite")
            sample.reply = chat.decode(turn.token_ids)
            sample.enter(getattr(env, "step_state", "stepping"), version())
            messages, reward, is_over, info = await _step(sample, env, max_retries, on_retry)
            total += reward
            parts.update(info.get("parts", {}))
            if is_over:
                break
            token_ids = chat.continue_with(sample.token_ids, messages)
    except ENDING:
        raise
    except Exception:  # of any kind: it becomes the sample's error, and is counted
        sample.error = traceback.format_exc()
        sample.enter("failed", version())
        return
    sample.score = Score(value=total, parts=dict(parts))
    sample.enter("done", version())


async def _step(
    sample: Sample, env: Env, max_retries: int, on_retry: Callable[[Sample], None]
) -> tuple[Observation, float, bool, dict]:
    """The environment's answer to the sample's last turn; the last try may raise."""
    for _ in range(max_retries):
        try:
            return await _try_step(sample, env)
        except ENDING:
            raise
        except Exception:  # of any kind: rewards are the user's code
            on_retry(sample)
    return await _try_step(sample, env)


async def _try_step(sample: Sample, env: Env) -> tuple[Observation, float, bool, dict]:
    result = env.step(sample.reply)
    if inspect.isawaitable(result):
        result = await result
    messages, reward, terminated, truncated, info = result
    if not math.isfinite(reward):
        raise ValueError(f"reward={reward} is not a finite number")
    return messages, reward, terminated or truncated, info
