"""Tries, beside a run, which prompts a program that does nothing passes."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from roll_lite.rewards import do_nothing
from roll_lite.types import Prompt, Reward
from roll_lite.workers.pool import RewardWorkers

IDLE_SECONDS = 0.05
"""Between two looks for a worker without a job."""


class DoNothingCheck:
    """A thread that hands single jobs to workers which have nothing else to do.

    What it does is counted nowhere: it changes no metric, and fails no run.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rewards: Mapping[str, Reward],
        workers: Mapping[str, RewardWorkers],
    ):
        """The prompts whose domain has workers."""
        known = [prompt for prompt in prompts if prompt.domain in workers]
        self._trials = do_nothing.Trials(known, rewards)
        self._workers = workers
        self._found: SimpleQueue[Prompt] = SimpleQueue()
        self._has_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="do-nothing check", daemon=True)

    def start(self) -> None:
        """What is known from earlier runs is found at once."""
        for prompt in self._trials.all_passed:
            self._found.put(prompt)
        self._thread.start()

    def stop(self) -> None:
        """What is left is for the next run."""
        self._has_to_stop.set()

    def join(self) -> None:
        """Returns when it has stopped; workers that are closed end its job."""
        if self._thread.ident:
            self._thread.join()

    def take(self) -> list[Prompt]:
        """Prompts that were found since the last call."""
        return [self._found.get() for _ in range(self._found.qsize())]

    def _run(self) -> None:
        for name, prompt in self._trials.left.items():
            workers = self._workers[prompt.domain]
            if not self._wait_for(workers):
                return
            if score := asyncio.run(workers.probe(prompt, do_nothing.REPLY)):
                self._trials.add(name, score)
            for passed in self._trials.passed(name):
                self._found.put(passed)
        if num := len(self._trials.all_passed):
            print(
                f"warning: {num} of {len(self._trials)} prompts with tests are passed by a program "
                "that does nothing; events.jsonl names them"
            )

    def _wait_for(self, workers: RewardWorkers) -> bool:
        """Until a worker is idle; False if the run ends before."""
        while not self._has_to_stop.is_set():
            if workers.has_idle:
                return True
            self._has_to_stop.wait(IDLE_SECONDS)
        return False
