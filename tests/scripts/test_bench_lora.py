"""scripts/bench/lora.py on a CPU."""

import json

import pytest
from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "bench/lora.py"


@pytest.mark.slow
def test_one_copy_and_two_are_measured(command, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "bench")  # as when it is started
    sizes = ["--shape", "smollm2-135m", "--samples", 2, "--prompt-tokens", 4, "--reply-tokens", 2]
    small = [*sizes, "--kv-cache-gib", 0.05, "--steps", 2, "--device", "cpu"]
    found = []
    for copies in ("one", "two"):
        code, printed = command(SCRIPT, *small, "--copies", copies)
        assert code == 0
        found.append(json.loads(printed.splitlines()[-1]))
    one, two = found
    frozen = 4 * 134_515_008 / 2**30
    assert two["weights_gib"] - one["weights_gib"] == pytest.approx(frozen, rel=0.05)
    assert one["sync_ms"] > 0 and one["seconds"].keys() == {"rollout", "train", "sync"}
