"""Whether two run folders hold the same run, bit for bit; or no sample twice and none lost.

python scripts/chaos/run_compare.py RUN RUN
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from roll_lite.report.digests import is_repeated

LEFT_OVER = ("*.partial", "*.replaced", "*.removed", "journal")
"""What a complete run has none of, at any depth."""
OF_SAMPLES = (
    "prompt_id", "index", "state", "reply", "end", "reward", "parts", "token_ids", "logprobs",
    "advantages",
)  # fmt: skip


def differences(run: Path, other: Path) -> list[str]:
    """Differences of weights, optimizers, states, samples, metrics and files; none if the runs are
    the same."""
    checkpoint, wanted = newest_checkpoint(run), newest_checkpoint(other)
    return [
        *damaged(run),
        *_failed_more(run, other),
        *_of_metrics(run, other),
        *_of_samples(run, other),
        *_of_files(run / "model", other / "model"),
        *_of_tensors(run / "model", other / "model"),
        *_of_values("state", _state(checkpoint), _state(wanted)),
        *_of_tensors(checkpoint, wanted),
    ]


def unaccounted(run: Path, other: Path) -> list[str]:
    """Samples of an asynchronous run that were trained on twice, vanished, or failed where those of
    another run did not."""
    return [*damaged(run), *_failed_more(run, other), *lost_or_repeated(run)]


def lost_or_repeated(run: Path) -> list[str]:
    trained = Counter(
        (row["prompt_id"], row["visit"], row["index"])
        for path in sorted(run.glob("rollouts/step_*.jsonl"))
        for row in _rows(path)
    )
    problems = [f"{key} was trained on {n} times" for key, n in trained.items() if n > 1]
    num_trained = sum(row.get("rollout/trained_samples", 0) for row in _rows(run / "metrics.jsonl"))
    if num_trained != trained.total():
        problems.append(f"metrics count {num_trained} samples, rollouts/ has {trained.total()}")
    kept = json.dumps(_state(newest_checkpoint(run)))
    dropped = {row.get("prompt_id") for row in _rows(run / "events.jsonl")}
    visits = defaultdict(set)
    for prompt_id, visit, _ in trained:
        visits[prompt_id].add(visit)
    lost = {(name, 0) for name in _drawn(visits.keys(), _numbered(run)) - visits.keys()}
    lost |= {(name, n) for name, seen in visits.items() for n in range(max(seen)) if n not in seen}
    for prompt_id, visit in sorted(lost):
        if prompt_id not in dropped and json.dumps(prompt_id) not in kept:
            place = f"visit {visit} of {prompt_id}"
            problems.append(f"{place} was neither trained on, nor dropped, nor kept")
    return problems


def _numbered(run: Path) -> set[str]:
    """Entries of data whose prompts come in the order of their numbers; rows of files do not."""
    data = json.loads((run / "config.json").read_text())["data"]
    return {entry.rpartition("@")[0] or entry for entry in data}


def _drawn(used: Set[str], names: set[str]) -> set[str]:
    """Prompts of tasks and environments are numbered from 0: those up to the last that was used."""
    last: dict[str, int] = {}
    for prompt_id in used:
        name, _, number = prompt_id.rpartition("/")
        if number.isdecimal() and name in names:
            last[name] = max(last.get(name, 0), int(number))
    return {f"{name}/{number}" for name, end in last.items() for number in range(end)}


def newest_checkpoint(run: Path) -> Path:
    return max(run.glob("checkpoints/step-*"), default=run / "checkpoints")


def damaged(run: Path) -> Iterator[str]:
    """Torn lines, and what a start, a save or an export has left."""
    for path in [*run.glob("*.jsonl"), *run.glob("rollouts/*.jsonl")]:
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n") or _parsed(line) is None:
                yield f"{path.name}: line {number} is torn"
    for pattern in LEFT_OVER:
        for path in sorted(run.rglob(pattern)):
            yield f"{path.relative_to(run)} is left over"


def _failed_more(run: Path, other: Path) -> Iterator[str]:
    """Samples that failed here alone: in training by events, in evaluations by their rows."""
    found, wanted = Counter(failed(run)), Counter(failed(other))
    for where, prompt_id, index in sorted(found - wanted):
        yield f"{where}: sample {index} of {prompt_id} failed"


def failed(run: Path) -> Iterator[tuple[str, str, int]]:
    for row in _rows(run / "events.jsonl"):
        if row.get("state") == "failed":
            yield f"step {row['step']}", row["prompt_id"], row["index"]
    for path in run.glob("rollouts/*.jsonl"):
        for row in _rows(path):
            if row.get("state") == "failed":
                yield path.name, row["prompt_id"], row["index"]


def _state(checkpoint: Path) -> dict[str, Any]:
    """What the manifest has beside the files: of the loop, the data and the algorithm."""
    manifest = checkpoint / "manifest.json"
    return json.loads(manifest.read_text())["state"] if manifest.exists() else {}


def _of_values(name: str, found: Any, wanted: Any) -> Iterator[str]:
    """By their place in nested dictionaries."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            yield from _of_values(f"{name}/{key}", found.get(key), wanted.get(key))
    elif found != wanted:
        yield f"{name} is {found} instead of {wanted}"


