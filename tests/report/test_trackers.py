"""Trackers get every step once, and cannot end a run; the examples of the docs, offline."""

import os
import re
import struct
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
from support.paths import DOCS
from support.training_data import make_groups

from roll_lite.checks import UserError
from roll_lite.own_files import import_file
from roll_lite.report.run import Run
from roll_lite.report.trackers import TrackerOptions
from roll_lite.types import Prompt

CONFIG = Prompt(id="p", messages=(), domain="math", ground_truth="")
TUTORIAL = DOCS / "howto" / "monitor.md"


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, rows, run):
        self.run, self._rows = run, rows

    def log(self, step, metrics):
        self._rows.append((step, dict(metrics)))

    def close(self):
        self._rows.append("closed")


def start(folder, *trackers, **options):
    return Run(folder, CONFIG, num_steps=9, shown={"loss": "loss"}, trackers=trackers, **options)


def test_a_tracker_gets_every_step_once_though_a_resumed_run_repeats_some(tmp_path):
    rows, runs = [], []

    def keep(run):
        runs.append(run)
        return Kept(rows, run)

    run = start(tmp_path, keep)
    for step in range(6):
        run.log(step, {"loss": step / 2})
    run = start(tmp_path, keep, resumed_at=3)  # killed after step 5; the checkpoint is of step 3
    for step in range(4, 8):
        run.log(step, {"loss": step / 2})
    run.close()
    assert rows == [*((step, {"loss": step / 2}) for step in range(8)), "closed"]
    assert [(r.resumed_at, r.folder, r.options["domain"]) for r in runs] == [
        (None, tmp_path, "math"), (3, tmp_path, "math"),
    ]  # fmt: skip
    assert runs[0].id == runs[1].id


def test_a_run_that_starts_over_repeats_everything(tmp_path):
    rows = []
    for options in ({}, {"resumed_at": 0}):
        run = start(tmp_path, partial(Kept, rows), **options)
        for step in range(3 + len(options)):
            run.log(step, {"loss": 1.0})
    assert [step for step, _ in rows] == [0, 1, 2, 3]


def test_the_evaluation_of_the_last_step_is_made_up_after_a_resume(tmp_path):
    rows = []
    start(tmp_path, partial(Kept, rows)).log(3, {"loss": 1.0})
    start(tmp_path, partial(Kept, rows), resumed_at=3).log(3, {"eval": 0.5})
    assert rows == [(3, {"loss": 1.0}), (3, {"eval": 0.5})]


def test_a_tracker_that_raises_is_shown_with_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "def mine(run):\n    return run.nothing\n\nTRACKERS = {'mine': mine}\n"
    (tmp_path / "own_tracker.py").write_text(text)
    opener = import_file(tmp_path / "own_tracker.py").mine
    start(tmp_path / "run", opener).close()
    shown = capsys.readouterr().err
    assert "warning: the tracker mine raised AttributeError(" in shown
    assert "own_tracker.py line 2, in mine\n    return run.nothing\n" in shown


def test_a_tracker_that_raises_does_not_end_the_run(tmp_path, capsys):
    class Broken(Kept):
        def log(self, step, metrics):
            if step != 2:
                raise ConnectionError("no network")
            super().log(step, metrics)

        def close(self):
            raise ConnectionError("no network")

    def absent(run):
        raise ModuleNotFoundError("No module named 'absent'")

    broken, kept = [], []
    run = start(tmp_path, partial(Broken, broken), absent, partial(Kept, kept))
    for step in range(4):
        run.log(step, {"loss": 1.0})
    run.close()
    warnings = capsys.readouterr().err.splitlines()
    assert [re.findall(r"tracker (\w+) raised (\w+)", line) for line in warnings] == [
        [("absent", "ModuleNotFoundError")], [("Broken", "ConnectionError")],
    ]  # fmt: skip
    assert [step for step, _ in kept[:-1]] == [0, 1, 2, 3] and kept[-1] == "closed"
    assert [step for step, _ in broken] == [2]  # the network came back for a while


def test_tensorboard_forgets_what_is_repeated(tmp_path):
    pytest.importorskip("tensorboard", reason='pip install ".[report]"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = start(tmp_path)
    for step in range(6):
        run.log(step, {"loss": 0.0})
    run.close()
    run = start(tmp_path, resumed_at=3)
    for step in range(4, 8):
        run.log(step, {"loss": 1.0})
    run.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(event.step, event.value) for event in read.Scalars("loss")]
    assert values == [*((step, 0.0) for step in range(4)), *((step, 1.0) for step in range(4, 8))]


WANDB = """
CALLS = []


class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


class Run:
    def log(self, data, step):
        CALLS.append((step, data))

    def finish(self):
        CALLS.append("finished")


def init(**options):
    CALLS.append(options)
    return Run()
"""


