"""Check that a run is what its folder says: compute steps of it again, and compare all digests.

roll-lite verify RUN --steps 3,17,80      # these, and one that you cannot foresee

First the folder is checked against itself: the chain of digests, metrics, samples, answers,
checkpoints and model. Then the steps are computed again, each from the checkpoint before it, by the
run's own recipe. This needs the code, packages, files and kind of machine that the run had; where
they differ nothing is compared, and what differs is said. --keep-every N of a run keeps checkpoints
for this. The exit code is 0 if all agrees, 1 if something does not, and 2 if it cannot be checked.
"""

import argparse
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from roll_lite.checks import UserError
from roll_lite.models.hf import load_model, stored_dtype
from roll_lite.proof.again import follow, started_again
from roll_lite.proof.recorded import RecordedRun, differing, listing, rows
from roll_lite.report.config_file import ENDED
from roll_lite.report.digests import chained, digest_metrics, digest_of_lines, digest_text
from roll_lite.train.checkpoint_folders import read_manifest
from roll_lite.train.digests import digest_tensors
from roll_lite.train.export import MASTERS, base_model, checkpoint_weights


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        run = RecordedRun(options.run)
        num_problems = 0
        for problem in check_folder(run):
            print(problem, flush=True)
            num_problems += 1
        if num_problems:
            print("the folder was changed after it was written: no step is computed again")
            return 1
        print(f"{run.folder} agrees with itself: {len(run.steps)} steps")
        return 0 if verify(run, options.steps, options.one_more) else 1
    except (ValueError, OSError, LookupError) as error:
        is_damaged = isinstance(error, LookupError)
        what = f"a record of {options.run} is damaged: {error!r}" if is_damaged else error
        print(f"error: {what}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "roll-lite verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", help="folder of a run")
    help = "steps to compute again, as in 3,17,80; by default the last"
    parser.add_argument("--steps", type=_steps, default=(), help=help)
    help = "leave out the step that is drawn beside those that are named"
    parser.add_argument("--no-more", dest="one_more", action="store_false", help=help)
    return parser


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 3,17") from error


# ---- the folder against itself


def check_folder(run: RecordedRun) -> Iterator[str]:
    """What does not agree within the folder."""
    yield from _check_chain(run)
    yield from _check_options(run)
    yield from _check_metrics(run)
    yield from _check_samples(run)
    yield from _check_weights(run)


def _check_chain(run: RecordedRun) -> Iterator[str]:
    before = ""
    for number, line in enumerate(run.lines, 1):
        if line.get("chain") != chained(line, before):
            yield f"digests.jsonl: line {number} (step {line['step']}) breaks the chain"
        before = line.get("chain", "")
        run.contract(line["contract"])
    known = {start.get("contract") for start in run.config["starts"]}
    if unknown := {line["contract"] for line in run.lines} - known:
        yield f"digests.jsonl names contract {min(unknown)}, which no start in config.json has"
    if missing := sorted({*range(max(run.steps) + 1)} - run.steps.keys()):
        yield f"digests.jsonl lacks steps {listing(missing)}"


def _check_options(run: RecordedRun) -> Iterator[str]:
    """config.json against the contract of the last start."""
    contract = run.contract(run.config["starts"][-1]["contract"])
    for name, value in contract["options"].items():
        if not _is_named(value, run.config.get(name)):
            yield f"config.json has {name}={run.config.get(name)!r}, and the contract {value!r}"


def _is_named(value: Any, text: Any) -> bool:
    """Whether an option is that of a contract, which has the last name of a path."""
    if isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
        return all(map(_is_named, value, text))
    if not (isinstance(value, str) and isinstance(text, str)):
        return value == text
    domain, _, name = value.rpartition("=")  # DOMAIN=FOLDER
    return value == text or (text.endswith(f"/{name}") and text.startswith(domain))


def _check_metrics(run: RecordedRun) -> Iterator[str]:
    found = [(row["step"], digest_metrics(row)) for row in rows(run.folder / "metrics.jsonl")]
    nothing = digest_metrics({})
    wanted = [(line["step"], line["metrics"]) for line in run.lines]
    wanted = [pair for pair in wanted if pair[1] != nothing]
    for step in sorted({step for step, _ in found} ^ {step for step, _ in wanted}):
        yield f"step {step} is in one of metrics.jsonl and digests.jsonl"
    for step, _ in sorted({*found} ^ {*wanted}):
        yield f"step {step}: metrics.jsonl has other numbers than those that were digested"


def _check_samples(run: RecordedRun) -> Iterator[str]:
    for kind, name in (("samples", "step"), ("answers", "eval")):
        paths = {int(p.stem[5:]): p for p in run.folder.glob(f"rollouts/{name}_*.jsonl")}
        for step, path in sorted(paths.items()):
            with path.open() as lines:
                found = digest_of_lines(kind, lines)
            if (wanted := run.steps.get(step, {}).get(kind)) is None:
                yield f"{path} is of a step whose {kind} have no digest"
            elif found != wanted:
                yield f"step {step}: {path} is not what was digested"
        if paths:  # else the run writes none
            every = run.config.get("rollouts_every", 1) if kind == "samples" else 1
            due = {step for step, line in run.steps.items() if kind in line and not step % every}
            for step in sorted(due - paths.keys()):
                yield f"step {step}: the file of its {kind} is missing"


def _check_weights(run: RecordedRun) -> Iterator[str]:
    for step, path in run.checkpoints.items():
        wanted = run.steps.get(step, {}).get("weights")
        try:
            if wanted is not None and digest_of_checkpoint(path) != wanted:
                yield f"step {step}: {path} does not hold the weights that were digested"
        except SafetensorError as error:
            yield f"step {step}: {path} cannot be read: {error}"
    newest = max(run.checkpoints, default=-1)
    has_ended = newest >= (run.config.get("steps") or 0) or run.config.get(ENDED)
    if (run.folder / "model").is_dir() and newest >= 0 and has_ended:  # else of an earlier start
        path = run.checkpoints[newest]
        try:
            if names := _other_weights(path, run.folder / "model"):
                yield f"model/ is not {path}: {listing(names)}"
        except UserError as error:  # adapters, whose base is not here
            print(f"model/ is not checked: {error}")


def digest_of_checkpoint(path: Path) -> str:
    """What the ranks that wrote it have digested."""
    manifest = read_manifest(path)
    files = {record.file: record.pieces for record in manifest.files}
    texts = []
    for rank in range(manifest.layout["ranks"]):
        name = f"policy-{rank:05d}.safetensors"
        pieces = {n: p for n, p in files.get(name, {}).items() if n.startswith(MASTERS)}
        names = {n: f"{n} at {list(pieces[n].offsets)}" for n in sorted(pieces)}
        if pieces:
            with safe_open(path / name, "pt") as file:
                texts.append(digest_tensors((a, file.get_tensor(n)) for n, a in names.items()))
        else:
            texts.append("")
    return texts[0] if len(texts) == 1 else digest_text("weights", texts)


def _other_weights(checkpoint: Path, model: Path) -> list[str]:
    """Names of the tensors of an exported model that are not the checkpoint's."""
    weights = checkpoint_weights(checkpoint, base_model(checkpoint))
    dtype = stored_dtype(model)
    exported = load_model(model, dtype=dtype)
    return [n for n, p in weights if not p.to(dtype).equal(exported.get_parameter(n))]


# ---- steps computed again

GPU_GRADIENT = 1e-3
"""Relative difference of equal gradients' norms on a GPU, at most; 1e-5 was measured."""
OF_GRADIENT = {"gradient", "clipping", "weights", "metrics"}
"""Digests that need not repeat on a GPU, whose sums come in any order."""
SIDES = ("tracker", "profile", "export_every", "keep_every")
"""Options of a run that steps do without."""


def verify(run: RecordedRun, steps: Sequence[int], one_more: bool) -> bool:
    """Whether steps that are computed again have the digests that are recorded."""
    spans = plan(run, _chosen(run, steps, one_more))
    _say_cost(run, spans)
    agree = True
    with tempfile.TemporaryDirectory(prefix="roll-lite-verify-") as scratch:
        for checkpoint, last in spans:
            folder = Path(scratch) / f"from-{checkpoint}"
            with started_again(run, checkpoint, folder, left_out=SIDES) as process:
                done = checkpoint or -1  # the start has digests too
                for again in follow(run, process, folder, last):
                    for step in sorted(s for s in again.steps if done < s <= last):
                        agree &= _agrees(run, again, step)
                    done = max(again.steps)
    print("all that was computed again agrees" if agree else "the run is not what its folder says")
    return agree


def _chosen(run: RecordedRun, steps: Sequence[int], one_more: bool) -> list[int]:
    recorded = sorted(run.steps.keys() - {0})
    if not recorded:
        raise UserError(f"{run.folder} has no step to compute again")
    if run.config.get("max_staleness", 0):
        raise UserError(
            f"{run.folder} has max_staleness={run.config['max_staleness']}: which samples an "
            "asynchronous step has depends on time, so it cannot be computed again"
        )
    if unknown := sorted({*steps} - {*recorded}):
        raise UserError(
            f"--steps {listing(unknown)}: the run has digests of steps 1 to {recorded[-1]}"
        )
    chosen = {*(steps or recorded[-1:])}
    others = [n for n in recorded if n not in chosen and run.start_before(n) is not None]
    others = [n for n in others if not is_on_gpu(run, n) or run.start_before(n) == n - 1]
    if one_more and others:
        chosen.add(secrets.choice(others))
    for step in chosen:
        if is_on_gpu(run, step) and run.start_before(step) != step - 1:
            raise UserError(
                f"--steps {step}: weights need not repeat on a GPU, so only the step after a "
                "checkpoint can be compared; name one, and keep more next time (--keep-every)"
            )
    return sorted(chosen)


def is_on_gpu(run: RecordedRun, step: int) -> bool:
    return "gpu" in run.contract_of(step)["machine"]


def plan(run: RecordedRun, steps: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a checkpoint and the last step to compute after it; 0 is the run's start."""
    last: dict[int, int] = {}
    for step in steps:
        if (start := run.start_before(step)) is None:
            raise UserError(
                f"--steps {step}: options, code or machine changed between it and the checkpoint "
                "before it; name another step, and keep more checkpoints next time (--keep-every)"
            )
        last[start] = max(step, last.get(start, 0))
    return sorted(last.items())


def _say_cost(run: RecordedRun, spans: Sequence[tuple[int, int]]) -> None:
    seconds = 0.0
    for start, last in spans:
        rows = [run.metrics.get(step, {}) for step in range(start + 1, last + 1)]
        seconds += sum(row.get("time/step", 0) + row.get("time/evaluate", 0) for row in rows)
        place = f"the checkpoint of step {start}" if start else "the run's start"
        print(f"steps {start + 1} to {last} are computed again from {place}")
    starts = "the start comes" if len(spans) == 1 else f"{len(spans)} starts come"
    print(f"they took the run {seconds:.0f} s; {starts} on top", flush=True)


def _agrees(run: RecordedRun, again: RecordedRun, step: int) -> bool:
    wrong = differing(run.steps[step], again.steps[step])
    norms = [side.metrics.get(step, {}).get("loss/grad_norm") for side in (run, again)]
    if wrong and {*wrong} <= OF_GRADIENT and None not in norms and is_on_gpu(run, step):
        size = abs(norms[0] - norms[1]) / (max(norms) or 1.0)
        if size < GPU_GRADIENT:
            found = f"samples and batch agree, and the gradient's norm to {size:.0e}"
            print(f"step {step}: {found}: sums on a GPU need not repeat", flush=True)
            return True
    if wrong:
        same = [n for n in run.steps[step] if n not in wrong and "/" not in n]
        kept = [n for n in ("samples", "gradient", "weights", "answers", "metrics") if n in same]
        also = f" ({', '.join(kept)} agree)" if kept else ""
        print(f"step {step}: {listing(wrong)} do not agree{also}", flush=True)
    else:
        print(f"step {step}: all digests agree", flush=True)
    return not wrong
