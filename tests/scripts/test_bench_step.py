"""scripts/bench/step.py: the recipe's steps on a CPU, beside their plan."""

import json

import pytest
from support.paths import SCRIPTS

from roll_lite import loop

SCRIPT = SCRIPTS / "bench/step.py"


@pytest.mark.slow
def test_steps_are_measured_and_nothing_is_kept(command, tiny_folder, monkeypatch):
    monkeypatch.setattr(loop, "RunState", loop.RunState)  # which the script replaces
    sizes = ["--steps", 3, "--max-tokens", 4, "--prompts-per-step", 2, "--samples-per-prompt", 2]
    turns = ["--engines-sleep", "--offload", "--kv-cache-gib", 0.05, "--device", "cpu"]
    code, printed = command(SCRIPT, tiny_folder, *sizes, *turns)
    assert code == 0 and "train+generate, syncing" in printed and "wrote" not in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["steps"] == 3
    assert all(result["seconds"][name] > 0 for name in ("generate", "train", "reload", "offload"))
    parts = sum(value for name, value in result["seconds"].items() if name != "step")
    assert parts <= result["seconds"]["step"]
