"""Score one reply and explain the score, score the replies of a file again, or check tests.

roll-lite rewards try math --truth 1/2 --reply 'So it is \\boxed{0.5}.'
roll-lite rewards try math --truth 1/2 --answer 0.5
roll-lite rewards try choice --truth B < reply.txt
roll-lite rewards try instructions --tests '[{"kind": "no_commas"}]' --reply 'None.'
roll-lite rewards try mine --code my_rewards.py --extra '{"level": 3}' --reply 'Yes.'
roll-lite rewards score runs/RUN/rollouts/step_00010.jsonl --domain math
roll-lite rewards score runs/RUN/rollouts/step_00010.jsonl --code recipes/rlvr.py
roll-lite rewards check mbpp.jsonl                   # which tests pass a program that does nothing?

A file to score has a JSON object in each line, with the reply and what its reward reads:
{"reply", "domain", "ground_truth", "tests", "messages", "extra", "reward"}, as recipes write them.
"""

import argparse
import asyncio
import inspect
import json
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from roll_lite.checks import UserError
from roll_lite.own_files import import_file, read_table
from roll_lite.progress import ProgressBar
from roll_lite.rewards import do_nothing
from roll_lite.rewards.choice import chosen
from roll_lite.rewards.instructions import holds
from roll_lite.rewards.maths import grade_reply, true_answer
from roll_lite.rewards.registry import REWARDS, code_part
from roll_lite.sandbox.sandbox import MAX_SHARED, SandboxError, SandboxUnavailable
from roll_lite.types import AsyncReward, Prompt, Reward, Score

Table = Mapping[str, Reward | AsyncReward]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def try_reward(options: argparse.Namespace) -> int:
    table = _table(options.code)
    _check_domain(options.domain, table)
    reply = _reply(options)
    prompt = Prompt(
        id="--tests" if options.tests else "--truth",
        messages=(),
        domain=options.domain,
        ground_truth=options.truth,
        tests=tuple(_json("--tests", options.tests, list, "a list of objects")),
        extra=_json("--extra", options.extra, dict, "an object"),
    )
    score = _score(table, prompt, reply)  # first: it raises for a prompt that cannot be scored
    if table[prompt.domain] in REWARDS.values():
        print("".join(f"{line}\n" for line in _explanation(prompt, reply)), end="")
    print(f"score     {score.value:g}")
    if score.reason:
        print(f"reason    {score.reason}")
    print("parts     " + ", ".join(f"{name} {value:g}" for name, value in score.parts.items()))
    return 0


def _table(paths: Sequence[str]) -> Table:
    """Rewards by domain: ours, and those of files."""
    return REWARDS | {d: r for path in paths for d, r in _rewards_of(path).items()}


def _rewards_of(path: str) -> Table:
    """The rewards of a file as --code takes it, or of a recipe, whose Config has the tables."""
    config = getattr(import_file(path), "Config", None)
    found = {}
    for name in ("REWARDS", "INLINE"):
        found |= read_table(path, name) or getattr(config, name, {})
    if not found:
        raise UserError(f"{path} has no REWARDS; write REWARDS = {{'mine': mine}} in it")
    return found


def _check_domain(domain: str | None, table: Table) -> None:
    if domain not in table:
        known = ", ".join(table)
        raise UserError(
            f"domain={domain!r} has no reward; name one of {known}, or a file that has it with "
            "--code (recipes/rlvr.py for its own)"
        )


def _score(table: Table, prompt: Prompt, reply: str) -> Score:
    """Raises ValueError if the reward fails."""
    reward = table[prompt.domain]
    try:
        score = reward(prompt, reply)
        if inspect.isawaitable(score):
            score = asyncio.run(_wait_for(score))
        return Score.of(score)
    except Exception as error:  # of any kind: it may be the user's code
        if reward in REWARDS.values():
            raise
        raise UserError(f"{type(error).__name__}: {error} ({_place(error)})") from error


def _place(error: Exception) -> str:
    """The lines of an exception's traceback from the reward on."""
    frames = traceback.extract_tb(error.__traceback__)
    last_here = max(i for i, frame in enumerate(frames) if frame.filename == __file__)
    return ", ".join(f"{frame.filename} line {frame.lineno}" for frame in frames[last_here + 1 :])


async def _wait_for(score: Awaitable[Score | float]) -> Score | float:
    """Puts a frame of this file after those of asyncio, for `_place`."""
    return await score


def _reply(options: argparse.Namespace) -> str:
    if options.answer is None:
        return sys.stdin.read() if options.reply is None else options.reply
    if options.domain not in ("math", "choice"):
        raise UserError(f"--answer is not read with {options.domain}; give the whole --reply")
    return rf"\boxed{{{options.answer}}}"


def _json(flag: str, text: str | None, kind: type, description: str) -> Any:
    if text is None:
        return kind()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise UserError(f"{flag}={text} must be {description}")
    return value


def _explanation(prompt: Prompt, reply: str) -> list[str]:
    if prompt.domain == "math":
        answer, source, verdict = grade_reply(reply, true_answer(prompt))
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
    report = rescore(Path(options.file), options.domain, _table(options.code))
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


