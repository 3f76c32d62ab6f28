"""digests.jsonl: for each step what it was made of and what came of it, each as a digest.

    {"step": 3, "samples": ..., "batch/advantages": ..., "gradient": ..., "weights": ...,
     "metrics": ..., "contract": ..., "chain": ...}

`samples` and `answers` are of the lines of rollouts/, `metrics` of those numbers in metrics.jsonl
that repeat, the others of tensors (train/digests.py). Two runs that agree have the same, whatever
their contracts. `chain` is keyed with the contract, and of the line and all lines before it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.report.records import encode, repeated_part

FILE = "digests.jsonl"
TIMES = ("time", "seconds", "tokens_per_second", "mfu", "peak_gib")
OF_THE_MACHINE = {
    "rollout/retried", "reward/calls", "reward/errors", "reward/timeouts", "reward/crashes",
    "reward/replaced", "env/errors", "env/timeouts", "env/crashes", "env/replaced",
    "env/episodes", "env/replayed",
    "rollout/started", "rollout/aborted", "rollout/restored", "rollout/lost_engines",
    "rollout/engine_free_pages", "rollout/engine_running", "rollout/engine_waiting",
}  # fmt: skip
"""Metrics that count faults, or what a restart leaves empty or need not do again."""
CHARACTERS = 32


def digest_text(kind: str, texts: Iterable[str]) -> str:
    """Of texts of a kind, one after the other."""
    found = hashlib.blake2b(key=kind.encode(), digest_size=CHARACTERS // 2)
    for text in texts:
        data = text.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def digest_of_lines(kind: str, lines: Iterable[str]) -> str:
    """Of lines of rollouts/, as far as they repeat."""
    return digest_text(kind, map(repeated_part, lines))


def is_repeated(metric: str) -> bool:
    """Whether a run that repeats another has the same value."""
    is_time = metric.partition("/")[0] in ("time", "colocated", "whatif")
    return not is_time and metric.rpartition("/")[2] not in TIMES and metric not in OF_THE_MACHINE


def digest_metrics(metrics: Mapping[str, float]) -> str:
    named = {name: metrics[name] for name in sorted(metrics) if is_repeated(name)}
    return digest_text("metrics", [encode({k: v for k, v in named.items() if k != "step"})])


def chained(line: Mapping[str, Any], before: str) -> str:
    """The chain of a line after that of the line before; the first has none before."""
    text = json.dumps([before, {k: v for k, v in line.items() if k != "chain"}], sort_keys=True)
    return digest_text(f"chain {line['contract']}", [text])


class DigestLines:
    """The lines of a run, each chained to the one before; made in the order of its records."""

    def __init__(self, folder: Path, contract: str):
        path = folder / FILE
        lines = path.read_text().splitlines() if path.exists() else []
        self._before = json.loads(lines[-1])["chain"] if lines else ""
        self._contract = contract
        self._of_lines: dict[str, str] = {}

    def passing(self, kind: str, lines: Iterable[str]) -> Iterator[str]:
        """The lines of a step's samples or answers, whose digest the step's line will have."""
        passed = []
        for line in lines:
            passed.append(repeated_part(line))
            yield line
        self._of_lines[kind] = digest_text(kind, passed)

    def of_step(
        self, step: int, digests: Mapping[str, str], metrics: Mapping[str, float]
    ) -> Iterator[str]:
        """One line. Answers count if their evaluation came to its end: it is among the metrics."""
        of_lines, self._of_lines = self._of_lines, {}
        if not any(name.startswith("eval/") for name in metrics):
            of_lines.pop("answers", None)
        line = {"step": step, **of_lines, **digests, "metrics": digest_metrics(metrics)}
        line["contract"] = self._contract
        self._before = line["chain"] = chained(line, self._before)
        yield encode(line) + "\n"
