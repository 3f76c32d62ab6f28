"""Golden learning curves: run small cases, and compare them with what was recorded.

roll-lite ci [FOLDER]             # the cases in tests/golden, in a folder of yours, or one of them
roll-lite ci FOLDER --write       # records what the cases do now

A case is a folder with a case.json. The run of its command is compared:

    {"before": ["tiny {out}/tiny"],
     "command": "rlvr --model {out}/tiny --data my.jsonl --steps 20",
     "metrics": ["eval/pass@1", "reward/mean"]}

With the packages and the machine of the record, all digests and these metrics are to be equal.
Elsewhere the mean of a curve's second half is to be within a band: twice the range of several
seeds. The exit code is 0 if all is equal or within its band, 1 if not, and 2 after an error.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from roll_lite.checks import UserError
from roll_lite.files import read_json_object
from roll_lite.proof.again import LINES_OF_OUTPUT
from roll_lite.proof.recorded import OF_THE_CHAIN, RecordedRun, described, differing, listing, rows
from roll_lite.report.contract import changes
from roll_lite.report.digests import digest_metrics, digest_text
from roll_lite.report.records import encode, repeated_part
from roll_lite.report.terminal import StepTable, readable

Steps = dict[int, dict[str, Any]]  # with digests, metrics and samples (reply, reward, digest)
NO_STEP: dict[str, Any] = {"digests": {}, "metrics": {}, "samples": []}


class Case(NamedTuple):
    folder: Path
    before: list[str]
    command: str
    metrics: list[str]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "roll-lite ci", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default="tests/golden", help="cases")
    parser.add_argument("--write", action="store_true", help="record what the cases do now")
    help = "with --write: runs for the bands (5); 1 makes none"
    parser.add_argument("--seeds", type=int, default=5, help=help)
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be 1 or more")
    num_seeds = options.seeds if options.write else 1
    judge = write if options.write else compare
    try:
        cases = find_cases(options.folder)
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(run_case, case, num_seeds, scratch) for case in cases]
            passed = [judge(case, job.result()) for case, job in zip(cases, jobs, strict=True)]
        return 0 if all(passed) else 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def find_cases(folder: Path) -> list[Case]:
    found = [(path, read_json_object(path)) for path in sorted(folder.rglob("case.json"))]
    if not found:
        raise UserError(f"{folder} has no case: write NAME/case.json there (roll-lite ci --help)")
    for path, case in found:
        if missing := sorted({*Case._fields[1:]} - case.keys()):
            raise UserError(f"{path} needs {missing[0]!r} (roll-lite ci --help)")
    return [Case(path.parent, *(case[n] for n in Case._fields[1:])) for path, case in found]


def run_case(case: Case, num_seeds: int, scratch: str) -> list[RecordedRun]:
    """Of seeds 0, 1, ...; what comes before is the same for all."""
    out = tempfile.mkdtemp(dir=scratch)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    folders = [f"{out}/{seed}" for seed in range(num_seeds)]
    runs = [f"{case.command} --seed {n} --run-dir {path}" for n, path in enumerate(folders)]
    for command in [*case.before, *runs]:
        words = shlex.split(command.replace("{out}", out))
        done = subprocess.run(
            [sys.executable, "-m", "roll_lite", *words], env=env, capture_output=True, text=True
        )
        if done.returncode:
            end = "\n".join((done.stdout + done.stderr).splitlines()[-LINES_OF_OUTPUT:])
            raise UserError(f"{case.folder.name}: {command} ended with {done.returncode}:\n{end}")
    return [*map(RecordedRun, folders)]


def steps_of(case: Case, run: RecordedRun) -> Steps:
    found = {}
    for step, line in sorted(run.steps.items()):
        metrics = {n: run.metrics.get(step, {}).get(n) for n in case.metrics}
        digests = {n: d for n, d in line.items() if n not in OF_THE_CHAIN}
        digests["metrics"] = digest_metrics(metrics)  # those of the case alone
        path = run.folder / "rollouts" / f"step_{step:05d}.jsonl"
        samples = [*map(_sample, path.read_text().splitlines() if path.is_file() else ())]
        found[step] = {"digests": digests, "metrics": metrics, "samples": samples}
    return found


def _sample(line: str) -> list[Any]:
    row, digest = json.loads(line), digest_text("sample", [repeated_part(line)])
    return [row["reply"], row["reward"], digest[:8]]


def late_mean(steps: Steps, metric: str) -> float:
    """Of the second half of a curve."""
    values = [v for kept in steps.values() if (v := kept["metrics"].get(metric)) is not None]
    if not values:
        raise UserError(f"metrics has {metric!r}, which no step of the run has")
    return fmean(values[len(values) // 2 :])


def write(case: Case, runs: Sequence[RecordedRun]) -> bool:
    found = [steps_of(case, run) for run in runs]
    means = {name: [late_mean(steps, name) for steps in found] for name in case.metrics}
    golden = {"contract": runs[0].contract_of(0) | {"code": {}}, "late_means": means}
    (case.folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    lines = [encode({"step": step, **kept}) + "\n" for step, kept in found[0].items()]
    (case.folder / "steps.jsonl").write_text("".join(lines))
    print(f"{case.folder.name}: recorded {len(lines)} steps of seed 0", flush=True)
    return True


def compare(case: Case, runs: Sequence[RecordedRun]) -> bool:
    """Whether the run is equal to the record, or within its bands on another machine."""
    if not (path := case.folder / "golden.json").is_file():
        raise UserError(f"{path} is missing: roll-lite ci {case.folder} --write records the case")
    golden, now = read_json_object(path), steps_of(case, runs[0])
    then: Steps = {row["step"]: row for row in rows(case.folder / "steps.jsonl")}
    for step in sorted({*then, *now}):
        old, new = then.get(step, NO_STEP), now.get(step, NO_STEP)
        if names := differing(old["digests"], new["digests"]):
            break
    else:
        print(f"{case.folder.name}: equal to the last bit, {len(now)} steps", flush=True)
        return True
    changed = changes(golden["contract"], runs[0].contract_of(0) | {"code": {}})
    wrong = ["packages and machine are those of the record: code or options changed learning"]
    if not changed.keys().isdisjoint(("packages", "machine")):
        wrong = [*_outside(golden["late_means"], now)]
    verdict = "differs" if wrong else "within its bands, on another machine or other packages"
    print(f"{case.folder.name}: {verdict}. The first step that differs is {step}: {listing(names)}")
    for line in [*wrong, *described(changed), *_first_sample(old, new), *_table(case, then, now)]:
        print(f"    {line}", flush=True)
    return not wrong


def _outside(seeds: Mapping[str, Sequence[float]], now: Steps) -> Iterator[str]:
    for name, means in seeds.items():
        band, mean = 2 * (max(means) - min(means)), late_mean(now, name)
        if not abs(mean - means[0]) <= band:  # as it is for NaN
            yield f"{name}: late mean {means[0]:.4g} recorded, {mean:.4g} now; band {band:.4g}"


def _first_sample(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for number, (old, new) in enumerate(zip(then["samples"], now["samples"], strict=False), 1):
        if old != new:
            yield f"its first sample that differs is number {number}:"
            for title, (reply, reward, digest) in (("recorded", old), ("now", new)):
                yield f"    {title:8}  reward {reward}, digest {digest}: {readable(reply)!r}"
            return


def _table(case: Case, then: Steps, now: Steps, width: int = 100) -> Iterator[str]:
    sides = {"recorded": then, "now": now}
    table = StepTable({f"{s} {n}": f"{s} {n}" for n in case.metrics for s in sides})
    for step in sorted({*then, *now}):
        found = [(side, steps.get(step, NO_STEP)["metrics"]) for side, steps in sides.items()]
        values = {f"{side} {name}": value for side, kept in found for name, value in kept.items()}
        yield from table.lines(step, values, width)
