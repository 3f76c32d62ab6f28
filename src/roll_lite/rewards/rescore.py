"""Scores replies of a file again: rows {reply, ground_truth, tests?, domain?, reward?}.

The rollouts that recipes write are such files.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_lite.types import Prompt, Reward, Score


@dataclass(slots=True)
class Report:
    values: list[float] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    """How many were right (1), partly right, wrong (0), not scored, or ended with an error."""
    disagreements: list[str] = field(default_factory=list)
    """Where the recorded reward is another."""
    errors: list[str] = field(default_factory=list)


def rescore(path: Path, rewards: Mapping[str, Reward], domain: str | None = None) -> Report:
    """Score all rows with the reward of their domain, or of the one that is given."""
    report = Report()
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                _add(report, where, read_row(line), rewards, domain)
            except ValueError as error:
                report.verdicts["error"] += 1
                report.errors.append(f"{where}: {error}")
    return report


def read_row(line: str) -> dict[str, Any]:
    """The fields of a line; an error says what is wrong with it."""
    row = json.loads(line)
    if not isinstance(row, dict) or "reply" not in row:
        raise ValueError("no field 'reply'; a row has reply, ground_truth, and perhaps tests")
    for name in ("reply", "ground_truth"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name}={row[name]!r} must be text")
    if not isinstance(row.get("tests", []), list):
        raise ValueError(f"tests={row['tests']!r} must be a list")
    return row


def _add(
    report: Report,
    where: str,
    row: dict[str, Any],
    rewards: Mapping[str, Reward],
    domain: str | None,
) -> None:
    if row.get("error"):  # a rollout that failed has no reply to score
        report.verdicts["not scored"] += 1
        return
    value = _value(where, row, rewards, domain or row.get("domain"))
    report.values.append(value)
    report.verdicts[{0.0: "wrong", 1.0: "right"}.get(value, "partly right")] += 1
    recorded = row.get("reward")
    if recorded is not None and abs(recorded - value) > 1e-6:
        report.disagreements.append(f"{where}: {value:g} now, {recorded:g} recorded")


def _value(
    where: str, row: dict[str, Any], rewards: Mapping[str, Reward], domain: str | None
) -> float:
    if domain not in rewards:
        raise ValueError(
            f"domain={domain!r} has no reward; name one of {', '.join(rewards)} with --domain"
        )
    prompt = Prompt(
        id=str(row.get("prompt_id", where)),
        messages=(),
        domain=domain,
        ground_truth=row.get("ground_truth", ""),
        tests=tuple(row.get("tests", ())),
    )
    score = rewards[domain](prompt, row["reply"])
    return score.value if isinstance(score, Score) else float(score)
