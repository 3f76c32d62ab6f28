"""A recorded run with other options: recorded samples are taken until the policies part."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rollout.test_journal import PROMPT, made_sample
from support.paths import PYTHONPATH
from support.recipes import call_recipe
from support.runs import samples_of, sft_options, toy_options
from transformers import AutoModelForCausalLM

from roll_lite.options import from_flat
from roll_lite.proof.recorded import RecordedRun, differing
from roll_lite.proof.verify import check_folder
from roll_lite.proof.whatif import main, start_of
from roll_lite.recipes import agentic, rlvr
from roll_lite.report.config_file import read_options, to_json
from roll_lite.report.records import numbers, rollout_lines
from roll_lite.rollout.prompts import Visit
from roll_lite.rollout.record import read_row
from roll_lite.rollout.recorded import RecordedSamples
from roll_lite.train.export import export_checkpoint
from roll_lite.types import Group, Prompt, Sample, Score, Turn, TurnResult

LAKE = "frozen_lake:size=2,style=short,max_steps=3"


def again(evidence, run_dir, **changes):
    """The run from its start, in this process, on its own samples."""
    options = read_options(evidence / "config.json") | {"recorded": str(evidence)}
    options |= {"run_dir": str(run_dir), **changes}
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    return RecordedRun(run_dir)


def restored(run):
    return {step: row.get("rollout/restored", 0) for step, row in run.metrics.items() if step}


def differences(a, b):
    """Steps that both have of which a digest differs."""
    return [n for n in sorted(a.steps.keys() & b.steps.keys()) if differing(a.steps[n], b.steps[n])]


def test_without_other_options_it_is_the_run(evidence, tmp_path):
    run = again(evidence, tmp_path / "again")
    assert differences(RecordedRun(evidence), run) == []
    assert run.steps.keys() == RecordedRun(evidence).steps.keys()
    assert restored(run) == dict.fromkeys(range(1, 7), 32)


def test_it_is_the_run_after_going_live_too(evidence, tmp_path, capsys):
    """Rounding is above a bound of 0."""
    run = again(evidence, tmp_path / "again", max_kl=0)
    assert differences(RecordedRun(evidence), run) == []
    assert restored(run) == {1: 32} | dict.fromkeys(range(2, 7), 0)
    assert "the policies have parted: the next steps take new samples" in capsys.readouterr().out
    assert [step for step, row in run.metrics.items() if "whatif/kl" in row] == [1]


@pytest.mark.slow
def test_steps_without_recorded_samples_are_generated(evidence, tmp_path):
    folder = shutil.copytree(evidence, tmp_path / "run")
    (folder / "rollouts/step_00003.jsonl").unlink()
    run = again(folder, tmp_path / "again")
    assert differences(RecordedRun(evidence), run) == []
    assert restored(run)[3] == 0 and restored(run)[4] == 32


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "gigpo"])
def test_a_game_is_the_run_too(tiny_folder, tmp_path, advantage):
    """gigpo compares turns that began in the same state."""
    options = toy_options(
        tiny_folder, tmp_path / "run", data=(LAKE,), history=0, env_workers=1, steps=3,
        samples_per_prompt=4, advantage=advantage, eval_every=0,
    )  # fmt: skip
    call_recipe(rlvr, from_flat(agentic.Config, **options))
    again = options | {"recorded": options["run_dir"], "run_dir": str(tmp_path / "again")}
    call_recipe(rlvr, from_flat(agentic.Config, **again))
    runs = [RecordedRun(tmp_path / name) for name in ("run", "again")]
    assert differences(*runs) == [] and restored(runs[1])[3] == 32


@pytest.mark.slow
def test_a_higher_rate_parts_from_a_step(evidence, tmp_path):
    """The command, with the KL computed again from checkpoints by transformers in float64."""
    folder = tmp_path / "new"
    flags = ["--lr", "0.02", "--loss", "cispo", "--max-kl", "0.001", "--keep-every", "1"]
    command = ["-m", "roll_lite", "whatif", evidence, "--from", "3", "--run-dir", folder, *flags]
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert "step 3 has no checkpoint (--keep-every); going on from step 2" in done.stdout
    assert "changed: lr 0.001 -> 0.02" in done.stdout
    run = RecordedRun(folder)
    kl = {step: row["whatif/kl"] for step, row in run.metrics.items() if "whatif/kl" in row}
    assert list(kl) == [3, 4] and kl[3] < 1e-6 < 0.001 < kl[4]
    assert done.stdout.count("the policies have parted") == 1
    assert restored(run) | {3: 32, 4: 32, 5: 0, 6: 0} == restored(run)
    wanted = by_transformers(run, 3, samples_of(evidence, 4))
    assert kl[4] == pytest.approx(wanted, rel=1e-3)
    assert list(check_folder(run)) == []  # the copied steps have their contracts


def by_transformers(run, step, samples):
    """KL from the policy that sampled to that of a checkpoint, by k3."""
    folder = run.folder / "as-float64"
    export_checkpoint(run.checkpoints[step], run.config["model"], folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for sample in samples:
        ids = torch.tensor([sample["token_ids"]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        delta = logprobs[-sample["turns"][0]["sampled"] :] - torch.tensor(
            numbers(sample["logprobs"]), dtype=torch.float64
        )
        found.append(delta.expm1() - delta)
    return torch.cat(found).mean().item()


# ---- samples and their lines


def one_turn():
    sample = Sample(prompt=PROMPT, index=1, visit=7, seed=5, reply="five", end="terminated")
    result = TurnResult(reward=0.75)
    turn = Turn(
        prompt_ids=[1, 2], token_ids=[3, 4, 5], logprobs=[-0.5, -0.25, -1.0], replica=1,
        finish_reason="length", versions=[(0, 2)], result=result,
    )  # fmt: skip
    sample.add_turn(turn)
    sample.score = Score(value=0.75, parts={"right": 1.0}, reason="why")
    sample.enter("done", 2)
    return sample


@pytest.mark.parametrize("sample", [made_sample(), one_turn()], ids=["three turns", "one turn"])
def test_a_line_comes_back_as_its_sample(sample):
    (line,) = rollout_lines([Group(prompt=PROMPT, samples=[sample])])
    found = read_row(json.loads(line), PROMPT)
    assert [replace(turn, result=turn.result) for turn in found.turns] == sample.turns
    without_experts = [replace(sequence, experts=b"") for sequence in sample.sequences]
    assert found.sequences == without_experts and found.score == sample.score
    assert found.transcript == (sample.transcript if len(sample.turns) > 1 else [])
    for name in ("index", "visit", "seed", "reply", "end", "error", "state"):
        assert getattr(found, name) == getattr(sample, name), name
    assert [turn.replica for turn in found.turns] == [turn.replica for turn in sample.turns]


def opened(evidence, tmp_path, **changes):
    options = read_options(evidence / "config.json") | {"recorded": str(evidence)}
    cfg = from_flat(rlvr.Config, **options | {"run_dir": str(tmp_path)} | changes)
    return RecordedSamples(cfg, to_json(cfg))


def test_samples_are_those_of_the_step_and_the_prompt(evidence, tmp_path):
    samples = opened(evidence, tmp_path, lr=0.1)
    row = samples_of(evidence, 3)[5]
    fields = ("domain", "ground_truth", "extra")
    prompt = Prompt(
        id=row["prompt_id"], messages=tuple(row["messages"]), **{n: row[n] for n in fields}
    )
    visit = Visit(prompt, row["visit"])
    assert samples.restored(visit, row["index"], 2).reply == row["reply"]
    assert samples.restored(visit, row["index"], 3) is None
    assert samples.restored(Visit(prompt, 9), row["index"], 2) is None
    other = Visit(replace(prompt, ground_truth="changed"), row["visit"])
    assert samples.restored(other, row["index"], 2) is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"lr": 0.1, "clip_high": 0.3, "kl_coef": 0.1, "updates_per_step": 2, "steps": 9}, []),
        ({"temperature": 0.5, "max_tokens": 3}, ["max_tokens", "temperature"]),
    ],
)
def test_options_that_decide_samples_need_new_ones(evidence, tmp_path, changes, names, capsys):
    samples = opened(evidence, tmp_path, **changes)
    said = f"{', '.join(names)}: not as in {evidence}, so no recorded samples are taken\n"
    assert samples.is_open == (not names)
    assert capsys.readouterr().out == (said if names else "")


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("METRICS = {'reward/mine': lambda groups: 1.0}", True),
        ("REWARDS = {'reverse': lambda prompt, reply: 1.0}", False),
    ],
)
def test_code_that_scores_nothing_keeps_the_samples(evidence, tmp_path, text, is_open):
    code = tmp_path / f"code_{is_open}.py"
    code.write_text(text)
    options = {"code": (str(code),), "code_digests": ("d",)}
    assert opened(evidence, tmp_path, **options).is_open == is_open


def test_a_run_that_parted_stays_so_when_it_is_resumed(evidence, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "whatif/kl": 0.03}\n')
    assert not opened(evidence, tmp_path).is_open
    assert opened(evidence, tmp_path, max_kl=0.05).is_open


# ---- what is refused


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (7, [], "--from 7: the run has steps 0 to 6"),
        (4, ["--advantage", "rloo"], "advantage cannot change from step 4 on; use --from 0"),
        (4, ["--max-staleness", "1"], "whatif is for synchronous runs"),
    ],
)
def test_what_cannot_be(evidence, step, options, message):
    with pytest.raises(ValueError, match=message):
        start_of(RecordedRun(evidence), step, options)


def test_an_asynchronous_run_is_refused(evidence):
    run = RecordedRun(evidence)
    run.config["max_staleness"] = 1.0
    with pytest.raises(ValueError, match="samples of an asynchronous run are of several policies"):
        start_of(run, 2, [])


def test_where_it_starts(evidence):
    run = RecordedRun(evidence)
    assert [start_of(run, step, ["--lr", "1"]) for step in (0, 1, 2, 5, 6)] == [0, 0, 2, 4, 6]
    assert start_of(run, 0, ["--advantage", "rloo"]) == 0


def test_folders_are_refused(evidence, tmp_path, capsys):
    assert main([str(evidence), "--from", "2", "--run-dir", str(tmp_path)]) == 2
    assert "exists; name a folder that does not" in capsys.readouterr().err
    assert main([str(tmp_path), "--from", "2"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_folder_that_never_began_is_made_again(evidence, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(os, "execve", lambda program, command, env: commands.append(command))
    folder = tmp_path / "new"
    for start in ("2", "0"):  # as if the recipe had refused the first
        main([str(evidence), "--from", start, "--run-dir", str(folder), "--lrr", "1"])
    assert commands[0][2:] == ["--resume", str(folder), "--lrr", "1"]
    saved = ["--config", str(folder / "config.json")]
    assert commands[1][2:] == [*saved, "--run-dir", str(folder), "--lrr", "1"]
    config = json.loads((folder / "config.json").read_text())
    assert config["recorded"] == str(evidence) and config["max_kl"] == 0.02
    (folder / "config.json").write_text(json.dumps(config | {"starts": [{"step": 0}]}))
    assert main([str(evidence), "--from", "2", "--run-dir", str(folder)]) == 2


def test_a_run_without_samples_of_its_own_is_refused(evidence):
    run = RecordedRun(evidence)
    run.config = sft_options("m", "r") | {"recipe": "sft"}
    with pytest.raises(ValueError, match="name a run that recorded its own samples"):
        start_of(run, 2, [])
    run.config = read_options(evidence / "config.json") | {"recorded": "runs/a"}
    with pytest.raises(ValueError, match="is a what-if itself"):
        start_of(run, 2, [])
