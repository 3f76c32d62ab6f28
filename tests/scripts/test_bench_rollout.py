"""scripts/bench/rollout.py: every mode ends, and its samples are counted."""

import json

from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "bench/rollout.py"


def test_every_mode_is_measured(command):
    sizes = ["--in-flight", 64, "--min-samples", 128, "--at-a-time", 8]
    code, printed = command(SCRIPT, *sizes)
    assert code == 0
    found = json.loads(printed.splitlines()[-1])
    assert set(found) == {"plain", "drop equal", "staleness 1", "staleness 1, drop equal"}
    assert all(found[mode]["64"] > 0 for mode in found)
