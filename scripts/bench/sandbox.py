"""Programs per second in the sandbox, and calls per second of the reward workers.

python scripts/bench/sandbox.py --sandboxes 2

A thread drives each sandbox. The last line is JSON.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tyro
from timing import median_seconds, print_results

from roll_lite.rewards.maths import last_number
from roll_lite.sandbox.sandbox import Sandbox
from roll_lite.types import Prompt
from roll_lite.workers.pool import RewardWorkers


@dataclass(kw_only=True)
class Config:
    programs: int = 200
    """Trivial programs per run, over all sandboxes; also tests and inputs of one program."""
    sandboxes: int = 2
    """Programs that run at the same time."""
    isolation: str = "full"
    """full or rlimits."""
    calls: int = 2000
    """Calls of a trivial reward, all submitted at once."""
    workers: int = 2
    """Reward worker processes."""
    repeats: int = 3
    """Timed runs after a warm-up run; the median counts."""


def run_all(sandboxes: list[Sandbox], num_programs: int, tests: str = "") -> None:
    def run(index: int) -> None:
        for number in range(index, num_programs, len(sandboxes)):
            outcome = sandboxes[index].run(f"x = {number}\nprint(x)", tests=tests)
            assert (outcome.kind, outcome.stdout) == ("ok", f"{number}\n"), outcome

    with ThreadPoolExecutor(len(sandboxes)) as threads:
        list(threads.map(run, range(len(sandboxes))))


def run_tests(sandbox: Sandbox, num_tests: int) -> None:
    tests = [f"assert f({number}) == {number**2}" for number in range(num_tests)]
    outcomes = sandbox.run_repeatedly("def f(x): return x * x", tests=tests)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * num_tests


def run_inputs(sandbox: Sandbox, num_inputs: int) -> None:
    inputs = [f"{number}\n" for number in range(num_inputs)]
    outcomes = sandbox.run_repeatedly("print(input())", inputs=inputs)
    assert [outcome.stdout for outcome in outcomes] == inputs


async def score_all(workers: RewardWorkers, num_calls: int) -> None:
    prompt = Prompt(id="p", messages=(), domain="math", ground_truth="4")
    scores = await asyncio.gather(*(workers.score(prompt, "2 + 2 = 4") for _ in range(num_calls)))
    assert all(score.value == 1 for score in scores)


def main(cfg: Config) -> dict[str, float]:
    start = time.perf_counter()
    sandboxes = [Sandbox(cfg.isolation).start() for _ in range(cfg.sandboxes)]
    results = {"sandbox_start_ms": 1e3 * (time.perf_counter() - start) / cfg.sandboxes}
    taken = median_seconds(lambda: run_all(sandboxes, cfg.programs), cfg.repeats)
    results["programs_per_second"] = cfg.programs / taken
    taken = median_seconds(lambda: run_all(sandboxes, cfg.programs, "assert x >= 0"), cfg.repeats)
    results["tested_programs_per_second"] = cfg.programs / taken
    taken = median_seconds(lambda: run_tests(sandboxes[0], cfg.programs), cfg.repeats)
    results["tests_per_second"] = cfg.programs / taken
    taken = median_seconds(lambda: run_inputs(sandboxes[0], cfg.programs), cfg.repeats)
    results["inputs_per_second"] = cfg.programs / taken
    for sandbox in sandboxes:
        sandbox.close()
    start = time.perf_counter()
    with RewardWorkers({"math": last_number}, num_workers=cfg.workers) as workers:
        results["workers_start_ms"] = 1e3 * (time.perf_counter() - start)
        taken = median_seconds(lambda: asyncio.run(score_all(workers, cfg.calls)), cfg.repeats)
    results["calls_per_second"] = cfg.calls / taken
    return {name: round(value, 1) for name, value in results.items()}


if __name__ == "__main__":
    print_results(main(tyro.cli(Config, description=__doc__.split("\n\n")[0])))
