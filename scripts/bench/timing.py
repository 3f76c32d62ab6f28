"""What the benchmarks share: timing repeated runs, and printing results."""

import json
import time
from collections.abc import Callable
from statistics import median


def run_times(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of a warm-up run, then of `repeats` runs."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median time of `repeats` runs, after a warm-up run."""
    return median(run_times(action, repeats)[1:])


def print_results(results: dict[str, object]) -> None:
    """One line per result; the last line is JSON."""
    for name, value in results.items():
        print(f"{name:>28}  {value}")
    print(json.dumps(results))
