"""Checkpoints: nothing half-written or damaged is ever used, and what is kept is what should be."""

import itertools
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roll_lite.models.config import shape_config
from roll_lite.train import checkpoint_folders
from roll_lite.train.checkpoint import CheckpointOptions, RunState, refuse_links_out
from roll_lite.train.checkpoint_folders import (
    Checkpoints,
    check_architecture,
    read_manifest,
    read_pieces,
    verify,
)
from roll_lite.train.shards import DamagedError, Piece, write_shard

CONFIG = shape_config("smollm2-135m")
FINISH = {"architecture": CONFIG, "layout": {"fsdp": 1}}


def save(checkpoints, step, *, num_ranks=2, width=6, score=None, kind="full", state=None):
    """A checkpoint in which every number is the step."""
    folder = checkpoints.begin(step)
    records = []
    for rank in range(num_ranks):
        local = torch.full((3, width), float(step))
        pieces = {"model.a": Piece(local, (3 * rank, 0), (3 * num_ranks, width))}
        if rank == 0:
            pieces["count"] = Piece.whole(torch.tensor(step))
        records.append(write_shard(folder, rank, pieces))
    return checkpoints.finish(step, records, state=state or {}, score=score, kind=kind, **FINISH)


def load(folder, *, num_ranks=2, width=6):
    """The numbers of a checkpoint that `save` wrote."""
    target, count = torch.zeros(3 * num_ranks, width), torch.tensor(-1)
    read_pieces(folder, {"model.a": Piece.whole(target), "count": Piece.whole(count)})
    return {*target.flatten().tolist(), float(count)}


def test_targets_are_filled_in_place_and_only_where_asked(tmp_path):
    folder = save(Checkpoints(tmp_path), 7)
    columns_first = torch.zeros(6, 4).T  # not contiguous
    parameter = torch.nn.Parameter(torch.zeros(2, 6))
    read_pieces(folder, {"model.a": Piece(columns_first[:, 1:3], (2, 3), (6, 6))})
    read_pieces(folder, {"model.a": Piece(parameter, (4, 0), (6, 6))})
    assert columns_first.sum(0).tolist() == [0, 28, 28, 0, 0, 0]
    assert parameter.unique().tolist() == [7]