def rescore(path: Path, domain: str | None = None, table: Table = REWARDS) -> Report:
    """Score all rows with the reward of their own domain, or of `domain` if given."""
    report = Report()
    if domain is not None:
        _check_domain(domain, table)
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                row = _read_row(line, "reply", "reply", "ground_truth")
                if row.get("error"):  # a failed rollout has no reply to score
                    report.verdicts["not scored"] += 1
                else:
                    score = _score(table, _prompt(where, row, domain, table), row["reply"])
                    report.add(where, score.value, row.get("reward"))
            except ValueError as error:
                report.verdicts["error"] += 1
                report.errors.append(f"{where}: {error}")
    return report


def _read_row(line: str, needed: str, *texts: str) -> dict[str, Any]:
    """A row that has a field, and text in some."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise UserError("nested too deeply") from None
    if not isinstance(row, dict) or needed not in row:
        raise UserError(f"no field {needed!r}; a row has {needed}, ground_truth, and perhaps tests")
    for name in ("domain", *texts):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f"{name}={row[name]!r} must be text")
    tests = row.get("tests", [])
    if not (isinstance(tests, list) and all(isinstance(test, dict) for test in tests)):
        raise UserError(f"tests={tests!r} must be a list of objects")
    return row


def _prompt(where: str, row: dict[str, Any], domain: str | None, table: Table) -> Prompt:
    domain = domain or row.get("domain")
    _check_domain(domain, table)
    return Prompt(
        id=str(row.get("prompt_id", where)),
        messages=tuple(row.get("messages", ())),
        domain=domain,
        ground_truth=row.get("ground_truth", ""),
        tests=tuple(row.get("tests", ())),
        extra=row.get("extra", {}),
    )


def check_tests(options: argparse.Namespace) -> int:
    """Name the prompts whose tests a program that does nothing passes, or that cannot run."""
    table = _table(options.code)
    parts = {domain: part for domain, reward in table.items() if (part := code_part(reward))}
    prompts = list(_tested_prompts(Path(options.file), parts))
    if not prompts:
        raise UserError(f"{options.file} has no prompt of the domain {' or '.join(parts)}")
    trials = do_nothing.Trials(prompts, parts)
    errors = _try_nothing(trials, parts)
    passed = [prompt.id for prompt in trials.all_passed]
    lines = [f"{where}: {error}" for where, error in errors.items()]
    print(f"{len(prompts)} prompts have tests of programs")
    print("\n  ".join([f"{len(passed)} are passed by a program that does nothing", *passed]))
    print("\n  ".join([f"{len(lines)} cannot run", *lines]))
    return 1 if passed or errors else 0


def _tested_prompts(path: Path, parts: Table) -> Iterator[Prompt]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                row = _read_row(line, "prompt") if line.strip() else {}
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            if row.get("domain") in parts:
                tests = tuple(row.get("tests", ()))
                yield Prompt(
                    id=where, messages=(), domain=row["domain"], ground_truth="", tests=tests
                )


def _try_nothing(trials: do_nothing.Trials, parts: Table) -> dict[str, str]:
    """Try what was not tried before; returns why tests cannot run, by the prompt's id."""
    found = {}
    left = trials.left

    def try_nothing(prompt: Prompt) -> Score | Exception:
        try:
            return parts[prompt.domain](prompt, do_nothing.REPLY)
        except SandboxUnavailable:
            raise
        except (UserError, SandboxError) as error:
            return error

    threads = ThreadPoolExecutor(MAX_SHARED)
    with threads, ProgressBar(len(left), "trying", "tests") as bar:
        for name, score in zip(left, threads.map(try_nothing, left.values()), strict=True):
            if isinstance(score, Exception):
                found[left[name].id] = str(score)
            else:
                trials.add(name, score)
            bar.advance()
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll-lite rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{try,score,check}")
    attempt = commands.add_parser("try", help="score one reply and explain the score")
    attempt.add_argument("domain", help=f"{', '.join(REWARDS)}, or a domain of --code")
    attempt.add_argument("--truth", default="", help="the prompt's ground_truth: the true answer")
    attempt.add_argument(
        "--tests", metavar="JSON", help="the prompt's tests, a list: constraints, programs"
    )
    attempt.add_argument("--extra", metavar="JSON", help="the prompt's other fields, an object")
    given = attempt.add_mutually_exclusive_group()
    given.add_argument("--reply", help="the whole reply; without it, it is read from stdin")
    given.add_argument("--answer", help="only the answer, as if in a box (math, choice)")
    attempt.set_defaults(run=try_reward)
    score = commands.add_parser("score", help="score the replies of a file again")
    score.add_argument("file", help="a file in rollouts/, or other rows with a reply")
    score.add_argument("--domain", help="the domain of all rows, instead of their own")
    score.add_argument(
        "--show", type=int, default=5, metavar="N",
        help="print the first N rows whose recorded reward is another, and errors (default: 5)",
    )  # fmt: skip
    score.set_defaults(run=score_file)
    check = commands.add_parser(
        "check", help="name prompts that a program which does nothing passes"
    )
    check.add_argument("file", help="prompts with tests of programs, a JSON object in each line")
    check.set_defaults(run=check_tests)
    for command in (attempt, score, check):
        command.add_argument(
            "--code", metavar="FILE", action="append", default=[],
            help="Python file with REWARDS = {domain: function}; may be given several times",
        )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
