"""Plant one-line faults in copies of the package, and see what `roll-lite bisect` says of them.

python scripts/bench/planted_faults.py --models quickstart/sft/model agentic/sft/model \
    --work /tmp/faults [--only NAME ...] [--keep]

Each fault is one line of the code, of a user's file, of the data or of the command, changed by
exact replacement of a text that is there once. A run of three steps with it is bisected against one
without. Prints a row for each: what was planted, what bisect said, seconds of the tool, and of run
and tool. A fault is found if step, stage and kind are those that are written below. The step must
also be that of the first line of digests.jsonl that differs, which this script finds itself.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
SMALL = {
    "steps": 3, "prompts-per-step": 4, "samples-per-prompt": 4, "eval-prompts": 6, "eval-every": 2,
    "kv-cache-gib": 0.01, "device": "cpu",
}  # fmt: skip
LAKE = "frozen_lake:size=3,style=short"
RUNS = {  # what is run with and without a fault, in a folder with the files below
    "plain": "rlvr --reward-workers 0 --data reverse:5",
    "full": "rlvr --reward-workers 0 --data rows.jsonl --code partial.py --advantage reinforce++ "
    "--kl-coef 0.1 --weight-decay 0.01 --schedule cosine --warmup-steps 1",
    "epochs": "rlvr --reward-workers 0 --data reverse:5 --epochs 2 --lr 3e-3",
    "noisy": "rlvr --reward-workers 0 --data rows.jsonl --code noisy.py",
    "agentic": f"agentic --env-workers 0 --data {LAKE} --history 0 --max-tokens 6",
}
WORDS = [
    "table", "cloud", "river", "stone", "grape", "lemon", "horse", "tiger", "plant", "smile",
    "brick", "shelf",
]  # fmt: skip
FILES = {
    "rows.jsonl": "".join(
        json.dumps({"prompt": f"Reverse {w}", "ground_truth": w[::-1], "domain": "letters"}) + "\n"
        for w in WORDS
    ),
    "partial.py": '''
def letters(prompt, reply):
    """The share of letters that are right."""
    right = [a == b for a, b in zip(reply.strip(), prompt.ground_truth)]
    return sum(right) / len(prompt.ground_truth) / 1.5

REWARDS = {"letters": letters}
''',
    "noisy.py": """
from random import random

def letters(prompt, reply):
    return float(reply.strip() == prompt.ground_truth) + random() / 1e6

