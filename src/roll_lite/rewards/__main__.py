"""Score one reply and explain the score, or score the replies of a file again.

python -m roll_lite.rewards try math --truth 1/2 --reply 'So it is \\boxed{0.5}.'
python -m roll_lite.rewards try math --truth 1/2 --answer 0.5
python -m roll_lite.rewards try choice --truth B < reply.txt
python -m roll_lite.rewards try instructions --tests '[{"kind": "no_commas"}]' --reply 'None.'
python -m roll_lite.rewards score runs/RUN/rollouts/step_00010.jsonl --domain math

A file has rows {reply, ground_truth, tests?, domain?, reward?}, as recipes write their rollouts.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from roll_lite.rewards.choice import chosen
from roll_lite.rewards.instructions import holds
from roll_lite.rewards.maths import grade_reply
from roll_lite.rewards.registry import REWARDS
from roll_lite.types import Prompt, Score


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def try_reward(options: argparse.Namespace) -> int:
    reply = _reply(options)
    prompt = Prompt(
        id="--tests" if options.tests else "--truth",
        messages=(),
        domain=options.domain,
        ground_truth=options.truth,
        tests=_tests(options.tests),
    )
    score = _score(prompt, reply)  # first: it raises for a prompt that cannot be scored
    for line in _explanation(prompt, reply):
        print(line)
    print(f"score     {score.value:g}")
    print("parts     " + ", ".join(f"{name} {value:g}" for name, value in score.parts.items()))
    return 0


def _score(prompt: Prompt, reply: str) -> Score:
    score = REWARDS[prompt.domain](prompt, reply)
    return score if isinstance(score, Score) else Score(value=float(score))


def _reply(options: argparse.Namespace) -> str:
    if options.answer is None:
        return sys.stdin.read() if options.reply is None else options.reply
    if options.domain not in ("math", "choice"):
        raise ValueError(f"--answer is not read with {options.domain}; give the whole --reply")
    return rf"\boxed{{{options.answer}}}"


def _tests(text: str | None) -> tuple[dict, ...]:
    if text is None:
        return ()
    try:
        tests = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--tests is not JSON: {error}") from None
    if not isinstance(tests, list):
        raise ValueError(f"--tests={text} must be a list of objects")
    return tuple(tests)


def _explanation(prompt: Prompt, reply: str) -> list[str]:
    if prompt.domain == "math":
        answer, source, verdict = grade_reply(reply, prompt.ground_truth)
        return [
            f"answer    {answer} ({source})",
            f"verdict   {verdict.kind}",
            f"why       {verdict.why}",
        ]
    if prompt.domain == "choice":
        letters, source = chosen(reply)
        return [f"letters   {' '.join(sorted(letters)) or 'none'} ({source})"]
    if prompt.domain == "instructions":
        tests = prompt.tests
        return [f"{'yes' if holds(reply, test) else 'no':<10}{json.dumps(test)}" for test in tests]
    return []


def score_file(options: argparse.Namespace) -> int:
    report = rescore(Path(options.file), options.domain)
    mean = f"{fmean(report.values):.4f}" if report.values else "none"
    print(f"mean      {mean} of {len(report.values)}")
    for verdict, count in report.verdicts.most_common():
        print(f"{verdict:<14}{count:>7}")
    for name in ("disagreements", "errors"):
        lines = getattr(report, name)
        print(f"{name:<14}{len(lines):>7}")
        for line in lines[: options.show]:
            print(f"  {line}")
    return 1 if report.errors else 0


@dataclass(slots=True)
class Report:
    """The scores of the rows of a file."""

    values: list[float] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    """Rows that are right (1), partly right, wrong (0), not scored, or an error."""
    disagreements: list[str] = field(default_factory=list)
    """Rows whose recorded reward is another."""
    errors: list[str] = field(default_factory=list)

    def add(self, where: str, value: float, recorded: float | None) -> None:
        self.values.append(value)
        self.verdicts[{0.0: "wrong", 1.0: "right"}.get(value, "partly right")] += 1
        if recorded is not None and abs(recorded - value) > 1e-6:
            self.disagreements.append(f"{where}: {value:g} now, {recorded:g} recorded")


def rescore(path: Path, domain: str | None = None) -> Report:
    """Score all rows with the reward of their own domain, or of `domain` if given."""
    report = Report()
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                row = _read_row(line)
                if row.get("error"):  # a failed rollout has no reply to score
                    report.verdicts["not scored"] += 1
                else:
                    report.add(where, _value(where, row, domain), row.get("reward"))
            except ValueError as error:
                report.verdicts["error"] += 1
                report.errors.append(f"{where}: {error}")
    return report


def _read_row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or "reply" not in row:
        raise ValueError("no field 'reply'; a row has reply, ground_truth, and perhaps tests")
    for name in ("reply", "ground_truth"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name}={row[name]!r} must be text")
    if not isinstance(row.get("tests", []), list):
        raise ValueError(f"tests={row['tests']!r} must be a list")
    return row


def _value(where: str, row: dict[str, Any], domain: str | None) -> float:
    domain = domain or row.get("domain")
    if domain not in REWARDS:
        known = ", ".join(REWARDS)
        raise ValueError(f"domain={domain!r} has no reward; name one of {known} with --domain")
    prompt = Prompt(
        id=str(row.get("prompt_id", where)),
        messages=(),
        domain=domain,
        ground_truth=row.get("ground_truth", ""),
        tests=tuple(row.get("tests", ())),
    )
    return _score(prompt, row["reply"]).value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roll_lite.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{try,score}")
    attempt = commands.add_parser("try", help="score one reply and explain the score")
    attempt.add_argument("domain", choices=sorted(REWARDS))
    attempt.add_argument("--truth", default="", help="the true answer")
    attempt.add_argument("--tests", help="the prompt's tests (constraints, programs) as JSON")
    given = attempt.add_mutually_exclusive_group()
    given.add_argument("--reply", help="the whole reply; default: read from stdin")
    given.add_argument("--answer", help="only the answer, as if in a box (math, choice)")
    attempt.set_defaults(run=try_reward)
    score = commands.add_parser("score", help="score the replies of a file again")
    score.add_argument("file", help="rows {reply, ground_truth, tests?, domain?, reward?}")
    score.add_argument("--domain", choices=sorted(REWARDS), help="instead of the rows' own domains")
    score.add_argument(
        "--show", type=int, default=5, help="number of disagreements and errors to print"
    )
    score.set_defaults(run=score_file)
    return parser


if __name__ == "__main__":
    sys.exit(main())
