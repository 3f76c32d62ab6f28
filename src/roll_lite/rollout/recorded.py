"""Samples that another run has recorded, trained on in place of new ones (proof/whatif.py)."""

from collections.abc import Mapping
from typing import Any

from roll_lite.report.reader import Row, RunFolder
from roll_lite.report.records import opening, read_prompt
from roll_lite.rollout.prompts import Visit
from roll_lite.rollout.record import read_row
from roll_lite.types import Sample

KL = "whatif/kl"
DECIDING = {
    "model", "temperature", "top_k", "top_p", "min_p", "stop", "max_tokens", "template_args",
    "system", "max_turns", "history", "old_thoughts", "episode_tokens", "at_limit", "judge",
    "judge_tokens", "judge_template_args", "reward_model",
}  # fmt: skip
"""Options that decide what is sampled or how it is scored. Other prompts have no recorded samples,
and filters are applied again."""


class RecordedSamples:
    """Taken in the same step, until the policy has moved away from the one that sampled them."""

    def __init__(self, cfg: Any, options: Mapping[str, Any]):
        """`options` are those of `cfg`, flat, as config.json has them."""
        self._run = RunFolder(cfg.rollout.recorded)
        self._max_kl = cfg.rollout.max_kl
        self._version: int | None = None
        self._rows: dict[tuple[str, int, int], Row] = {}
        """Of the step after the version."""
        changed = _changed(cfg, self._run.options, options)
        rows = RunFolder(cfg.run_dir).rows  # of a run that is resumed
        self.is_open = not changed and all(row.get(KL, 0) <= self._max_kl for row in rows)
        if changed:
            names = ", ".join(changed)
            print(f"{names}: not as in {cfg.rollout.recorded}, so no recorded samples are taken")

    def restored(self, visit: Visit, index: int, version: int) -> Sample | None:
        """A recorded sample of the step after a policy version."""
        if not self.is_open:
            return None
        if version != self._version:
            self._version = version
            self._rows = self._read(f"step_{version + 1:05d}")
        row = self._rows.get((visit.prompt.id, visit.number, index))
        is_same = row is not None and opening(visit.prompt) == opening(read_prompt(row))
        return read_row(row, visit.prompt) if is_same else None

    def _read(self, name: str) -> dict[tuple[str, int, int], Row]:
        """By prompt, visit and index; none of a step that was not recorded."""
        rows = self._run.all_samples(name) if name in self._run.names else ()
        rows = [row for row in rows if row["reward"] is not None]
        # A line with one turn lacks its state: all samples of a group open in the same.
        states = {_group(r): t["state"] for r in rows for t in r["turns"][:1] if "state" in t}
        for row in rows:
            row["turns"][0].setdefault("state", states.get(_group(row), ""))
        return {(*_group(row), row["index"]): row for row in rows}

    def note(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """How far the policy was from the one that sampled, before the update of a step."""
        if not self.is_open or "mismatch/k3" not in metrics:
            return {}
        self.is_open = metrics["mismatch/k3"] <= self._max_kl
        if not self.is_open:
            print("the policies have parted: the next steps take new samples", flush=True)
        return {KL: metrics["mismatch/k3"]}


def _group(row: Row) -> tuple[str, int]:
    return row["prompt_id"], row["visit"]


def _changed(cfg: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = DECIDING | cfg.own.values.keys()
    if cfg.own.envs or any(cfg.own.rewards({}, {})) or {*before["code"]} - {*cfg.own.code}:
        names |= {"code", "code_digests"}
    return sorted(name for name in names if before.get(name) != now[name])