REWARDS = {"letters": letters}
""",
}


@dataclass
class Fault:
    name: str
    run: str
    stages: str
    """Those that are right, with spaces between."""
    kind: str
    steps: tuple[int, ...]
    file: str = ""
    """Of the package, of the inputs, or of the model."""
    old: str = ""
    new: str = ""
    options: str = ""
    env: str = ""
    """A variable of the environment."""


FAULTS = [
    # data and prompts
    Fault("another row of the data", "full", "data", "data", (1, 2, 3), "inputs/rows.jsonl",
          '"ground_truth": "eparg"', '"ground_truth": "eparh"'),
    Fault("order of prompts", "full", "prompts", "code", (1,), "data/sources.py",
          'Random(f"{self.seed}/{epoch}")', 'Random(f"{self.seed}-{epoch}")'),
    Fault("text of a task", "plain", "data", "code", (0,), "data/tasks.py",
          'f"Reverse {word}"', 'f"Reverse  {word}"'),
    Fault("text of the template", "plain", "context", "data", (0, 1), "model/chat_template.jinja",
          "['role'][0] + message['content']", "['role'][0] + ' ' + message['content']"),
    Fault("seed of samples", "plain", "seed", "code", (0,), "rollout/prompts.py",
          "int.from_bytes(digest) >> 1", "int.from_bytes(digest) >> 2"),
    Fault("held-out prompts", "plain", "evaluation", "code", (0,), "data/mixture.py",
          "questions = task_prompts(entry.source, seed=0",
          "questions = task_prompts(entry.source, seed=1"),
    # environments
    Fault("one seed of an environment", "agentic", "environment", "code", (1, 2, 3), "envs/game.py",
          "self.start(Random(seed))", "self.start(Random(seed + (seed % 6 == 0)))"),
    Fault("text of an observation", "agentic", "environment", "code", (0, 1), "envs/frozen_lake.py",
          'return "O" if is_hole', 'return "X" if is_hole'),
    Fault("map of the lake", "agentic", "environment", "code", (0, 1), "envs/frozen_lake.py",
          "start, goal = random.sample(cells, 2)", "goal, start = random.sample(cells, 2)"),
    Fault("reward of a turn", "agentic", "reward", "code", (0, 1), "envs/frozen_lake.py",
          "return float(self.is_won)", "return 0.9 * float(self.is_won)"),
    Fault("history one turn longer", "agentic", "context", "code", (0, 1), "envs/play.py",
          "self.num_turns - history)", "self.num_turns - history - 1)"),
    # rewards
    Fault("rounding of a reward", "full", "reward", "code", (1,), "inputs/partial.py",
          "return sum(right) / len(prompt.ground_truth) / 1.5",
          "return round(sum(right) / len(prompt.ground_truth) / 1.5, 4)"),
    Fault("a reward that is random", "noisy", "reward", "not deterministic", (1,)),
    Fault("equal groups are dropped", "plain", "filter", "options", (1, 2, 3),
          options="--drop-equal"),
    # advantages and batch
    Fault("epsilon beside a deviation", "plain", "advantages", "code", (1,), "train/advantages.py",
          "EPSILON = 1e-6", "EPSILON = 2e-6"),
    Fault("off by one in whitening", "full", "advantages", "code", (1,), "train/advantages.py",
          "squares_S / (count_S - 1).clamp(min=1), count_S",
          "squares_S / count_S.clamp(min=1), count_S"),
    Fault("a token is masked", "plain", "batch", "code", (1,), "train/batch.py",
          "is_row_N[starts_S] = 0", "is_row_N[ends_S - 1] = 0"),
    Fault("order of packing", "plain", "batch", "code", (1,), "train/batch.py",
          "return [sorted(b) for bins in filled", "return [sorted(b)[::-1] for bins in filled"),
    Fault("denominator of the loss", "plain", "batch", "code", (1,), "train/sequences.py",
          "(1.0 if rows else 0.0) / sum(rows_S)", "(1.0 if rows else 0.0) / (sum(rows_S) + 1)"),
    Fault("logprobs in 16 bits", "plain", "batch", "code", (1,), "train/batch.py",
          'joined(name, "d")[learned_R].float()', 'joined(name, "d")[learned_R].half().float()'),
    # the model, in engine and trainer
    Fault("base of the rotation", "plain", "model", "code", (0, 1), "models/config.py",
          '_required(hf, "rope_theta", 10000.0))', '_required(hf, "rope_theta", 10000.0)) * 1.01'),
    Fault("epsilon of the norms", "plain", "model", "code", (0, 1), "models/config.py",
          'norm_eps=_required(hf, "rms_norm_eps"),', 'norm_eps=2 * _required(hf, "rms_norm_eps"),'),
    Fault("option: temperature", "plain", "model", "options", (1,), options="--temperature 0.99"),
    Fault("kernels of a CPU without AVX-512", "plain", "model", "numerics", (0, 1),
          env="ATEN_CPU_CAPABILITY=avx2"),
    # the engine
    Fault("scale of its attention", "plain", "engine", "code", (0, 1), "engine/torch_attention.py",
          "flash_attention_for_cpu(q, k, v,", "flash_attention_for_cpu(q * 1.0001, k, v,"),
    Fault("temperature in the engine", "plain", "engine", "code", (1,), "engine/sampler.py",
          "scale(logits_RV[rows], temperatures_R[rows])",
          "scale(logits_RV[rows], temperatures_R[rows] * 1.001)"),
    Fault("hash of the noise", "plain", "sampler", "code", (1,), "engine/sampler.py",
          "x *= 0x735A2D97", "x *= 0x735A2D99"),
    Fault("ids that stop", "plain", "stop", "code", (0, 1), "chat.py",
          "self.end_of_turn, self.tokenizer.eos_token_id)\n        \"\"\"S",
          "self.end_of_turn, self.tokenizer.eos_token_id)[:0]\n        \"\"\"S"),
    Fault("a sync is left out", "plain", "sync", "code", (2,), "roles.py",
          "lambda: self._sync.sync(version,", "lambda: version == 1 or self._sync.sync(version,"),
    # the trainer
    Fault("order of a sum, in its products", "plain", "forward", "code", (1,), "models/ops.py",
          "return F.linear(x_TH, weight_NH, bias_N)",
          "return F.linear(x_TH.flip(-1), weight_NH.flip(-1), bias_N)"),
    Fault("scale of its attention", "plain", "forward", "code", (1,), "models/attention.py",
          "pad(q), pad(k), pad(v), is_causal", "pad(q) * 1.0001, pad(k), pad(v), is_causal"),
    Fault("coefficient of the KL", "full", "loss gradient", "code", (1, 2), "train/losses.py",
          "loss_R + self.kl.kl_coef * kl_R", "loss_R + 1.01 * self.kl.kl_coef * kl_R"),
    Fault("bound of a clip", "epochs", "loss", "code", (1, 2, 3), "train/losses.py",
          "clipped_R = -ratio_R.clamp(1 - clip_low, 1 + clip_high)",
          "clipped_R = -ratio_R.clamp(0.99 - clip_low, 1 + clip_high)"),
    Fault("order of a sum, in the norm", "plain", "clipping", "code", (1, 2, 3), "models/fsdp.py",
          "total = (norms.square() * norms.new_tensor(counts)).sum()",
          "total = (norms.square() * norms.new_tensor(counts)).cumsum(0)[-1]"),
    Fault("clipping of the gradient", "plain", "clipping", "code", (1, 2, 3), "train/trainer.py",
          "(norm + 1e-6)", "(norm + 1e-3)"),
    Fault("option: learning rate", "plain", "schedule", "options", (1,), options="--lr 3.01e-4"),
    Fault("schedule off by one", "full", "schedule", "code", (2,), "train/optimizer.py",
          "done = (step - self.warmup_steps)", "done = (step + 1 - self.warmup_steps)"),
    Fault("epsilon of AdamW", "plain", "optimizer", "code", (1,), "train/adamw.py",
          "eps: float = 1e-8,", "eps: float = 1.1e-8,"),
    Fault("bias correction of AdamW", "plain", "optimizer", "code", (1,), "train/adamw.py",
          "float(self.num_updates)", "float(self.num_updates + 1)"),
    Fault("weight decay", "full", "optimizer", "code", (1,), "train/adamw.py",
          '"eps": eps, "weight_decay": weight_decay,',
          '"eps": eps, "weight_decay": 2 * weight_decay,'),
    # planted once, after the last change of the tool
    Fault("letters that a reward compares", "plain", "reward", "code", (0, 1), "recipes/rlvr.py",
          "float(reply.strip() == prompt.ground_truth)",
          "float(reply.strip()[:4] == prompt.ground_truth[:4])"),
    Fault("end of an observation", "agentic", "environment", "code", (0, 1), "envs/game.py",
          'if self.style == "short":\n            return state\n        return (',
          'if self.style == "short":\n            return state + state[-1]\n        return ('),
    Fault("variance that is none", "plain", "advantages", "code", (1,), "train/advantages.py",
          "EQUAL = 1e-12", "EQUAL = 1.0"),
    Fault("activation of the trainer", "plain", "forward", "code", (1,), "models/ops.py",
          "return F.silu(gate) * up\n", "return F.silu(gate) * (up * 1.00001)\n"),
    Fault("activation of the engine", "plain", "engine", "code", (0, 1), "models/ops.py",
          "wide.neg().exp_().add_(1)", "wide.neg().exp_().add_(1.00001)"),
    Fault("logprobs of the engine", "plain", "engine", "code", (1,), "engine/sampler.py",
          "logit_C, pick_logprobs(logits_CV, ids_C)))",
          "logit_C, pick_logprobs(logits_CV, ids_C) + 1e-6))"),
    Fault("estimate of the KL", "full", "loss gradient", "code", (1, 2), "train/kl.py",
          "return (-delta).expm1() + delta", "return (-delta).expm1() + 1.01 * delta"),
    Fault("scale of the gradient", "plain", "gradient", "code", (1,), "train/trainer.py",
          "(loss_R * micro.weights_R).sum().backward()",
          "(0.999 * loss_R * micro.weights_R).sum().backward()"),
    Fault("decay of a moment", "plain", "optimizer", "code", (1, 2), "train/adamw.py",
          '"beta1": betas[0]', '"beta1": 0.99 * betas[0]'),
    Fault("old weights under a new version", "plain", "sync", "code", (2,), "sync.py",
          "own = self.trainer.whole_parameters(only_part=True)",
          "own = self.trainer.whole_parameters(only_part=True) if version > 1 else "
          "self.engine.model.named_parameters()"),
    Fault("option: seed", "plain", "seed prompts", "options", (0, 1), options="--seed 1"),
    # no fault
    Fault("two threads", "plain", "nothing", "none", (-1,), env="OMP_NUM_THREADS=2"),
    *[Fault("nothing", run, "nothing", "none", (-1,)) for run in ("plain", "full", "agentic")],
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs=2, type=Path, required=True, metavar=("RLVR", "AGENTIC"))
    parser.add_argument("--work", type=Path, required=True, help="folder for copies and runs")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults")
    help = "runs that the folder has are not made again, and have the seconds that they took"
    parser.add_argument("--keep", action="store_true", help=help)
    options = parser.parse_args()
    models = [model.absolute() for model in options.models]
    models = dict(zip(("rlvr", "agentic"), models, strict=True))
    bench = Bench(options.work.absolute(), models, keep=options.keep)
    rows = []
    for number, fault in enumerate(FAULTS, 1):
        if not options.only or fault.name in options.only:
            rows.append(bench.try_fault(number, fault))
            print(rows[-1].line(), flush=True)
    faults = [row for row in rows if row.fault.stages != "nothing"]
    print(f"found: {sum(row.is_found for row in faults)} of {len(faults)}")
    for name in ("tool", "whole"):
        values = [getattr(row, name) for row in faults]
        print(f"seconds, {name}: median {statistics.median(values):.1f}, most {max(values):.1f}")


@dataclass
class Result:
    number: int
    fault: Fault
    step: int
    stage: str
    kind: str
    is_found: bool
    tool: float
    whole: float

    def line(self) -> str:
        said = f"step {self.step}, {self.stage}, {self.kind}"
        place = self.fault.file or self.fault.options or self.fault.env or "-"
        found = "yes" if self.is_found else f"NO: {self.fault.steps} {self.fault.stages}"
        cells = (self.number, self.fault.name, f"`{place}`", self.fault.run, said, found)
        return f"| {' | '.join(map(str, cells))} | {self.tool:.1f} | {self.whole:.0f} |"


class Bench:
    def __init__(self, work: Path, models: dict[str, Path], *, keep: bool = False):
        self.work = work
        self.models = models
        self.keep = keep
        work.mkdir(parents=True, exist_ok=True)
        self.source = work / "clean" / "src"  # the package may change meanwhile
        if not self.source.is_dir():
            shutil.copytree(SOURCE, self.source)
        self.inputs = work / "clean" / "inputs"
        self.inputs.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            (self.inputs / name).write_text(text)

    def try_fault(self, number: int, fault: Fault) -> Result:
        clean = self.work / f"clean-{fault.run}"
        if not (clean / "model").is_dir():
            self._run(clean, Fault("", fault.run, "", "", ()), self.source, self.inputs, None)
        place = self.work / f"{number:02d}"
        if not (self.keep and (place / "seconds.txt").is_file()):
            shutil.rmtree(place, ignore_errors=True)
            source, inputs, model = self._plant(fault, place)
            start = time.perf_counter()
            self._run(place / "run", fault, source, inputs, model)
            (place / "seconds.txt").write_text(f"{time.perf_counter() - start}")
        of_run = float((place / "seconds.txt").read_text())
        start = time.perf_counter()
        command = [sys.executable, "-m", "roll_lite", "bisect", str(clean), str(place / "run")]
        page = ["--html", str(place / "apart.html")]
        done = subprocess.run([*command, *page], env=_env(SOURCE), capture_output=True, text=True)
        of_tool = time.perf_counter() - start
        (place / "bisect.txt").write_text(done.stdout + done.stderr)
        said = re.search(r"first difference: step (\d+), (.+)", done.stdout)
        kind = re.search(r"kind of cause: (.+)", done.stdout)
        step, stage = (int(said[1]), said[2]) if said else (-1, "nothing")
        found_kind = re.split(r"[,:]", kind[1])[0] if kind else "none"
        is_found = (
            step in fault.steps
            and step == _first_line(clean, place / "run")
            and stage in fault.stages.split()
            and found_kind == fault.kind
        )
        return Result(number, fault, step, stage, found_kind, is_found, of_tool, of_run + of_tool)

    def _plant(self, fault: Fault, place: Path) -> tuple[Path, Path, Path | None]:
        """The package, the inputs and the model, copied where the fault is in them."""
        kind, _, name = fault.file.partition("/")
        source, inputs, model = self.source, self.inputs, None
        if kind == "inputs":
            inputs = shutil.copytree(self.inputs, place / "inputs")
            _replace(inputs / name, fault.old, fault.new)
        elif kind == "model":
            model = self.models[RUNS[fault.run].split()[0]]
            model = shutil.copytree(model, place / model.name)
            _replace(model / name, fault.old, fault.new)
        elif fault.file:
            source = place / "src"
            shutil.copytree(self.source, source)
            _replace(source / "roll_lite" / fault.file, fault.old, fault.new)
        return source, inputs, model

    def _run(
        self, folder: Path, fault: Fault, source: Path, inputs: Path, model: Path | None
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        recipe, *given = RUNS[fault.run].split()
        model = model or self.models[recipe]
        command = [sys.executable, "-m", "roll_lite", recipe, "--model", str(model)]
        command += [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
        command += [*given, *fault.options.split(), "--run-dir", str(folder)]
        env = _env(source, fault.env)
        done = subprocess.run(command, env=env, cwd=inputs, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{fault.name or 'clean'}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def _env(source: Path, more: str = "") -> dict[str, str]:
    name, _, value = more.partition("=")
    ours = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return os.environ | ours | ({name: value} if name else {})


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{path} has {old!r} {text.count(old)} times; it must be there once")
    path.write_text(text.replace(old, new))


def _first_line(a: Path, b: Path) -> int:
    """The step of the first line of digests that differs, chains and contracts left out."""
    lines = [(path / "digests.jsonl").read_text().splitlines() for path in (a, b)]
    for x, y in zip(*lines, strict=True):
        x, y = json.loads(x), json.loads(y)
        for name in ("contract", "chain"):
            del x[name], y[name]
        if x != y:
            return x["step"]
    return -1


if __name__ == "__main__":
    main()