def test_files_that_do_not_overlap_are_not_opened(tmp_path):
    folder = save(Checkpoints(tmp_path), 7)
    (folder / "shard-00000.safetensors").unlink()
    target = torch.zeros(3, 6)
    read_pieces(folder, {"model.a": Piece(target, (3, 0), (6, 6))})
    assert target.unique().tolist() == [7]
    with pytest.raises(DamagedError, match=r"shard-00000\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    folder = save(Checkpoints(tmp_path), 7)
    manifest = read_manifest(folder)
    first, *rest = manifest.files
    checkpoint_folders.write_manifest(
        folder, replace(manifest, files=[replace(first, file=name), *rest])
    )
    with pytest.raises(DamagedError, match=re.escape(repr(name))):
        read_manifest(folder)


@pytest.mark.parametrize("inside", ["rollouts", "metrics.partial", "checkpoints/step-00000001/x"])
def test_a_run_with_links_to_elsewhere_is_not_resumed(tmp_path, inside):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    elsewhere.mkdir()
    (run / "also.jsonl").symlink_to(run / "metrics.jsonl")
    (tmp_path / "here").symlink_to(run)
    refuse_links_out(tmp_path / "here")
    (run / inside).symlink_to(elsewhere)
    options = CheckpointOptions(resume=True)
    with pytest.raises(ValueError, match=f"{inside} is a link to .*elsewhere, out of run_dir="):
        RunState(run, options, [], {}, {})


def test_the_manifest_keeps_what_the_run_needs(tmp_path):
    state = {"schedule": {"step": 9}, "data": [1, 2**60], "lr": 1e-5, "metric": float("inf")}
    manifest = read_manifest(save(Checkpoints(tmp_path), 9, score=0.5, state=state))
    assert (manifest.step, manifest.score, manifest.state) == (9, 0.5, state)
    assert manifest.layout == {"fsdp": 1}
    assert {n: p.dtype for f in manifest.files for n, p in f.pieces.items()} == {
        "model.a": "float32",
        "count": "int64",
    }


def test_a_byte_changed_in_any_file_is_found_and_the_previous_checkpoint_used(tmp_path, capsys):
    checkpoints, rng = Checkpoints(tmp_path), random.Random(0)
    previous, newest = save(checkpoints, 1), save(checkpoints, 2)
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for at in {0, len(whole) - 1, *rng.sample(range(len(whole)), 25)}:
            changed = bytearray(whole)
            changed[at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            problems = [p for part in range(3) for p in verify(newest, part, 3)]
            assert problems and all(file.name in problem for problem in problems)
            assert checkpoints.newest_whole(verify) == previous
            assert file.name in capsys.readouterr().out
        file.write_bytes(whole)
    assert checkpoints.newest_whole(verify) == newest


@pytest.mark.parametrize(
    "file", ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"]
)
def test_missing_and_short_files_are_named(tmp_path, file):
    folder = save(Checkpoints(tmp_path), 1)
    size = (folder / file).stat().st_size
    for length in (0, size // 2, size - 1):
        os.truncate(folder / file, length)
        assert [file in problem for problem in verify(folder)] == [True]
    (folder / file).unlink()
    assert [file in problem for problem in verify(folder)] == [True]


def test_each_part_reads_its_own_files_and_together_all(tmp_path):
    folder = save(Checkpoints(tmp_path), 1, num_ranks=5)
    for file in folder.glob("shard-*"):
        os.truncate(file, 1)
    found = [verify(folder, part, 3) for part in range(3)]
    assert [len(problems) for problems in found] == [2, 2, 1]
    assert len({p for problems in found for p in problems}) == 5


def test_when_none_is_whole_all_problems_are_listed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_whole(verify) is None
    os.truncate(save(checkpoints, 1) / "shard-00001.safetensors", 9)
    (save(checkpoints, 2) / "manifest.json").unlink()
    with pytest.raises(DamagedError) as error:
        checkpoints.newest_whole(verify)
    assert "step-00000001/shard-00001.safetensors has 9 bytes" in str(error.value)
    assert "step-00000002/manifest.json cannot be read: No such file" in str(error.value)


CHANGES = ("open", "os.mkdir", "os.rename")  # audit events of what a save does to files


def write_for_ever(folder, sender, num_changes, waits):
    """Resume, then write checkpoints until killed, sometimes one that is there already.

    Before a change of files of the number given, tell; then wait there for the end, or go on.
    """

    def tell(event, arguments):
        nonlocal num_changes
        if event in CHANGES and not (event == "open" and arguments[1] != "wb"):
            num_changes -= 1
            if num_changes == 0:
                sender.send_bytes(b"now")
                while waits:
                    signal.pause()

    checkpoints = Checkpoints(folder, keep_last=2)
    newest = checkpoints.newest_whole(verify)
    step = read_manifest(newest).step if newest else 0
    sys.addaudithook(tell)
    while True:
        step += 1
        for _ in range(1 + (step % 3 == 0)):
            save(checkpoints, step, width=5000)


def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path, monkeypatch):
    """Before a known change of files; and a little later, anywhere in this save or in another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by each writer
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    save(Checkpoints(tmp_path), 1, width=5000)
    steps, num_half_written = [1], 0
    for num_changes, waits in itertools.product(range(1, 13), (True, False)):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (tmp_path, sender, num_changes, waits)
        writer = context.Process(target=write_for_ever, args=arguments, daemon=True)
        writer.start()
        sender.close()  # so that a writer that fails ends the wait for it
        receiver.recv_bytes()
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        num_half_written += any(tmp_path.glob(".step-*.partial"))
        present = Checkpoints(tmp_path).newest_first()
        for folder in present:
            step = read_manifest(folder).step
            assert verify(folder) == [] and load(folder, width=5000) == {step}, folder
        steps.append(read_manifest(present[0]).step)
        assert steps[-1] >= steps[-2] and len(present) >= min(steps[-1], 2)
    assert steps[-1] > 3 and num_half_written  # it did write, and was killed while it did
    save(Checkpoints(tmp_path), steps[-1] + 1)
    assert not list(tmp_path.glob(".*"))


@contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    previous = save(checkpoints, 1)
    partial_folder = checkpoints.begin(2)
    pieces = {"model.a": Piece.whole(torch.zeros(300_000))}
    with (
        files_of_at_most(1_000_000),
        pytest.raises(OSError, match=r"shard-00004.* needs 1200\d\d\d bytes .*File too large"),
    ):
        write_shard(partial_folder, 4, pieces)
    assert list(partial_folder.iterdir()) == []  # its bytes are free again
    checkpoints.abandon(2)
    assert list(tmp_path.iterdir()) == [previous] and load(previous) == {1}


def test_a_disk_that_is_full_at_the_manifest_leaves_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    previous = save(checkpoints, 1)
    with (
        files_of_at_most(5000),
        pytest.raises(OSError, match=r"manifest.json needs \d+ bytes"),
    ):
        save(checkpoints, 2, state={"long": "x" * 5000})
    assert list(tmp_path.iterdir()) == [previous] and load(previous) == {1}


@pytest.mark.parametrize("suffix", ["partial", "removed"])
def test_what_dead_runs_left_is_removed_but_not_what_is_being_written(tmp_path, suffix):
    (tmp_path / f".step-00000004.{suffix}" / "deep").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.begin(5)
    second = checkpoints.begin(6)
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_a_replacement_that_stopped_halfway_is_undone(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, 1)
    path.rename(tmp_path / ".step-00000001.replaced")  # killed here, before the new one came
    assert Checkpoints(tmp_path).newest_first() == [path]
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith("partial"):
            raise OSError("no rename today")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no rename today"):
        save(checkpoints, 1)
    assert checkpoints.newest_first() == [path] and load(path) == {1}


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "kept"),
    [
        ([None] * 5, 2, 1, [4, 5]),
        ([0.1, 0.9, 0.3, 0.2, 0.1], 2, 1, [2, 4, 5]),
        ([0.1, 0.9, 0.3, 0.8, 0.1], 1, 2, [2, 4, 5]),
        ([0.1, 0.2, 0.3, 0.4, 0.9], 2, 1, [4, 5]),
        ([0.9, 0.9, 0.1, 0.1, 0.1], 1, 1, [2, 5]),
        ([float("nan"), 0.5, float("inf"), None, 0.1], 1, 1, [2, 5]),
        ([0.9, 0.1, 0.1, 0.1, 0.1], 1, 0, [5]),
        ([0.1, 0.2, 0.3, 0.2, 0.1], 9, 1, [1, 2, 3, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, scores, keep_last, keep_best, kept):
    for step, score in enumerate(scores, 1):  # a new object each time, as after a restart
        checkpoints = Checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
        path = save(checkpoints, step, score=score)
        assert checkpoints.newest_first()[0] == path
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"step-{step:08d}" for step in kept]


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    save(checkpoints, 20)
    earlier = save(checkpoints, 10)
    assert load(earlier) == {10}
    assert load(save(checkpoints, 20)) == {20}  # over the old one


def test_adapters_and_full_checkpoints_are_not_confused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    adapter, full = save(checkpoints, 1, kind="adapter"), save(checkpoints, 2)
    target = Piece.whole(torch.zeros(6, 6))
    read_pieces(adapter, {"model.a": target}, kind="adapter")
    assert target.tensor.unique().tolist() == [1]
    with pytest.raises(ValueError, match=r"kind='adapter', and the run trains kind='full'"):
        read_pieces(adapter, {"model.a": target})
    with pytest.raises(ValueError, match=r"kind='full', and the run trains kind='adapter'"):
        read_pieces(full, {"model.a": target}, kind="adapter")


def test_another_architecture_is_refused_field_by_field(tmp_path):
    manifest = read_manifest(save(Checkpoints(tmp_path), 1))
    check_architecture(manifest, CONFIG)
    other = replace(CONFIG, num_layers=31, rope=replace(CONFIG.rope, theta=2e5))
    with pytest.raises(ValueError) as error:
        check_architecture(manifest, other)
    assert "num_layers=30 in the checkpoint, 31 here" in str(error.value)
    assert "rope.theta=100000.0 in the checkpoint, 200000.0 here" in str(error.value)
    assert "hidden_size" not in str(error.value)


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folders, "FORMAT", 2)
        save(checkpoints, 2)
    with pytest.raises(ValueError, match=r"format=2, .* reads up to 1; update roll_lite"):
        checkpoints.newest_whole(verify)


def test_missing_and_differing_tensors_are_named(tmp_path):
    folder = save(Checkpoints(tmp_path), 1)
    wanted = {
        "model.a": Piece.whole(torch.zeros(6, 5)),
        "model.b": Piece.whole(torch.zeros(2)),
        "count": Piece.whole(torch.tensor(0.0)),
    }
    with pytest.raises(ValueError) as error:
        read_pieces(folder, wanted)
    assert "model.a is (6, 6) float32, expected (6, 5) float32" in str(error.value)
    assert "model.b is missing" in str(error.value)
    assert "count is () int64, expected () float32" in str(error.value)


def test_files_that_are_not_there_or_not_whole_tensors_are_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    record = write_shard(checkpoints.begin(1), 0, {"a": Piece.whole(torch.zeros(3))})
    (tmp_path / ".step-00000001.partial" / record.file).unlink()
    with pytest.raises(ValueError, match=r"shard-00000.* that its rank wrote.*share"):
        checkpoints.finish(1, [record], state={}, **FINISH)
    record = write_shard(checkpoints.begin(1), 0, {"a": Piece(torch.zeros(3), (0,), (4,))})
    with pytest.raises(ValueError, match="a has 3 of 4 elements"):
        checkpoints.finish(1, [record], state={}, **FINISH)
    assert not list(tmp_path.iterdir())


def test_options_and_state_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"state must be plain JSON .*Tensor"):
        save(Checkpoints(tmp_path), 1, state={"random": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)
