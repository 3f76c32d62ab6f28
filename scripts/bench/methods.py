"""The methods of recipes/code/ beside GRPO, on tasks that a tiny model learns on a CPU.

python scripts/bench/methods.py runs/methods --seeds 0 1 2 --processes 8

Every method has a task on which it differs from GRPO, which runs on the same with the same options:

    maxrl        the quickstart: reverse a word of five letters, after imitating a careless teacher
    gdpo         the same, with two rewards: the whole word, and half the share of right letters
    echo         FrozenLake 3x3 in one conversation, after imitating a player who errs
    sdft         words of a file, whose answer is the demonstration; no reward is read
    curriculum   words of two to nine letters in one file, most of them too easy or too hard

Runs are single processes with one thread each. The table has eval/pass@1 of each evaluation.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

import tyro

import roll_lite as rl
from roll_lite.data import tasks
from roll_lite.own_files import import_file

ROOT = Path(__file__).parents[2]
CODE = ROOT / "recipes" / "code"
LAKE = "frozen_lake:size=3,style=short"
NUM_WORDS = 2000
NUM_LENGTHS = 400  # a prompt comes back after three steps, for the curriculum to know it


def letters(prompt: rl.Prompt, reply: str) -> rl.Score:
    """The whole word, and half the share of its letters in their places."""
    word = prompt.ground_truth
    right = float(reply.strip() == word)
    places = fmean(a == b for a, b in zip(reply.strip().ljust(len(word)), word, strict=False))
    return rl.Score(value=right + places / 2, parts={"right": right, "letters": places / 2})


INLINE = {"reverse": letters}  # this file is given with --code for gdpo and its baseline


@dataclass(frozen=True)
class Config:
    out: tyro.conf.Positional[Path]
    """Folder of all runs."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of every method."""
    processes: int = 2
    """Runs at once."""
    methods: tuple[str, ...] = ("maxrl", "gdpo", "echo", "sdft", "curriculum")
    """Methods to run, each with its baseline."""


def main(cfg: Config) -> None:
    out = cfg.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tiny").exists():
        call("tiny", "-m", "roll_lite", "tiny", out / "tiny", "--seed", 0, out=out)
    with ThreadPoolExecutor(cfg.processes) as pool:
        list(pool.map(partial(prepare, out), sorted({START[name] for name in cfg.methods})))
        jobs = [
            (f"{name}-{kind}-{seed}", command(out, name, kind, seed))
            for name in cfg.methods
            for kind in ("grpo", name)
            for seed in cfg.seeds
        ]
        list(pool.map(lambda job: call(job[0], *job[1], out=out), jobs))
    for name in cfg.methods:
        for kind in ("grpo", name):
            curves = [rates(out / f"{name}-{kind}-{seed}") for seed in cfg.seeds]
            for seed, curve in zip(cfg.seeds, curves, strict=True):
                print(f"{name:11}{kind:11}{seed}  {show(curve)}")
            print(f"{name:11}{kind:11}mean {show(map(fmean, zip(*curves, strict=True)))}")


START = {"maxrl": "words", "gdpo": "words", "echo": "lake", "sdft": "shown", "curriculum": "words"}
"""What the model of each method has imitated."""


def prepare(out: Path, start: str) -> None:
    """A model that has imitated something, in OUT/start-NAME/model unless it is there, and data."""
    if (out / f"start-{start}" / "model").exists():
        return
    sft = ["recipes/sft.py", "--model", out / "tiny", "--run-dir", out / f"start-{start}"]
    if start == "words":
        call("start-words", *sft, "--data", "reverse:5", "--steps", 140, "--careless", 0.7, out=out)
        write(out / "lengths.jsonl", map(partial(row, size=None), range(NUM_LENGTHS)))
    elif start == "lake":
        traces = out / "traces.jsonl"
        made = ["-m", "roll_lite", "envs", "traces", LAKE, "--mistakes", 0.3, "--out", traces]
        call("traces", *made, out=out)
        call("start-lake", *sft, "--data", traces, "--steps", 60, "--eval-every", 0, out=out)
    else:
        rows = [row(number, 5) for number in range(NUM_WORDS)]
        write(out / "words.jsonl", rows)
        write(out / "shown.jsonl", dialogues(rows))
        call("start-shown", *sft, "--data", out / "shown.jsonl", "--steps", 300, out=out)


def row(number: int, size: int | None) -> dict:
    """A word to reverse; of two to nine letters unless a size is given."""
    random = Random(f"{size} {number}")
    example = tasks.reverse(random, size or random.choice((2, 3, 4, 5, 6, 7, 8, 9)))
    return {"prompt": example.question, "ground_truth": example.answer, "domain": "reverse"}


def dialogues(rows: list[dict]) -> Iterable[dict]:
    """A careless answer to each question, and the right one behind its demonstration."""
    show_answer = import_file(CODE / "sdft.py").with_demonstration
    for prompt in islice(tasks.prompts("reverse:5", seed=1), len(rows)):
        word = prompt.ground_truth
        careless = word[:-1] if Random(prompt.id).random() < 0.7 else word
        yield {"messages": [*prompt.messages, {"role": "assistant", "content": careless}]}
        yield {"messages": [*show_answer(prompt), {"role": "assistant", "content": word}]}


def write(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def command(out: Path, name: str, kind: str, seed: int) -> list:
    """A run of a method, or of GRPO on the method's task."""
    recipe = "agentic" if name == "echo" else "rlvr"
    model = out / f"start-{START[name]}" / "model"
    line = [f"recipes/{recipe}.py", "--model", model, "--seed", seed, "--eval-every", 5]
    line += ["--run-dir", out / f"{name}-{kind}-{seed}", "--rollouts-every", 0]
    code = [] if kind == "grpo" else [CODE / f"{name}.py"]
    if name == "gdpo":
        code.append(__file__)
    line += ["--code", *code] if code else []
    line += {
        "maxrl": ["--data", "reverse:5"],
        "gdpo": ["--data", "reverse:5"],
        "echo": ["--data", LAKE, "--max-tokens", 6, "--steps", 20, "--prompts-per-step", 24,
                 "--env-workers", 1, "--eval-prompts", 128, "--eval-samples", 2],
        "sdft": ["--data", out / "words.jsonl", "--eval-share", 0.1],
        "curriculum": ["--data", out / "lengths.jsonl", "--eval-share", 0.25],
    }[name]  # fmt: skip
    choice = {"maxrl": "--advantage", "gdpo": "--advantage", "sdft": "--advantage"}
    choice |= {"echo": "--loss"}
    return line + ([choice[name], name] if kind != "grpo" and name in choice else [])


def call(log: str, *arguments: object, out: Path) -> None:
    """Run Python with one thread; the output goes to OUT/LOG.log."""
    with (out / f"{log}.log").open("w") as file:
        subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=ROOT, stdout=file,
            stderr=subprocess.STDOUT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def rates(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]


def show(curve: Iterable[float]) -> str:
    return " ".join(f"{rate:.3f}" for rate in curve)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
