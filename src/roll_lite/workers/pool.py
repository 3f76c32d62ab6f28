"""The coordinator's side of reward workers: `await workers.score(prompt, reply)`."""

import asyncio
import bdb
import inspect
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe

from roll_lite.rewards.combine import is_async
from roll_lite.types import AsyncReward, Prompt, Reward, Score
from roll_lite.workers.failures import ErrorBudget, RewardFailure, describe
from roll_lite.workers.loading import pack_rewards
from roll_lite.workers.waiting import WaitingCalls
from roll_lite.workers.worker import WorkerLimits, checked

Answer = tuple[float, Score | RewardFailure]
"""Seconds that the call took, and its result."""

_CLOSE_SECONDS = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from roll_lite.workers.supervisor import serve; serve({descriptor})"
)


class RewardWorkers:
    """Processes that call the reward of a prompt's domain.

    A call that hangs, crashes or breaks a limit fails with RewardTimeout or RewardCrash, and its
    worker is replaced. An exception of the reward is raised here, with its traceback as a note.
    Rewards that are `async def` are awaited in a thread of this process, many at once.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward | AsyncReward],
        *,
        num_workers: int = 4,
        max_waiting: int = 256,
        seconds: float = 10.0,
        memory_gib: float = 2.0,
        output_kib: int = 1024,
        max_error_share: float = 0.2,
    ):
        """Rewards must be importable by name; the limits are described in `WorkerLimits`.

        num_workers=0 calls rewards inline and without limits, for a debugger. Of async rewards
        at most `max_waiting` calls run at once. `score` raises RewardsBroken when more than
        max_error_share of the last 200 replies failed.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be 0 (inline) or above")
        limits = WorkerLimits(seconds=seconds, memory_gib=memory_gib, output_kib=output_kib)
        self._has_quit = False
        self._rewards, self._budget = dict(rewards), ErrorBudget(max_error_share)
        self._supervisor = self._waiting = None
        self._async = {domain for domain in self._rewards if is_async(self._rewards[domain])}
        in_workers = {d: reward for d, reward in self._rewards.items() if d not in self._async}
        if num_workers and in_workers:
            self._supervisor = SupervisorLink(in_workers, num_workers, limits)
        if num_workers and self._async:
            self._waiting = WaitingCalls(seconds, max_waiting)

    async def score(self, prompt: Prompt, reply: str) -> Score:
        """From any event loop. RewardsBroken ends the run; any other exception fails one call."""
        if prompt.domain not in self._rewards:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, for which there is no reward; "
                f"known domains: {', '.join(sorted(self._rewards))}"
            )
        reward = self._rewards[prompt.domain]
        if self._supervisor is None and self._waiting is None:
            return await self._score_inline(reward, prompt, reply)
        if prompt.domain in self._async:
            seconds, result = await self._waiting.answer(reward, prompt, reply)
        else:
            seconds, result = await asyncio.wrap_future(self._supervisor.submit(prompt, reply))
        failure = result if isinstance(result, RewardFailure) else None
        self._budget.record(prompt, reply, seconds, failure)
        if failure:
            raise failure.exception()
        return result

    def metrics(self) -> dict[str, float]:
        return self._budget.metrics()

    def close(self) -> None:
        """Kill all workers; running calls fail with RewardCrash."""
        for part in (self._supervisor, self._waiting):
            if part:
                part.close()

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score_inline(self, reward: Reward, prompt: Prompt, reply: str) -> Score:
        if self._has_quit:
            raise bdb.BdbQuit
        start = time.monotonic()
        try:
            score = reward(prompt, reply)
            score = checked(await score if inspect.isawaitable(score) else score)
        except bdb.BdbQuit:  # the user quits the debugger, and not only for this sample
            self._has_quit = True
            raise
        except Exception as error:  # user code may raise anything
            self._budget.record(prompt, reply, time.monotonic() - start, describe(error))
            raise
        self._budget.record(prompt, reply, time.monotonic() - start, None)
        return score


class SupervisorLink:
    """Starts the supervisor process, and matches its answers to the calls."""

    def __init__(self, rewards: Mapping[str, Reward], num_workers: int, limits: WorkerLimits):
        """Raises RuntimeError if the supervisor cannot import the rewards."""
        setup = pack_rewards(rewards), num_workers, limits
        self._connection, theirs = Pipe()
        path = [str(folder) or os.getcwd() for folder in sys.path]
        start = _START.format(path=path, descriptor=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C interrupts only the coordinator, which then closes
            # Libraries start threads on import, and threads do not survive a fork.
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
        )
        theirs.close()
        self._connection.send(setup)
        self._check_imports()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pending: dict[int, Future[Answer]] = {}
        self._reader = threading.Thread(target=self._read, name="reward answers", daemon=True)
        self._reader.start()

    def submit(self, prompt: Prompt, reply: str) -> "Future[Answer]":
        """From any thread."""
        future: Future[Answer] = Future()
        payload = pickle.dumps((prompt, reply))
        with self._lock:
            call_id = next(self._ids)
            self._pending[call_id] = future
            try:
                self._connection.send((call_id, payload))
            except OSError:  # the supervisor has ended; the reader fails the earlier calls
                self._fail(call_id)
        return future

    def close(self) -> None:
        with self._lock, suppress(OSError):  # the supervisor may have ended already
            self._connection.send(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()

    def _check_imports(self) -> None:
        try:
            problem = self._connection.recv()
        except EOFError:
            problem = "the supervisor process has ended"
        if problem:
            self._connection.close()
            self._process.wait()
            raise RuntimeError(f"workers cannot import the rewards: {problem}")

    def _read(self) -> None:
        while True:
            try:
                call_id, seconds, result = self._connection.recv()
            except (EOFError, OSError):
                break
            self._resolve(call_id, (seconds, pickle.loads(result)))
        with self._lock:
            for call_id in list(self._pending):
                self._fail(call_id)

    def _resolve(self, call_id: int, answer: Answer) -> None:
        future = self._pending.pop(call_id)
        if future.set_running_or_notify_cancel():  # False if the caller cancelled the call
            future.set_result(answer)

    def _fail(self, call_id: int) -> None:
        failure = RewardFailure("crash", "the supervisor of the reward workers has ended")
        self._resolve(call_id, (0.0, failure))
