"""Traces of runs: the format, read by rules of its own, and the times of the records."""

import json

import pytest
from support.made_runs import make_run, sample, write_lines
from support.traces import read_trace, slices

from roll_lite.report.__main__ import main


def seconds(events):
    return [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]


@pytest.fixture
def folder(tmp_path):
    """Two ranks train; two engines, of ranks 1 and 2, share the samples of each step."""
    folder = make_run(tmp_path / "run", num_steps=3, num_samples=4)
    config = json.loads((folder / "config.json").read_text())
    config["starts"][-1]["ranks"] = {"train": [[0], [1]], "generate": [[1], [2]]}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:  # recorded at 102, 104, 106
        row |= {"time/step": 1.5, "time/rollout": 1.0, "time/train": 0.375, "time/sync": 0.125}
        row |= {"loss/odd": float("nan"), "time/evaluate": 0.25}
    write_lines(folder / "metrics.jsonl", rows)
    for step in (1, 2, 3):
        at = 98.25 + 2 * step  # when the rollout begins
        made = [
            sample(step, n, turns=[{}], replicas=[n % 2], events=[
                ["queued", at, 0], ["generating", at + 0.125, 0],
                ["stepping", at + 0.25 + n / 8, 0], ["scoring", at + 0.5 + n / 8, 0],
                ["done", at + 0.5625 + n / 8, 0],
            ]) for n in range(4)
        ]  # fmt: skip
        write_lines(folder / "rollouts" / f"step_{step:05d}.jsonl", made)
    lost = sample(
        2, 99, state="failed", error="boom", turns=[], replicas=[1], reward=float("nan"),
        events=[["queued", 102.25, 0], ["generating", 102.5, 0], ["failed", 103.0, 0]],
    )  # fmt: skip
    saved = {"event": "checkpoint", "step": 3, "time": 106.5, "seconds": 0.25, "bytes": 9}
    write_lines(
        folder / "events.jsonl",
        [{"event": "sample", "step": 2, "why": "its reward raised", **lost}, saved],
    )
    return folder


def test_parts_of_steps_have_the_times_of_the_metrics(folder, tmp_path, capsys):
    assert main([str(folder), "--trace", str(tmp_path / "out.json")]) == 0
    events = read_trace(tmp_path / "out.json")
    assert f"{len(events)} events" in capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("rollout", "train", "sync"):
        found = [e["dur"] / 1e6 for e in slices(events, 1, name)]
        assert found == [row[f"time/{name}"] for row in rows]
    # Step 1 was recorded at 102; it ended 0.25 s before, and began 1.5 s earlier: that is 0.
    assert seconds(slices(events, 1, "step 2")) == [(2.0, 3.5)]
    assert seconds(slices(events, 1, "evaluation")) == [(n, n + 0.25) for n in (1.5, 3.5, 5.5)]
    assert seconds(slices(events, 1, "checkpoint")) == [(6.0, 6.25)]


def test_ranks_have_their_parts_of_steps_and_their_engines(folder, tmp_path):
    main([str(folder), "--trace", str(tmp_path / "out.json"), "--steps", "1"])
    events = read_trace(tmp_path / "out.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in (10, 11, 12)] == [
        "rank 0: train", "rank 1: train, generate", "rank 2: generate",
    ]  # fmt: skip
    for pid, trains in ((10, True), (11, True), (12, False)):
        assert seconds(slices(events, pid, "train")) == ([(1.0, 1.375)] if trains else [])
        assert seconds(slices(events, pid, "sync")) == [(1.375, 1.5)]
    # Engine 0 (rank 1) had samples 0 and 2, engine 1 (rank 2) samples 1 and 3.
    assert seconds(slices(events, 11, "generating")) == [(0.125, 0.5)]
    assert seconds(slices(events, 12, "generating")) == [(0.125, 0.625)]
    counts = [
        (e["ts"], e["args"]["generating"]) for e in events if e["ph"] == "C" and e["pid"] == 12
    ]
    assert counts == [(125000, 1), (125000, 2), (375000, 1), (625000, 0)]
    assert not slices(events, 10, "generating")


def test_samples_go_from_state_to_state_and_wait_for_training(folder, tmp_path):
    main([str(folder), "--trace", str(tmp_path / "out.json"), "--steps", "1-2"])
    events = read_trace(tmp_path / "out.json")
    of_samples = slices(events, 2)
    whole = [e for e in of_samples if "/" in e["name"]]
    assert len(whole) == 9 and {e["args"]["step"] for e in whole} == {1, 2}
    assert len({e["tid"] for e in whole}) == 5  # lanes are used again
    (failed,) = [e for e in whole if e["args"]["state"] == "failed"]
    assert failed["args"]["why"] == "its reward raised" and failed["args"]["reward"] is None
    first = [e for e in of_samples if e["tid"] == 1 and e["ts"] < 1.5e6][1:]
    assert [(e["name"], *times) for e, times in zip(first, seconds(first), strict=True)] == [
        ("queued", 0.0, 0.125), ("generating", 0.125, 0.25), ("environment", 0.25, 0.5),
        ("scoring", 0.5, 0.5625), ("waiting", 0.5625, 1.0),
    ]  # fmt: skip


def test_a_folder_without_records_has_an_empty_trace(tmp_path):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    assert main([str(tmp_path / "run"), "--trace", str(tmp_path / "out.json")]) == 0
    assert all(event["ph"] == "M" for event in read_trace(tmp_path / "out.json"))


@pytest.mark.parametrize("steps", ["5-", "6-5", "x", "1-2-3"])
def test_steps_that_are_none(tmp_path, capsys, steps):
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path), "--trace", str(tmp_path / "out.json"), "--steps", steps]) == 2
    assert f"steps={steps!r} is not a range" in capsys.readouterr().err
