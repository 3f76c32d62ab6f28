"""Which commits changed learning: short runs of many states of this repository, compared.

python scripts/bench/golden_history.py runs/history --range 0ec58d2^..HEAD
python scripts/bench/golden_history.py runs/history --range 0ec58d2^..HEAD --every --report

The states are those of `git log --first-parent RANGE -- src`, and the one before them: merges are
among them, because a branch that is merged may change learning too. Each state's own code runs
three short cases from the same two models, which this checkout makes: fine-tuning, a question task
and a game. What is compared are tokens, rewards and order of the samples of all steps, and the
weights in the end. Metrics are compared by the names that both states have.

Where two states agree in samples and weights, those between are taken to agree as well: so a few
runs search hundreds of states. --every runs those too, at equal distances first. Results are lines
of OUT/results.jsonl, and a second start goes on.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro
from safetensors.torch import load_file

from roll_lite.report.digests import is_repeated
from roll_lite.train.digests import digest_tensors

ROOT = Path(__file__).parents[2]
LAKE = "frozen_lake:size=2,style=short,max_steps=3"
CPU = "--device cpu --seed 0"
SMALL = f"{CPU} --prompts-per-step 8 --max-tokens 6 --kv-cache-gib 0.01"
START = (
    "tiny tiny",
    f"sft {CPU} --model tiny --data reverse:2 --steps 120 --rows-per-step 32 --careless 0.7 "
    "--eval-every 0 --run-dir words",
    f"envs traces {LAKE} --history 0 --mistakes 0.5 --seed 0 --episodes 400 --out traces.jsonl",
    f"sft {CPU} --model tiny --data traces.jsonl --steps 40 --rows-per-step 32 --eval-every 0 "
    "--run-dir lakes",
)
"""Makes the models from which the cases begin."""
CASES = {
    "sft": f"sft {CPU} --model tiny --data reverse:2 --steps 10 --rows-per-step 16 --careless 0.7 "
    "--eval-every 5 --eval-rows 32",
    "question": f"rlvr {SMALL} --model words/model --data reverse:2 --steps 6 --reward-workers 0 "
    "--eval-every 3 --eval-prompts 32",
    "game": f"agentic {SMALL} --model lakes/model --data {LAKE} --history 0 --steps 4 "
    "--env-workers 1 --eval-every 2 --eval-prompts 16 --eval-samples 1",
}
PROGRAM = """
import json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv = arguments
    sys.path[0] = arguments[0].rpartition("/")[0]  # as python FILE has it
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            print(f"{arguments[0]} ended with {end.code}")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
"""Recipes one after the other in one process: to import torch takes longer than a case."""

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Config:
    out: tyro.conf.Positional[Path]
    """Folder of models and results."""
    range: str = "HEAD~40..HEAD"
    """Commits, in git's words."""
    every: bool = False
    """Run states between two that agree, too."""
    report: bool = False
    """Print the changes, and end."""


def main(cfg: Config) -> None:
    out = cfg.out.resolve()
    results = out / "results.jsonl"
    states = list(reversed(git("log", "--first-parent", "--format=%H", cfg.range, "--", "src")))
    states.insert(0, git("rev-parse", f"{states[0]}^")[0])
    print(f"{len(states)} states from {states[0][:7]} to {states[-1][:7]}", flush=True)
    known = read(results)
    if cfg.report:
        print(table(states, known))
        return
    make_start(out)
    for commit in order(states, known, cfg.every):
        began = time.monotonic()
        found = {"commit": commit, "cases": run_state(out, commit)}
        found["seconds"] = round(time.monotonic() - began, 1)
        known[commit] = found["cases"]
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{commit[:7]} {found['seconds']} s: {summary(found['cases'])}", flush=True)
    print(table(states, known))


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def read(results: Path) -> dict[str, Outcome]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["commit"]: row["cases"] for row in map(json.loads, lines)}


def make_start(out: Path) -> None:
    (start := out / "start").mkdir(parents=True, exist_ok=True)
    if (start / "lakes" / "model").is_dir():
        return
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    for words in START:
        subprocess.run(
            [sys.executable, "-m", "roll_lite", *words.split()], cwd=start, env=env, check=True
        )


