"""Try rewards on a reply, or score the replies of a file.

python -m roll_lite.rewards try math --truth 1/2 --reply 'So it is \\boxed{0.5}.'
python -m roll_lite.rewards try math --truth 1/2 --answer 0.5
python -m roll_lite.rewards try choice --truth B < reply.txt
python -m roll_lite.rewards try instructions --tests '[{"kind": "no_commas"}]' --reply 'None.'
python -m roll_lite.rewards score runs/RUN/rollouts/step_00010.jsonl --domain math
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from roll_lite.rewards.choice import chosen
from roll_lite.rewards.constraints import holds
from roll_lite.rewards.instructions import check_instructions
from roll_lite.rewards.math import judge
from roll_lite.rewards.registry import REWARDS
from roll_lite.rewards.rescore import rescore
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
    score = REWARDS[options.domain](prompt, reply)  # refuses what it cannot score before we explain
    for line in _EXPLAIN.get(options.domain, lambda *_: [])(prompt, reply):
        print(line)
    score = score if isinstance(score, Score) else Score(value=float(score))
    print(f"score     {score.value:g}")
    print("parts     " + ", ".join(f"{name} {value:g}" for name, value in score.parts.items()))
    return 0


def score_file(options: argparse.Namespace) -> int:
    report = rescore(Path(options.file), REWARDS, options.domain)
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


def _explain_math(prompt: Prompt, reply: str) -> list[str]:
    answer, place, verdict = judge(reply, prompt.ground_truth)
    return [
        f"answer    {answer} ({place})",
        f"verdict   {verdict.kind}",
        f"why       {verdict.why}",
    ]


def _explain_choice(prompt: Prompt, reply: str) -> list[str]:
    letters, place = chosen(reply)
    return [f"letters   {' '.join(sorted(letters)) or 'none'} ({place})"]


def _explain_instructions(prompt: Prompt, reply: str) -> list[str]:
    check_instructions(prompt)
    return [
        f"{'yes' if holds(reply, test) else 'no':<10}{json.dumps(test)}" for test in prompt.tests
    ]


_EXPLAIN = {
    "math": _explain_math,
    "choice": _explain_choice,
    "instructions": _explain_instructions,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roll_lite.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{try,score}")
    attempt = commands.add_parser("try", help="score one reply and say why")
    attempt.add_argument("domain", choices=sorted(REWARDS))
    attempt.add_argument("--truth", default="", help="the true answer")
    attempt.add_argument(
        "--tests", help="constraints, or what else replies are checked with, as JSON"
    )
    given = attempt.add_mutually_exclusive_group()
    given.add_argument("--reply", help="the whole reply; read from stdin where it is not given")
    given.add_argument("--answer", help="an answer alone, as if in a box (math, choice)")
    attempt.set_defaults(run=try_reward)
    score = commands.add_parser("score", help="score the replies of a file again")
    score.add_argument("file", help="rows {reply, ground_truth, tests?, domain?, reward?}")
    score.add_argument("--domain", choices=sorted(REWARDS), help="for rows without one, and others")
    score.add_argument("--show", type=int, default=5, help="so many disagreements and errors")
    score.set_defaults(run=score_file)
    return parser


if __name__ == "__main__":
    sys.exit(main())