def _of_files(folder: Path, other: Path) -> Iterator[str]:
    """Configs, tokenizer and template: all that is no tensor."""
    names = {path.name for each in (folder, other) for path in each.glob("*")}
    for name in sorted(names):
        if not name.endswith(".safetensors"):
            contents = [
                path.read_bytes() if (path := each / name).exists() else None
                for each in (folder, other)
            ]
            if contents[0] != contents[1]:
                yield f"{folder.name}/{name} differs from {other}"


def _of_metrics(run: Path, other: Path) -> Iterator[str]:
    rows, others = (_steps(map(_steady, _rows(f / "metrics.jsonl"))) for f in (run, other))
    steps, expected = [row["step"] for row in rows], [row["step"] for row in others]
    if steps != expected:
        yield f"metrics.jsonl has steps {steps} instead of {expected}"
        return
    for row, wanted in zip(rows, others, strict=True):
        for name in sorted(row.keys() | wanted.keys()):
            if row.get(name) != wanted.get(name):
                yield f"step {row['step']}: {name} {row.get(name)} instead of {wanted.get(name)}"


def _steps(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """An evaluation that a signal ended has a row of its own, after that of its step."""
    steps: list[dict[str, Any]] = []
    for row in rows:
        if steps and row.keys() & steps[-1].keys() == {"step"} and row["step"] == steps[-1]["step"]:
            steps[-1] |= row
        else:
            steps.append(row)
    return steps


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without times and counts of faults."""
    return {name: value for name, value in row.items() if is_repeated(name)}


def _of_samples(run: Path, other: Path) -> Iterator[str]:
    names = sorted({path.name for f in (run, other) for path in f.glob("rollouts/*.jsonl")})
    for name in names:
        rows, others = (_rows(folder / "rollouts" / name) for folder in (run, other))
        if len(rows) != len(others):
            yield f"{name} has {len(rows)} samples instead of {len(others)}"
            continue
        for number, (row, wanted) in enumerate(zip(rows, others, strict=True)):
            if wrong := [key for key in OF_SAMPLES if row.get(key) != wanted.get(key)]:
                yield f"{name}: sample {number} differs in {', '.join(wrong)}"


def _of_tensors(folder: Path, other: Path) -> Iterator[str]:
    found, wanted = _tensor_bytes(folder), _tensor_bytes(other)
    if not wanted:
        yield f"{other} has no tensors"
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            yield f"{folder}: {name} differs from {other}"


def _tensor_bytes(folder: Path) -> dict[str, tuple[str, bytes]]:
    """By file and name: type and shape, and all bits."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for name, about in json.loads(content[8:end]).items():
            if name != "__metadata__":
                start, stop = about.pop("data_offsets")
                found[f"{path.name}: {name}"] = (str(about), content[end + start : end + stop])
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Without those that are torn."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for line in lines if (row := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path)
    found = differences(*parser.parse_args().runs)
    print("\n".join(found) or "the same run")
    sys.exit(bool(found))
