"""A run's folder, which tools and people read later.

config.json      the options
metrics.jsonl    a line for each step
events.jsonl     a line for each sample that was dropped, its life and why; checkpoints, resumes
rollouts/        step_*.jsonl: the samples that were trained on, a line each; its token_ids are what
                 was read, then what was sampled, turn by turn, its logprobs those of the sampled
tensorboard/     the metrics again, where the package tensorboard is installed
"""

import importlib.util
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from roll_lite.checks import flatten
from roll_lite.progress import ProgressBar
from roll_lite.types import Group, Sample


class Run:
    """Keeps a record of every step; prints one line for it."""

    def __init__(
        self,
        folder: str | Path,
        config: Any,
        *,
        num_steps: int,
        shown: dict[str, str],
        resumed_at: int | None = None,
    ):
        """`shown` names the metrics of the console line and how each is called there.

        A run that was `resumed_at` a step keeps the records up to it; others begin anew.
        """
        self.folder, self._shown = Path(folder), shown
        if resumed_at is not None:
            self._forget_after(resumed_at)
        else:
            refuse_old_run(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"run folder: {self.folder}", flush=True)
        text = json.dumps(flatten(config), indent=2, default=str)
        (self.folder / "config.json").write_text(text + "\n")
        self._bar = ProgressBar(num_steps, "steps")
        self._num_steps, self._width = num_steps, len(str(num_steps))
        self._board = _open_tensorboard(self.folder / "tensorboard", resumed_at)
        if resumed_at is not None:
            self.note("resumed", step=resumed_at)

    def is_due(self, step: int, every: int) -> bool:
        """What is done after every so many steps, and after the last; 0 is after the last only."""
        return step == self._num_steps or (every > 0 and step % every == 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step and print the metrics a person watches."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        self._bar.clear()
        parts = [
            f"{label} {metrics[name]:.4g}" for name, label in self._shown.items() if name in metrics
        ]
        print(f"step {step:>{self._width}}  " + "  ".join(parts), flush=True)
        self._bar.count = step
        self._bar.draw()

    def note(self, event: str, step: int, **more: Any) -> None:
        """Write down that something has happened."""
        self._write_events([{"event": event, "step": step, "time": time.time(), **more}])

    def note_samples(self, step: int, dropped: Iterable[tuple[Sample, str]]) -> None:
        """Write down samples that nobody trains on, and why."""
        self._write_events(
            {"event": "sample", "step": step, "why": why, **_life(sample)}
            for sample, why in dropped
        )

    def _write_events(self, rows: Iterable[dict[str, Any]]) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def _forget_after(self, step: int) -> None:
        """Records of steps that will be done again."""
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.folder / name
            path.touch()
            partial = path.with_suffix(".partial")
            with path.open() as lines, partial.open("w") as kept:  # may be gigabytes
                # A line that the end of the last run cut short is of a step after its checkpoint.
                whole = (line for line in lines if line.endswith("}\n"))
                # From step 0 on all is done again, what was measured before training included.
                kept.writelines(line for line in whole if 0 < step >= json.loads(line)["step"])
            partial.rename(path)

    def close(self) -> None:
        self._bar.clear()
        if self._board:
            self._board.close()

    def write_rollouts(self, step: int, groups: list[Group]) -> None:
        """All about the samples that are trained on, or that were evaluated."""
        (self.folder / "rollouts").mkdir(exist_ok=True)
        with (self.folder / "rollouts" / f"step_{step:05d}.jsonl").open("w") as file:
            for group in groups:
                for sample in group.samples:
                    file.write(json.dumps(_row(sample)) + "\n")


def refuse_old_run(folder: str | Path) -> None:
    """For a run that begins: what another has left is not written over."""
    if (Path(folder) / "metrics.jsonl").exists():
        raise ValueError(
            f"run_dir={folder} holds the records of an earlier run; name another folder, remove "
            "it, or, where a recipe has --resume, go on with it"
        )


def default_folder(recipe: str) -> str:
    return time.strftime(f"runs/{recipe}-%Y%m%d-%H%M%S")


def _open_tensorboard(folder: Path, resumed_at: int | None) -> Any:
    """A writer, or None without the package."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


def _life(sample: Sample) -> dict[str, Any]:
    """When a sample was in which state, under which policy version."""
    return {
        "time": sample.events[-1].time,
        "prompt_id": sample.prompt.id,
        "index": sample.index,
        "state": sample.state,
        "reward": sample.score.value if sample.score else None,
        "tokens": sum(sample.loss_mask),
        "events": sample.events,
        "error": sample.error,
    }


def _row(sample: Sample) -> dict[str, Any]:
    """Everything about a sample that a person would want to look up later."""
    ends = [0, *(len(turn.prompt_ids) + len(turn.token_ids) for turn in sample.turns)]
    turns = [
        {
            "read": len(turn.prompt_ids) - begin,
            "sampled": len(turn.token_ids),
            "finish": turn.finish_reason,
            "versions": turn.versions,
        }
        for begin, turn in zip(ends, sample.turns, strict=False)
    ]
    logprobs = [logprob for turn in sample.turns for logprob in turn.logprobs]
    return {
        "prompt_id": sample.prompt.id,
        "domain": sample.prompt.domain,
        "index": sample.index,
        "state": sample.state,
        "messages": sample.prompt.messages,
        "reply": sample.reply,
        "ground_truth": sample.prompt.ground_truth,
        "tests": sample.prompt.tests,
        "reward": sample.score.value if sample.score else None,
        "parts": sample.score.parts if sample.score else {},
        "error": sample.error,
        "token_ids": sample.token_ids,
        "logprobs": np.round(logprobs, 5).tolist(),
        "turns": turns,
        "events": sample.events,
    }