def order(states: Sequence[str], known: dict[str, Outcome], every: bool) -> Iterator[str]:
    """States to run: the ends, then halves of what differs, newest first, or of everything."""
    yield from (commit for commit in (states[-1], states[0]) if commit not in known)
    spans = [(0, len(states) - 1)]
    while spans:
        low, high = spans.pop(0 if every else -1)
        middle = (low + high) // 2
        if middle == low or (not every and agree(known[states[low]], known[states[high]])):
            continue
        if states[middle] not in known:
            yield states[middle]
        spans += [(low, middle), (middle, high)]


def agree(one: Outcome, other: Outcome) -> bool:
    """In all but the metrics, and in all cases that both states can run."""
    pairs = [(one[case], other[case]) for case in CASES]
    both = [(a, b) for a, b in pairs if "failed" not in a and "failed" not in b]
    return all(a | {"metrics": None} == b | {"metrics": None} for a, b in both)


# ---- one state


def run_state(out: Path, commit: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="golden-history-") as scratch:
        code, runs = Path(scratch, "code"), Path(scratch, "runs")
        code.mkdir()
        archive = subprocess.run(
            ["git", "archive", commit, "src", "recipes"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", code], input=archive.stdout, check=True)
        calls = []
        for case, text in CASES.items():
            recipe, *words = text.split()
            calls.append([f"{code}/recipes/{recipe}.py", *words, "--run-dir", f"{runs}/{case}"])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code / "src")}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(calls)],
            cwd=out / "start", env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (out / f"{commit[:12]}.txt").write_text(done.stdout)
        return {case: outcome_of(runs / case) for case in CASES}


def outcome_of(run: Path) -> Outcome:
    model = run / "model" / "model.safetensors"
    if not model.is_file():
        return {"failed": True, "metrics": []}
    samples = {
        path.stem: digest(sample_lines(path)) for path in sorted(run.glob("rollouts/step_*.jsonl"))
    }
    weights = digest_tensors(sorted(load_file(model).items()))
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    metrics = [{n: v for n, v in row.items() if is_repeated(n)} for row in rows]
    return {"samples": samples, "weights": weights, "metrics": metrics}


def sample_lines(path: Path) -> Iterator[str]:
    for row in map(json.loads, path.read_text().splitlines()):
        yield json.dumps([row["token_ids"], row["reward"]])


def digest(lines: Iterator[str]) -> str:
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


# ---- what was found


def summary(outcome: Outcome) -> str:
    return ", ".join(f"{c} {f.get('weights', 'failed')[:8]}" for c, f in outcome.items())


def table(states: Sequence[str], known: dict[str, Outcome]) -> str:
    """A row for each pair of states that were run, one after the other, and differ."""
    ran = [number for number, commit in enumerate(states) if commit in known]
    lines = [f"{len(ran)} of {len(states)} states were run"]
    for low, high in pairwise(ran):
        before, now = known[states[low]], known[states[high]]
        if differ := [text for case in CASES for text in differences(case, before, now)]:
            named = git("log", "-1", "--format=%h %ad %s", "--date=iso", states[high])[0]
            several = f" (or {high - low - 1} states before it)" if high - low > 1 else ""
            lines += [f"{named}{several}", *(f"    {text}" for text in differ)]
    return "\n".join(lines)


def differences(case: str, before: Outcome, now: Outcome) -> Iterator[str]:
    old, new = before[case], now[case]
    if "failed" in old or "failed" in new:
        if ("failed" in old) != ("failed" in new):
            yield f"{case}: {'runs no more' if 'failed' in new else 'runs'}"
        return
    if old["samples"] != new["samples"]:
        first = min(n for n in new["samples"] if old["samples"].get(n) != new["samples"][n])
        yield f"{case}: other samples from {first} on"
    if old["weights"] != new["weights"]:
        yield f"{case}: other weights"
    pairs = list(zip(old["metrics"], new["metrics"], strict=False))
    names = sorted({n for a, b in pairs for n in a.keys() & b.keys() if a[n] != b[n]} - {"step"})
    if names:
        yield f"{case}: other values of {', '.join(names)}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
