"""The journal: what had finished before a crash is used again, and nothing else."""

import bdb
import itertools
import json
import os
import pickle
import zlib

import pytest
from support.rlvr_program import share_of_good_letters
from support.runs import comparable, samples_of

from roll_lite.recipes import rlvr
from roll_lite.rollout.journal import HEADER, Journal, fingerprint
from roll_lite.rollout.prompts import Visit
from roll_lite.rollout.record import read_group, write_group
from roll_lite.types import Group, Prompt, Sample, Score, Turn, TurnResult

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "?"},), domain="d", ground_truth="")


def made_sample(index=0, version=3):
    """Two sequences: the third turn does not go on where the second ended."""
    sample = Sample(prompt=PROMPT, index=index, visit=7)
    sample.enter("queued", version)
    for read in ([1, 2], [1, 2, 3, 4, 5], [9]):
        turn = Turn(
            prompt_ids=read, token_ids=[3, 4], logprobs=[-0.5, -0.25], finish_reason="stop",
            versions=[(0, version - 1), (1, version)], state="s",
            result=TurnResult(reward=0.5, measurements={"last": {"won": 1.0}}), replica=len(read),
            experts=bytes([index, 255, 0, 7]) * (len(read) + 1),
        )  # fmt: skip
        sample.add_turn(turn)
    sample.transcript = [*PROMPT.messages, {"role": "assistant", "content": "\ud800 half"}]
    sample.reply, sample.end = "\ud800 half", "terminated"
    sample.score = Score(value=1.5, parts={"won": 1.0})
    sample.enter("done", version)
    return sample


def journal(folder, *, made_with="options", resumed_at=3, version=3, weights="w3"):
    opened = Journal(folder, made_with, resumed_at)
    opened.begin(version, weights)
    return opened


@pytest.fixture
def written(tmp_path):
    """The file of version 3, with two samples."""
    opened = journal(tmp_path)
    for index in (0, 1):
        opened.write(made_sample(index))
    opened.close()
    return tmp_path / "version-00000003"


def restored(folder, **changes):
    """Indices of the samples that are there."""
    opened = journal(folder, **changes)
    return [index for index in range(4) if opened.restored(Visit(PROMPT, 7), index)]


def test_samples_come_back_once_and_as_they_were(written):
    opened = journal(written.parent)
    sample, expected = opened.restored(Visit(PROMPT, 7), 0), made_sample()
    expected.events = [(e.state, then.time, e.policy_version)
                       for e, then in zip(expected.events, sample.events, strict=True)]  # fmt: skip
    assert sample == expected and len(sample.sequences) == 2
    assert [turn.replica for turn in sample.turns] == [2, 5, 1]  # which == does not compare
    assert [sequence.experts for sequence in sample.sequences] == [
        b"\0\xff\0\7" * 6, b"\0\xff\0\7" * 2,
    ]  # fmt: skip
    group = Group(prompt=PROMPT, samples=[sample])
    in_a_checkpoint = json.loads(json.dumps(write_group(group)))
    assert read_group(in_a_checkpoint).samples == [expected]
    assert opened.restored(Visit(PROMPT, 7), 0) is None
    assert opened.restored(Visit(PROMPT, 6), 1) is None  # another visit of the prompt
    opened.write(made_sample(2))
    opened.close()
    assert restored(written.parent) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"made_with": "others"}, []),
        ({"weights": "other"}, []),
        ({"version": 2, "resumed_at": 2}, []),  # an older checkpoint: the weights are to be made
        ({"version": 4, "resumed_at": 4}, [0, 1]),  # of samples that were in flight at step 4
    ],
)
def test_samples_are_used_only_where_they_could_have_been_made(written, changes, found):
    assert restored(written.parent, **changes) == found


