"""What runs of speedrun.sh reached in what time, and whether that is a record.

    scripts/speedrun.sh MODEL TRAIN TEST runs/a --seed 0       # and another with --seed 1
    python scripts/record.py runs/a
    python scripts/record.py runs/a runs/b --target 0.4        # by the rules of docs/records.md

A folder holds `rlvr`, the run, and `before` and `after`, what evaluate.py made of the model.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

CONFIDENCE = 0.95
MAY_DIFFER = {"seed", "run_dir", "starts", "resume"}


class Entry(NamedTuple):
    options: dict[str, Any]
    start: dict[str, Any]
    """Command, hardware, versions and commit of the run."""
    seconds: float
    """Seconds of all steps: generating, scoring, training, weight sync and records."""
    questions: list[str]
    num_right: int

    @property
    def accuracy(self) -> float:
        return self.num_right / len(self.questions)

    @property
    def bound(self) -> float:
        return lower_bound(self.num_right, len(self.questions))


def main() -> None:
    options = _parse()
    try:
        entries = [read(Path(folder)) for folder in options.folders]
        if options.target is None:
            for folder, entry in zip(options.folders, entries, strict=True):
                print(describe(Path(folder), entry))
            return
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}; name folders that hold rlvr, before and after")
    if problems := objections(entries, options.target, options.commit):
        sys.exit("no record: " + "; ".join(problems))
    print(row(entries, options.commit))


def read(folder: Path) -> Entry:
    config = json.loads((folder / "rlvr" / "config.json").read_text())
    steps, answers = _steps(folder), _answers(folder / "after")
    return Entry(
        options={name: value for name, value in config.items() if name not in MAY_DIFFER},
        start=config["starts"][0] | {"seed": config["seed"]},
        seconds=sum(step["time/step"] for step in steps),
        questions=sorted(answer["prompt_id"] for answer in answers),
        num_right=sum(is_right(answer) for answer in answers),
    )


def describe(folder: Path, entry: Entry) -> str:
    """Accuracy before and after, and where the time went."""
    steps, before = _steps(folder), _answers(folder / "before")
    parts = {name.removeprefix("time/") for name in steps[0] if name.startswith("time/")} - {"step"}
    seconds = {part: sum(step[f"time/{part}"] for step in steps) for part in sorted(parts)}
    tokens = sum(
        step["rollout/reply_tokens"] * (step["rollout/done"] + step["rollout/filtered"])
        for step in steps
    )
    return "\n".join(
        [
            f"{folder}, seed {entry.start['seed']}, {entry.start.get('hardware', '')}",
            f"  right      {sum(map(is_right, before)) / len(before):.1%} -> {entry.accuracy:.1%} "
            f"of {len(entry.questions):,} (at least {entry.bound:.1%} with {CONFIDENCE:.0%} "
            "confidence)",
            f"  {len(steps)} steps   {entry.seconds:.1f} s: "
            + ", ".join(f"{part} {value:.1f}" for part, value in seconds.items()),
            f"  generated  about {tokens / seconds['rollout']:,.0f} tokens/s; at most "
            f"{max(step.get('train/peak_gib', 0.0) for step in steps):.1f} GiB for training",
        ]
    )


def _steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rlvr" / "metrics.jsonl").open()]
    steps = [row for row in rows if "time/step" in row]
    if not steps:
        raise ValueError(f"{folder / 'rlvr'} has no step that ended")
    return steps


def _answers(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "rollouts").glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} has no replies in rollouts")
    return [json.loads(line) for path in paths for line in path.open()]


def is_right(answer: dict[str, Any]) -> bool:
    """A reply that failed to be scored is not."""
    return answer["state"] == "done" and answer["parts"].get("success", answer["reward"]) >= 1


def objections(entries: list[Entry], target: float, commit: str | None) -> list[str]:
    """What the rules have against the runs."""
    first, problems = entries[0], []
    if len({entry.start["seed"] for entry in entries}) < max(2, len(entries)):
        problems.append("two seeds are needed, one run each")
    names = {name for entry in entries for name in entry.options}
    if differ := [n for n in sorted(names) if len({repr(e.options.get(n)) for e in entries}) > 1]:
        problems.append(f"the runs differ in {', '.join(differ)}")
    if any(entry.questions != first.questions for entry in entries):
        problems.append("the models were asked different questions")
    if any(len(set(entry.questions)) < len(entry.questions) for entry in entries):
        problems.append("there are several replies to a question; evaluate with --samples 1")
    commits = {commit or entry.start.get("commit", "") for entry in entries}
    if len(commits) > 1 or not all(commits) or any("dirty" in each for each in commits):
        problems.append(f"the commit must be one, known and clean, not {sorted(commits)}; --commit")
    problems += [
        f"seed {entry.start['seed']} reaches {entry.accuracy:.1%}, which is at least "
        f"{entry.bound:.1%} with {CONFIDENCE:.0%} confidence, not {target:.1%}"
        for entry in entries
        if entry.bound < target
    ]
    return problems


def row(entries: list[Entry], commit: str | None) -> str:
    first = entries[0]
    seconds = ", ".join(f"{entry.seconds:.1f}" for entry in entries)
    accuracies = ", ".join(f"{entry.accuracy:.1%} (>= {entry.bound:.1%})" for entry in entries)
    cells = (
        f"**{max(entry.seconds for entry in entries):.1f}**", seconds, accuracies,
        first.start.get("hardware", ""), (commit or first.start["commit"])[:10],
        first.start["time"].split()[0], f"`{first.start['command']}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def lower_bound(num_right: int, total: int, confidence: float = CONFIDENCE) -> float:
    """The rate below which so many right ones would be a chance of 1 - confidence (exact)."""
    if num_right == 0:
        return 0.0
    low, high = 0.0, num_right / total
    for _ in range(60):
        middle = (low + high) / 2
        if _chance_of_more(num_right, total, middle) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _chance_of_more(num_right: int, total: int, rate: float) -> float:
    """Chance of at least `num_right` in `total`."""
    if rate in (0.0, 1.0):
        return rate
    return math.fsum(
        math.exp(
            math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
            + k * math.log(rate) + (total - k) * math.log1p(-rate)
        )
        for k in range(num_right, total + 1)
    )  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="one for each seed")
    parser.add_argument("--target", type=float, help="accuracy, from 0 to 1")
    parser.add_argument("--commit", help="of a run that was not in a clone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
