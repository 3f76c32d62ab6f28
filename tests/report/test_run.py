"""The run's folder: what is written can be read back, and what is done again is forgotten."""

import json
import re
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.made_runs import HOSTILE
from support.paths import DOCS, ROOT, SOURCES

from roll_lite import __main__ as roll_lite_command
from roll_lite.report.config_file import command_line
from roll_lite.report.records import numbers
from roll_lite.report.run import Run
from roll_lite.train.sample_rows import with_advantages
from roll_lite.train.sequences import sampled_numbers
from roll_lite.types import Group, Prompt, Sample, Score, Turn

PROMPT = Prompt(
    id="p", messages=({"role": "user", "content": "?"},), domain="math", ground_truth=""
)

PARTS = {"a": 0.5, "n": float("nan")}
PACKAGED = roll_lite_command.RECIPES / "rlvr.py"


def float32(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def turn(prompt_ids, token_ids, logprobs, version):
    return Turn(
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=logprobs, finish_reason="stop",
        versions=[(0, version)],
    )  # fmt: skip


def test_rollouts_say_which_tokens_were_read_and_which_sampled(tmp_path):
    sample = Sample(prompt=PROMPT, index=0, score=Score(value=0.5, parts={"a": 1.0}))
    sample.add_turn(turn([1, 2, 3], [4, 5], [-0.1234567, -2.0], 7))
    sample.add_turn(turn([1, 2, 3, 4, 5, 6], [8], [-1e-7], 8))
    sample.enter("done", 8)
    run = Run(tmp_path, PROMPT, num_steps=1, shown={})
    run.write_rollouts(1, [Group(prompt=PROMPT, samples=[sample])])
    run.flush()
    (row,) = map(json.loads, (tmp_path / "rollouts" / "step_00001.jsonl").read_text().splitlines())
    ids, logprobs, found = iter(row["token_ids"]), iter(numbers(row["logprobs"])), []
    for told in row["turns"]:
        found += [(next(ids), 0.0) for _ in range(told["read"])]
        found += [(next(ids), next(logprobs)) for _ in range(told["sampled"])]
    assert not list(ids) and not list(logprobs)
    assert [token for token, _ in found] == sample.token_ids
    assert [logprob for _, logprob in found] == list(map(float32, sample.logprobs))
    assert [told["versions"] for told in row["turns"]] == [[[0, 7]], [[0, 8]]]


def test_damaged_records_do_not_keep_a_run_from_going_on(tmp_path, capsys):
    """No JSON, no text, and no record in the middle; the last line was cut off."""
    good = [json.dumps({"step": step, "x": 1.0}).encode() + b"\n" for step in range(1, 6)]
    broken = [b'{"step": 2, "x": }\n', b"\xff\xfe\x00\n", b"[1]\n"]
    lines = [*good[:2], *broken, *good[2:], b'{"step": 6, "x"']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    Run(tmp_path, PROMPT, num_steps=9, shown={}, resumed_at=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(good[:4])
    said = capsys.readouterr().out
    assert [f"line {number} of" in said for number in range(1, 10)] == [
        number in (3, 4, 5) for number in range(1, 10)
    ]


@pytest.mark.parametrize(("resumed_at", "kept"), [(3, [0, 1, 2, 3]), (0, [])])
def test_a_resumed_run_keeps_the_records_up_to_its_checkpoint(tmp_path, resumed_at, kept):
    run = Run(tmp_path, PROMPT, num_steps=9, shown={})
    for step in range(6):
        run.log(step, {"loss": 1.0})
        run.note("checkpoint", step=step, seconds=0.5)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 2, "cut sh')
    Run(tmp_path, PROMPT, num_steps=9, shown={}, resumed_at=resumed_at)
    metrics, events = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    assert [row["step"] for row in metrics] == kept
    told = [(row["event"], row["step"]) for row in events]
    assert told == [*(("checkpoint", step) for step in kept), ("resumed", resumed_at)]


def test_two_programs_do_not_write_to_one_folder(tmp_path):
    """A lock that a kill does not leave behind."""
    program = (
        "import sys, time; from roll_lite.report.run import lock_folder; from pathlib import Path; "
        "file = lock_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(ValueError, match=rf"another program \(process {other.pid} on "):
                Run(tmp_path, PROMPT, num_steps=9, shown={}, resumed_at=4)
        finally:
            other.kill()
            other.wait()
    Run(tmp_path, PROMPT, num_steps=9, shown={}, resumed_at=4).close()


def test_a_run_without_records_can_be_resumed(tmp_path):
    Run(tmp_path, PROMPT, num_steps=9, shown={}, resumed_at=4)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rollouts_hold_the_advantages_of_what_was_trained_on(tmp_path):
    rewards, samples = (0.0, 1.0, 0.5), []
    for index, reward in enumerate(rewards):
        sample = Sample(prompt=PROMPT, index=index, score=Score(value=reward))
        sample.add_turn(turn([1, 2], [3, 4, 5][: index + 1], [-1.0] * (index + 1), 0))
        sample.enter("done", 0)
        samples.append(sample)
    group = Group(prompt=PROMPT, samples=samples)
    advantages = sampled_numbers(with_advantages([group]), "advantages")
    assert [len(advantages[number]) for number in range(3)] == [1, 2, 3]
    advantages[1] = [0.25, -0.1]  # as an estimator with one for each token
    del advantages[2]  # as if it was masked
    run = Run(tmp_path, PROMPT, num_steps=1, shown={})
    run.write_rollouts(1, [group], advantages, {1: [2.5, 0.3]}, {1: [0.0, 0.01]})
    run.flush()
    lines = (tmp_path / "rollouts" / "step_00001.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert first["advantages"] == pytest.approx(-1.0, abs=1e-4)  # GRPO: (0 - 0.5) / 0.5
    assert numbers(second["advantages"]) == [0.25, float32(-0.1)]
    assert numbers(second["entropies"]) == [2.5, float32(0.3)]
    assert numbers(second["mismatches"]) == [0.0, float32(0.01)]
    assert not {"advantages", "entropies", "mismatches"} & third.keys()
    assert not {"entropies", "mismatches"} & first.keys()


@pytest.mark.parametrize("reward", [None, 0.1, True, float("nan"), float("inf")])
@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_lines_are_what_the_samples_hold(tmp_path, reward, num_turns):
    """Lines are put together by hand, so any text must come back from a parser."""
    score = None if reward is None else Score(value=reward, parts=PARTS, reason=HOSTILE)
    sample = Sample(prompt=PROMPT, index=3, visit=2, seed=7 if num_turns else None, score=score)
    sample.reply, sample.end, sample.error = HOSTILE, 'a "b"', HOSTILE if num_turns else None
    sample.transcript = [{"role": "user", "content": HOSTILE}]
    for number in range(num_turns):
        sample.add_turn(turn([1, 2], [3], [-1.0], 0))
        sample.turns[-1].replica = number or None
    for state in ("queued", "generating", "filtered"):
        sample.enter(state, 4)
    run = Run(tmp_path, PROMPT, num_steps=1, shown={})
    run.write_answers(1, [Group(prompt=PROMPT, samples=[sample])])
    run.note_samples(1, [(sample, HOSTILE), (sample, "b")])
    run.flush()
    outcome = {
        "index": 3, "visit": 2, "seed": sample.seed, "state": "filtered", "reply": HOSTILE,
        "end": 'a "b"', "reward": reward if reward in (0.1, True) else None,
        "parts": {"a": 0.5, "n": None} if score else {}, "reason": HOSTILE if score else "",
        "error": sample.error, **({"transcript": sample.transcript} if num_turns > 1 else {}),
    }  # fmt: skip
    answer = json.loads((tmp_path / "rollouts" / "eval_00001.jsonl").read_text())
    assert outcome.items() <= answer.items() and answer["prompt_id"] == PROMPT.id
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert outcome.items() <= first.items() and (first["why"], second["why"]) == (HOSTILE, "b")
    assert (first["tokens"], first["replicas"]) == (num_turns, [None, 1][:num_turns])
    assert first["events"] == [list(e._replace(time=round(e.time, 4))) for e in sample.events]
    assert first["time"] == first["events"][-1][1]


@pytest.mark.parametrize(
    ("script", "start", "torchrun"),
    [
        ("recipes/rlvr.py", "python recipes/rlvr.py", "recipes/rlvr.py"),
        (ROOT / "recipes" / "rlvr.py", f"python {ROOT}/recipes/rlvr.py", f"{ROOT}/recipes/rlvr.py"),
        (PACKAGED, "roll-lite rlvr", "-m roll_lite rlvr"),
    ],
)
def test_the_command_that_goes_on(script, start, torchrun, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "3"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert command_line() == f"{start} --steps 3"
    assert command_line("--resume", "runs/a") == f"{start} --resume runs/a"
    ranks = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    expected = f"torchrun --nproc-per-node 8 --nnodes 2 {torchrun} --resume runs/a"
    assert command_line("--resume", "runs/a") == expected


def test_a_start_says_what_it_ran_on(tmp_path):
    Run(tmp_path, PROMPT, num_steps=1, shown={})
    (start,) = json.loads((tmp_path / "config.json").read_text())["starts"]
    assert start["versions"]["torch"] == version("torch") and "CPU cores" in start["hardware"]
    clone = ROOT
    if (clone / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True
        )
        assert start["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_the_page_of_the_run_folder_names_every_event_and_key(tmp_path):
    sample = Sample(prompt=PROMPT, index=0, score=Score(value=0.5), seed=1)
    for first in (1, 9):  # the second turn begins another sequence
        sample.add_turn(turn([first], [4], [-0.1], 7))
    sample.enter("done", 7)
    run = Run(tmp_path, PROMPT, num_steps=1, shown={})
    run.write_rollouts(1, [Group(prompt=PROMPT, samples=[sample])], {0: [0.1]}, {0: [0.1]})
    run.note_samples(1, [(sample, "why")])
    run.close()
    rows = [json.loads((tmp_path / "rollouts" / "step_00001.jsonl").read_text())]
    rows.append(json.loads((tmp_path / "events.jsonl").read_text()))
    rows += json.loads((tmp_path / "config.json").read_text())["starts"]
    texts = [path.read_text() for path in Path(SOURCES).rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"\bnote\(\s*\"(\w+)\"", text)}
    assert {"checkpoint", "hint", "skipped"} < names
    names |= {key for row in rows for key in row} | {key for t in rows[0]["turns"] for key in t}
    page = (DOCS / "reference" / "run-folder.md").read_text()
    assert not [name for name in sorted(names) if f"`{name}`" not in page]