def test_weights_that_are_made_again_bring_their_samples_back(written):
    opened = journal(written.parent, resumed_at=2, version=2, weights="w2")
    opened.begin(3, "w3")
    assert opened.restored(Visit(PROMPT, 7), 1)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_torn_end_is_cut_off(written, cut):
    whole = written.read_bytes()
    written.write_bytes(whole[:-cut])
    assert restored(written.parent) == [0]
    journal(written.parent).write(made_sample(3))
    assert restored(written.parent) == [0, 3]
    written.write_bytes(whole[:-cut] + bytes([whole[-cut] ^ 1]) + whole[-cut:][1:])
    assert restored(written.parent) == [0]


def test_samples_of_weights_that_were_not_announced_are_not_kept(tmp_path):
    journal(tmp_path).write(made_sample(version=4))
    assert restored(tmp_path) == []


def test_nothing_that_a_file_names_is_imported_or_called(written, capfd):
    class Evil:
        def __reduce__(self):
            return print, ("called",)

    for parts in ([("p", 7, 2), Evil()], [Evil()]):
        payload = b"".join(map(pickle.dumps, parts))
        record = HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        (written.parent / "version-00000003").write_bytes(written.read_bytes() + record)
        assert 2 not in restored(written.parent)
    assert "called" not in capfd.readouterr().out


def test_what_a_checkpoint_has_is_removed(written):
    opened = journal(written.parent, version=4, resumed_at=4)
    opened.forget(before=4)
    assert opened.restored(Visit(PROMPT, 7), 0) is None
    assert [path.name for path in written.parent.iterdir()] == ["version-00000004"]
    opened.remove()
    assert not written.parent.exists()


def test_files_and_options_are_part_of_the_fingerprint(tmp_path):
    (path := tmp_path / "rewards.py").write_text("a")
    options = {"rewards": str(path), "data": ("x.jsonl@0.5",), "lr": 1.0, "steps": 4}
    first = fingerprint(options)
    assert fingerprint(options | {"steps": 5}) == first != fingerprint(options | {"lr": 2.0})
    path.write_text("ab")
    assert fingerprint(options) != first
    code = fingerprint(options | {"code": (str(path),), "code_digests": ("a",)})
    assert fingerprint(options | {"code": (str(path),), "code_digests": ("b",)}) != code


def test_only_what_was_in_flight_is_generated_again(here, tmp_path, monkeypatch):
    """A crash in the fourth step, with a checkpoint of the second."""
    options = {"steps": 4, "checkpoint_every": 2, "drop_equal": True, "eval_every": 3}
    counted = itertools.count()

    def counting(prompt, reply):
        next(counted)
        return share_of_good_letters(prompt, reply)

    def crashing(prompt, reply):
        if next(counted) == crash:
            raise bdb.BdbQuit  # which leaves at once, without a checkpoint
        return share_of_good_letters(prompt, reply)

    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", counting)
        whole = here("whole", **options)
        assert not (tmp_path / "whole" / "journal").exists()
        num_calls = next(counted)
        counted, crash = itertools.count(), num_calls - 30
        patch.setitem(rlvr.Config.INLINE, "reverse", crashing)
        with pytest.raises(bdb.BdbQuit):
            here("parts", **options)
        crash = -1
        parts = here("parts", resume=True, **options)
    assert next(counted) == num_calls + 1  # the call in which it crashed is repeated
    assert comparable(parts) == comparable(whole)
    assert sum(row.get("rollout/restored", 0) for row in parts) > 64
    for step in (3, 4):
        rows = [samples_of(tmp_path / name, step) for name in ("whole", "parts")]
        assert [s["turns"] for s in rows[0]] == [s["turns"] for s in rows[1]]
        assert [[s["token_ids"], s["logprobs"], s["reward"]] for s in rows[0]] == [
            [s["token_ids"], s["logprobs"], s["reward"]] for s in rows[1]
        ]


def test_a_journal_of_hard_links_is_copied_before_it_is_written(written, tmp_path):
    """Of what a copy shares with another folder, nothing is cut off and nothing is added."""
    whole = written.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(whole + b"torn")
    written.unlink()
    os.link(other, written)
    opened = journal(tmp_path)
    opened.write(made_sample(2))
    opened.close()
    assert restored(tmp_path) == [0, 1, 2] and other.read_bytes() == whole + b"torn"
