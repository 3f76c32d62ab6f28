"""Find where two runs go apart: the first step, sample, token and stage, and the kind of cause.

roll-lite bisect A B                         # the folders of two runs
roll-lite bisect A B --html apart.html       # and a page with the first samples that differ

Digests say which step differs first, samples and metrics what in it, and contracts what the two
runs did not have in common: data, code, options, packages or machine. Nothing is computed again.
The exit code is 0 if all steps that both have are equal, 1 if one differs, and 2 if they cannot be
compared.
"""

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from roll_lite.checks import UserError
from roll_lite.proof.recorded import RecordedRun, described, differing, listing
from roll_lite.proof.samples import ROUNDING, Parting, name_of, part_samples, trainer_apart
from roll_lite.report.contract import Contract, changes
from roll_lite.report.digests import is_repeated
from roll_lite.report.page import write_two_samples
from roll_lite.report.reader import RunFolder
from roll_lite.report.terminal import readable

CODE = {
    "start": "models", "data": "data", "prompts": "data rollout", "seed": "rollout",
    "environment": "envs data workers rollout", "failure": "envs rewards workers",
    "context": "chat rollout envs", "model": "models kernels", "engine": "engine kernels models",
    "sync": "sync roles engine", "stop": "engine rollout chat", "sampler": "engine kernels models",
    "reply": "chat engine", "reward": "rewards rewarding recipes envs", "filter": "rollout",
    "evaluation": "rollout data engine", "advantages": "train/advantages train/sample_rows",
    "batch": "train/batch train/se train/sample_rows", "forward": "models kernels",
    "loss": "train/losses train/kl", "gradient": "train/losses train/kl models kernels",
    "clipping": "train/trainer models/fsdp", "schedule": "train/optimizer recipes",
    "optimizer": "train/adamw", "metrics": "rollout train",
}  # fmt: skip
"""Stages, and how paths of their code begin."""
OF_BATCH = {"indices": "packing", "rows": "mask", "weights": "weights of tokens in the loss"}
EXACT = {
    "data", "prompts", "seed", "environment", "context", "stop", "reply", "reward", "filter",
    "schedule",
}  # fmt: skip
"""Stages that no kernel changes."""
OF_FILES = EXACT - {"schedule"} | {"start", "model", "evaluation", "samples"}
"""Stages that data, or the folder of a model, can change."""
OF_METRICS = {
    "loss/loss": "loss", "loss/kl": "loss", "policy/": "loss", "loss/lr": "schedule",
    "loss/grad_norm": "clipping", "": "metrics",
}  # fmt: skip
"""How metrics begin, and the stages that they are of where all digests before are equal."""
GPU_ROUNDING = 0.03
"""Of logprobs in bf16."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "roll-lite bisect", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="folder of a run")
    parser.add_argument("b", metavar="B", help="folder of another run")
    help = "write a page with the first samples that differ, token by token"
    parser.add_argument("--html", metavar="FILE", type=Path, help=help)
    options = parser.parse_args(arguments)
    if options.html and not options.html.absolute().parent.is_dir():
        parser.error(f"--html {options.html}: its folder does not exist")
    try:
        runs = TwoRuns(options.a, options.b)
        found = runs.first_parting()
        about = "\n".join(runs.verdict(found))
        print(about)
        if options.html:
            rows, token = (found.rows or (), found.token) if found else ((), None)
            write_two_samples(runs.folders, rows, options.html, about, token)
            print(f"wrote {options.html}")
    except (ValueError, OSError, LookupError) as error:
        is_damaged = isinstance(error, LookupError)
        what = f"a record of one of the runs is damaged: {error!r}" if is_damaged else error
        print(f"error: {what}", file=sys.stderr)
        return 2
    return 1 if found else 0


class TwoRuns:
    def __init__(self, a: str, b: str):
        self.runs = RecordedRun(a), RecordedRun(b)
        self.folders = RunFolder(a), RunFolder(b)
        self.steps = sorted(self.runs[0].steps.keys() & self.runs[1].steps.keys())
        if not self.steps:
            raise UserError(f"{a} and {b} have no step in common: nothing can be compared")

    def first_parting(self) -> Parting | None:
        """None if all steps that both have are equal."""
        return next(filter(None, map(self._part_step, self.steps)), None)

    def _part_step(self, step: int) -> Parting | None:
        lines = [run.steps[step] for run in self.runs]
        names = [n for n in differing(*lines) if all(n in line for line in lines)]
        metrics = self._other_metrics(step) if "metrics" in names else []
        if not metrics and names == ["metrics"] and self._has_other_evaluation(step):
            return None
        return self._stage(step, names, metrics)._replace(step=step) if names else None

    def _stage(self, step: int, names: Sequence[str], metrics: Sequence[str]) -> Parting:
        """The first of those whose digests and metrics differ."""
        batch = [name.removeprefix("batch/") for name in names if name.startswith("batch/")]
        rates = [text for text in metrics if text.startswith("loss/lr")]
        if step == 0 and {"weights", "frozen"} & {*names}:
            return Parting("start", "the weights before the first step")
        if "samples" in names and (found := part_samples(*self.folders, f"step_{step:05d}")):
            return found
        if batch:
            has_samples = all("samples" in run.steps[step] for run in self.runs)
            return _part_batch(batch, has_samples, has_samples and "samples" not in names)
        if "gradient" in names:
            return self._part_gradient(step, metrics)
        if "clipping" in names:
            return Parting("clipping", listing(metrics, 4) or "the same norm has another factor")
        if "weights" in names:
            what = rates[0] if rates else "the same gradient gave other weights"
            return Parting("schedule" if rates else "optimizer", what)
        of_evaluation = all(text.startswith("eval/") for text in metrics)
        if "answers" in names or (names == ["metrics"] and of_evaluation):
            return self._part_evaluation(step, metrics)
        stage = "forward" if "samples" in names else names[0].partition("/")[0]
        stage = _stage_of(metrics) if stage == "metrics" else stage
        return Parting(stage, listing(metrics or names, 4))

    def _part_gradient(self, step: int, metrics: Sequence[str]) -> Parting:
        """Of the same batch: another forward pass, another loss, or what follows from it."""
        norms = [run.metrics.get(step, {}).get("loss/grad_norm", 0.0) for run in self.runs]
        num_parts = self.runs[0].config.get("updates_per_step", 1)
        apart = trainer_apart(*self.folders, f"step_{step:05d}", num_parts)
        has_other_loss = _stage_of(metrics) == "loss"
        stage = "forward" if apart else "loss" if has_other_loss else "gradient"
        what = f"entropies of the trainer differ by up to {apart:.2g}; " if apart else ""
        what += listing(metrics, 4) or "no metric differs"
        if num_parts * self.runs[0].config.get("epochs", 1) > 1:
            what += "; or the optimizer, between two updates of the step"
        size = abs(norms[0] - norms[1]) / max(*norms, 1e-12)
        return Parting(stage, what, size=max(apart, size))

    def _part_evaluation(self, step: int, metrics: Sequence[str]) -> Parting:
        """Samples of the next step have the same weights, and tokens that say more than texts."""
        found = part_samples(*self.folders, f"eval_{step:05d}")
        found = found or Parting("evaluation", listing(metrics, 4) or "its answers")
        later = part_samples(*self.folders, f"step_{step + 1:05d}")
        is_open = found.stage in ("answers", "evaluation")
        if is_open and later and later.stage not in ("advantages", "filter"):
            return later._replace(what=f"{found.what}\n  at step {step + 1}, {later.what}")
        is_own = is_open or found.stage == "prompts"
        return found._replace(stage="evaluation" if is_own else found.stage)

    def _has_other_evaluation(self, step: int) -> bool:
        """Whether one was evaluated after this step, and the other was not."""
        rows = [run.metrics.get(step, {}) for run in self.runs]
        return len({any(name.startswith("eval/") for name in row) for row in rows}) == 2

    def _other_metrics(self, step: int) -> list[str]:
        a, b = (run.metrics.get(step, {}) for run in self.runs)
        names = [n for n in a if n in b and is_repeated(n) and a[n] != b[n]]
        names.sort(key=lambda name: not name.startswith("loss/"))
        return [f"{name}: {a[name]} | {b[name]}" for name in names]

    def verdict(self, found: Parting | None) -> Iterator[str]:
        for name, run in zip("AB", self.runs, strict=True):
            yield f"{name}: {run.folder}, steps {min(run.steps)} to {max(run.steps)}"
        if not found:
            yield f"all {len(self.steps)} steps that both have are equal"
            return
        yield f"first difference: step {found.step}, {found.stage}"
        yield from [f"  {name_of(found.rows[0])}"] if found.rows else []
        yield f"  {found.what}"
        contracts = [run.contract_of(found.step) for run in self.runs]
        changed = changes(*contracts)
        yield f"kind of cause: {_kind(found, changed, contracts)}"
        yield from (f"  {readable(line)}" for line in described(changed))
        begins = tuple(CODE.get(found.stage, "-").split())
        if near := [name for name in changed.get("code", ()) if name.startswith(begins)]:
            yield f"  code of this stage: {listing(near)}"
        command = f"roll-lite verify {self.runs[0].folder} --steps {max(1, found.step)}"
        if not changed:
            yield f"{command} says whether A repeats; the same of {self.runs[1].folder}, whether B"
        elif found.stage not in EXACT and {"packages", "machine"} & changed.keys():
            yield f"{command}, with A's code on B's machine, says whether the machine is the cause"


def _stage_of(metrics: Sequence[str]) -> str | None:
    stages = OF_METRICS.items()
    return next((s for begin, s in stages if any(t.startswith(begin) for t in metrics)), None)


def _part_batch(names: Collection[str], has_samples: bool, are_equal: bool) -> Parting:
    if "token_ids" in names and not has_samples:  # as in SFT
        return Parting("data", "tokens of the batch: other rows, their encoding, or packing")
    if "token_ids" in names and not are_equal:
        return Parting("samples", "they are not recorded in both; --rollouts-every 1 does so")
    part = next((part for name, part in OF_BATCH.items() if name in names), "numbers")
    stage = "advantages" if [*names] == ["advantages"] else "batch"
    return Parting(stage, f"{part} of the batch: {', '.join(names)}")


def _kind(
    found: Parting, changed: Mapping[str, Sequence[str]], contracts: Sequence[Contract]
) -> str:
    """What the contracts differ in, without what cannot change this stage."""
    is_gpu = any("gpu" in contract["machine"] for contract in contracts)
    kinds = {{"files": "data", "own": "code"}.get(part, part) for part in changed}
    unable = {"machine"} if found.stage in EXACT else set()
    kinds = kinds - unable - (set() if found.stage in OF_FILES else {"data"}) or kinds
    limit = GPU_ROUNDING if is_gpu else ROUNDING
    is_small = found.stage not in EXACT and (found.size is None or found.size < limit)
    if not kinds:
        is_timed = contracts[0]["options"].get("max_staleness")
        why = ", and samples of an asynchronous run depend on time" if is_timed else ""
        return f"not deterministic: the contracts are equal{why}"
    if kinds <= {"packages", "machine"} and is_small:
        return "numerics"
    is_rounding = found.size is not None and found.size < limit
    return " or ".join(sorted(kinds)) + ", and no more than rounding" * is_rounding