def recorded_groups(number):
    groups = make_groups([[0.0, 1.0]] * number)
    for sample in (sample for group in groups for sample in group.samples):
        sample.enter("rewarded", 0)
    return groups


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stand-in that records calls: the package may not be installed here."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield import_module("wandb")
    sys.modules.pop("wandb")


def test_wandb_gets_metrics_and_a_table_of_samples(wandb, tmp_path):
    folder = tmp_path / "a"
    run = start(folder, *TrackerOptions(tracker=("wandb",)).openers)
    groups = recorded_groups(20)
    run.write_rollouts(1, groups)
    run.log(1, {"loss": 0.5})
    run.write_answers(1, groups[:1])
    run.close()
    run = start(folder, *TrackerOptions(tracker=("wandb",)).openers, resumed_at=0)
    run.close()
    opened, (_, samples), metrics, (_, answers), finished, again, *_ = wandb.CALLS
    assert opened == again and opened["project"] == "mine" and opened["resume"] == "allow"
    assert opened["name"] == "a" and opened["dir"] == str(folder)
    assert opened["config"]["domain"] == "math"
    assert metrics == (1, {"loss": 0.5}) and finished == "finished"
    rows = samples["samples"].rows
    assert len(rows) == 20 and {row["reward"] for row in rows} == {0.0}  # every second of 40
    assert rows[0]["prompt_id"] == groups[0].prompt.id and rows[0]["reply"] == ""
    assert [row["reward"] for row in answers["eval_samples"].rows] == [0.0, 1.0]


def test_samples_of_steps_that_a_resumed_run_repeats_are_left_out(tmp_path):
    steps = []

    class Samples(Kept):
        def log_samples(self, step, name, rows):
            steps.append((step, name, len(rows)))

    groups = recorded_groups(1)
    for options, first, last in (({}, 1, 3), ({"resumed_at": 2}, 3, 4)):
        run = start(tmp_path, partial(Samples, []), **options)
        for step in range(first, last + 1):
            run.write_rollouts(step, groups)
            run.log(step, {"loss": 1.0})
        run.close()
    assert steps == [(step, "samples", 2) for step in range(1, 5)]


def test_a_tracker_that_is_not_installed_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb").mkdir()  # as wandb makes it for its files
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, extra in (("wandb", "trackers"), ("tensorboard", "report")):
        text = rf"tracker={name} needs the package {name}: pip install {name}, or .*\[{extra}\]"
        with pytest.raises(UserError, match=text):
            TrackerOptions(tracker=(name,))
    with pytest.raises(UserError, match="tracker='mlflow' is not known; use one of tensorboard, w"):
        TrackerOptions(tracker=("mlflow",))


EXAMPLE = """
import sys
from roll_lite.own_files import import_file
from roll_lite.report.run import Run
from roll_lite.types import Prompt
config = Prompt(id="p", messages=(), domain="math", ground_truth="")
first, last, *resumed_at = map(int, sys.argv[2:])
run = Run(sys.argv[1], config, num_steps=9, shown={{}}, trackers=[{name}],
          resumed_at=resumed_at[0] if resumed_at else None)
for step in range(first, last + 1):
    run.log(step, {{"loss/loss": step / 8}})
run.close()
"""


def run_example(code, name, folder, environment):
    """A class in processes of its own: steps 0 to 4, then a resume at step 2."""
    code += EXAMPLE.format(name=name)
    for steps in (("0", "4"), ("3", "6", "2")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder / "run"), *steps],
            cwd=folder, env=os.environ | environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 and "warning: the tracker" not in done.stderr, done.stderr


def log_records(data):
    """Records of a file in the log format of LevelDB, after wandb's own header of 7 bytes."""
    place, record = 7, b""
    while place < len(data):
        if place % 2**15 > 2**15 - 7:  # a record's header does not span two blocks
            place += 2**15 - place % 2**15
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb", reason='pip install ".[trackers]"')
    from wandb.proto.wandb_internal_pb2 import Record

    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run_example("from roll_lite.report.trackers import Wandb", "Wandb", tmp_path, environment)
    rows, ids = [], set()
    for path in sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, log_records(path.read_bytes())):
            ids |= {record.run.run_id} - {""}
            if items := record.history.item:
                values = {item.key or item.nested_key[-1]: float(item.value_json) for item in items}
                rows.append((int(values["_step"]), values["loss/loss"]))
    assert rows == [(step, step / 8) for step in range(7)] and len(ids) == 1


@pytest.mark.slow
def test_trackio_offline(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason='pip install ".[trackers]"')
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    (code,) = re.findall(r"```python\n(import trackio.*?)TRACKERS", TUTORIAL.read_text(), re.S)
    run_example(code, "Trackio", tmp_path, environment)
    code = """
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("mine")
for row in SQLiteStorage.get_logs("mine", run):
    print(row["step"], row["loss/loss"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [(int(step), float(loss)) for step, loss in map(str.split, done.stdout.splitlines())]
    assert rows == [(step, step / 8) for step in range(7)]
