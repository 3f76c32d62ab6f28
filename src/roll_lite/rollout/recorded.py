"""Samples that another run has recorded, trained on in place of new ones (proof/whatif.py).

A recorded sample takes the place of one of the same step, prompt, visit and index, until the policy
has moved away from the policy that sampled it.
"""

from collections.abc import Mapping
from typing import Any

from roll_lite.checks import UserError
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
    """What a run recorded, for as long as the policies have not parted."""

    def __init__(self, cfg: Any, options: Mapping[str, Any]):
        """`options` are those of `cfg`, flat, as config.json has them."""
        run = RunFolder(cfg.rollout.recorded)
        if not any(name.startswith("step_") for name in run.names):
            raise UserError(
                f"recorded={cfg.rollout.recorded!r} has no samples of steps; name the folder of a "
                "run of rlvr.py or agentic.py with --rollouts-every 1"
            )
        self._run = run
        self._max_kl = cfg.rollout.max_kl
        self.changed = _changed(cfg, run.options, options)
        """Options for which recorded samples are not those that the run would have."""
        rows = RunFolder(cfg.run_dir).rows
        self.is_open = not self.changed and all(row.get(KL, 0) <= self._max_kl for row in rows)
        self._version: int | None = None
        self._rows: dict[tuple[str, int, int], Row] = {}
        """Of the step after the version."""

    def restored(self, visit: Visit, index: int, version: int) -> Sample | None:
        """A recorded sample of the step after a policy version."""
        if not self.is_open:
            return None
        if version != self._version:
            self._version = version
            self._rows = self._read(f"step_{version + 1:05d}")
        row = self._rows.get((visit.prompt.id, visit.number, index))
        if row is None or opening(visit.prompt) != opening(read_prompt(row)):
            return None
        return read_row(row, visit.prompt)

    def _read(self, name: str) -> dict[tuple[str, int, int], Row]:
        rows = self._run.all_samples(name) if name in self._run.names else ()
        scored = [row for row in rows if row["reward"] is not None]
        # A sample of one turn has no state in its line: the samples of a group open in the same.
        opened = {_group(row): row["turns"][0]["state"] for row in scored if len(row["turns"]) > 1}
        for row in scored:
            row["turns"][0].setdefault("state", opened.get(_group(row), ""))
        return {(*_group(row), row["index"]): row for row in scored}

    def note(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """How far the policy was from the one that sampled, before the step's update. Samples are
        taken no more when that is above the bound."""
        if not self.is_open or "mismatch/k3" not in metrics:
            return {}
        kl = metrics["mismatch/k3"]
        self.is_open = kl <= self._max_kl
        return {KL: kl}


def _group(row: Row) -> tuple[str, int]:
    return row["prompt_id"], row["visit"]


def _changed(cfg: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = DECIDING | cfg.own.values.keys()
    if cfg.own.envs or any(cfg.own.rewards({}, {})) or {*before["code"]} - {*cfg.own.code}:
        names |= {"code", "code_digests"}
    return sorted(name for name in names if before.get(name) != now[name])
