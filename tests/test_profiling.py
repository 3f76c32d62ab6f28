"""Profiles and traces of a run as a user asks for them, held to the times of its records."""

import gzip
import json

import pytest
from support.recipes import call_recipe
from support.runs import toy_options
from support.traces import read_trace, slices

from roll_lite.options import from_flat
from roll_lite.profiling import ProfileOptions
from roll_lite.recipes import rlvr
from roll_lite.report.__main__ import main


@pytest.fixture(scope="module")
def run_dir(toy_folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("profile") / "run"
    values = toy_options(
        toy_folder, run_dir, steps=4, prompts_per_step=2, eval_every=0, profile_steps="2-3"
    )
    call_recipe(rlvr, from_flat(rlvr.Config, **values))
    return run_dir


def test_the_profile_is_of_its_steps(run_dir):
    (path,) = (run_dir / "profile").rglob("*.*")
    assert path.parent.name == "steps_2-3" and path.name == "rank_0.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    operations = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    base = trace["baseTimeNanoseconds"] / 1e9
    first = base + min(e["ts"] for e in operations) / 1e6
    last = base + max(e["ts"] + e["dur"] for e in operations) / 1e6
    rows = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").open())}
    assert rows[1]["time"] < first and last < rows[4]["time"] - rows[4]["time/step"]
    assert first < rows[2]["time"] < last
    names = {e["name"] for e in operations}
    assert any(name.startswith("autograd::engine") for name in names)  # training
    assert any("attention" in name for name in names)


def test_the_trace_of_a_run_agrees_with_its_metrics(run_dir, tmp_path):
    main([str(run_dir), "--trace", str(tmp_path / "out.json")])
    events = read_trace(tmp_path / "out.json")
    rows = [row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if row["step"]]
    for name in ("rollout", "prepare", "train", "sync", "records"):
        lasted = [e["dur"] / 1e6 for e in slices(events, 1, name)]
        assert lasted == pytest.approx([row[f"time/{name}"] for row in rows], abs=2e-6)
    samples = [e for e in slices(events, 2) if "step" in e["args"]]
    assert len(samples) == sum(row["rollout/started"] for row in rows)
    lines = map(json.loads, (run_dir / "rollouts" / "step_00001.jsonl").open())
    assert all(line["replicas"] == [0] for line in lines)
    assert len(slices(events, 10, "generating")) >= len(rows)  # of the only rank


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile_steps": "6-5"}, "profile_steps='6-5' is not a range"),
        ({"profile_steps": "5", "profile_ranks": "all"}, "profile_ranks='all' is not a range"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ProfileOptions(**options)
