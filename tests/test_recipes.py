"""The recipes as a user runs them, on the tiny model."""

import dataclasses
import json
import subprocess
import sys

import pytest
import rlvr
import sft
import torch
from conftest import RECIPES
from transformers import AutoModelForCausalLM

from roll_lite.options import flatten, from_flat
from roll_lite.report.curve import draw, read_metric

TASK = "reverse:5"


@pytest.fixture(scope="module")
def warm_model(tiny_folder, tmp_path_factory):
    """A model that has imitated a careless teacher, as in the quickstart."""
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    cfg = from_flat(sft.Config, 
        model=str(tiny_folder), task=TASK, steps=140, careless=0.7, validate_every=70,
        run_dir=str(run_dir),
    )  # fmt: skip
    sft.main(cfg)
    return run_dir


def small_config(warm_model, run_dir, **changes):
    options = {
        "model": str(warm_model / "model"), "data": (TASK,), "steps": 10, "prompts_per_step": 32,
        "max_tokens": 8, "eval_every": 5, "run_dir": str(run_dir),
    } | changes  # fmt: skip
    return from_flat(rlvr.Config, **options)


def test_sft_lowers_the_validation_loss_and_saves_a_model(warm_model):
    losses = [loss for _, loss in read_metric(warm_model, "eval/loss")]
    assert len(losses) == 2 and losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(warm_model / "model")
    assert json.loads((warm_model / "config.json").read_text())["task"] == TASK


def test_rlvr_learns(warm_model, tmp_path):
    cfg = small_config(warm_model, tmp_path / "run")
    before, *_, after = rlvr.main(cfg)
    assert before < 0.4 and after > 0.7

    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(11))
    assert rows[5]["mismatch/logprob_max"] < 1e-4  # training and generation agree
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    again = from_flat(rlvr.Config, **written | {"resume": True})
    assert flatten(again) == flatten(cfg) | {"resume": True}
    assert written["samples_per_prompt"] == 8 and written["model"] == cfg.model
    lines = (tmp_path / "run" / "rollouts" / "step_00010.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 32 * 8
    for sample in samples:
        assert sample["reward"] == float(sample["reply"].strip() == sample["ground_truth"])
        assert [event[0] for event in sample["events"]][-1] == "done"
        assert sample["turns"][0]["versions"] == [[0, 9]]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert "step    10" in draw(read_metric(tmp_path / "run", "eval/pass@1"))


@pytest.mark.slow
def test_rlvr_with_the_wrong_sign_does_not_learn(warm_model, tmp_path, monkeypatch):
    def flipped(*arguments):
        sequences = original(*arguments)
        return [dataclasses.replace(s, advantages=[-a for a in s.advantages]) for s in sequences]

    original = rlvr.with_advantages
    monkeypatch.setattr(rlvr, "with_advantages", flipped)
    before, *_, after = rlvr.main(small_config(warm_model, tmp_path / "run"))
    rewards = [reward for _, reward in read_metric(tmp_path / "run", "reward/mean")]
    assert after <= before and rewards[-1] < 0.7 * rewards[0]


def test_several_updates_on_one_batch_move_the_ratio(warm_model, tmp_path):
    cfg = small_config(warm_model, tmp_path / "run", steps=1, updates_per_step=4, clip_high=0.05)
    rlvr.main(cfg)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["mismatch/logprob_mean"] > 1e-3 and metrics["loss/clip_fraction"] > 0


@pytest.mark.slow
def test_without_learning_rate_nothing_changes(warm_model, tmp_path):
    cfg = small_config(warm_model, tmp_path / "run", steps=4, lr=0.0, eval_every=1)
    accuracies = rlvr.main(cfg)
    assert len(set(accuracies)) == 1
    before, after = (
        AutoModelForCausalLM.from_pretrained(f / "model", dtype=torch.float32).state_dict()
        for f in (warm_model, tmp_path / "run")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(warm_model, tmp_path):
    runs = []
    for name in ("a", "b"):
        rlvr.main(small_config(warm_model, tmp_path / name, steps=3))
        lines = (tmp_path / name / "rollouts" / "step_00003.jsonl").read_text().splitlines()
        runs.append([json.loads(line)["token_ids"] for line in lines])
    assert runs[0] == runs[1]


def test_an_old_run_folder_is_not_written_over(warm_model):
    with pytest.raises(ValueError, match="earlier run"):
        rlvr.main(small_config(warm_model, warm_model, steps=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ("poetry:3",)}, "'poetry:3' is neither a file nor a task.*addition:N"),
        ({"samples_per_prompt": 1}, "samples_per_prompt=1 must be at least 2"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"model": "no/such/folder"}, r"no/such/folder.*get_smollm2\.py"),
        ({"device": "tpu"}, "device='tpu'.*auto, cpu or cuda"),
    ],
)
def test_wrong_values_are_named(warm_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        rlvr.main(small_config(warm_model, tmp_path / "run", **changes))


def run_recipe(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, **options
    )


def test_a_plan_starts_nothing(warm_model, tmp_path):
    arguments = ["--model", f"{warm_model}/model", "--plan", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, RECIPES / "rlvr.py", *arguments], capture_output=True, text=True
    )
    assert "step: 32 prompts x 8 samples" in done.stdout, done.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_is_an_error():
    result = run_recipe(RECIPES / "rlvr.py", "--learning-rate", "1")
    assert result.returncode == 2
    assert "--learning-rate" in result.stdout + result.stderr


@pytest.mark.slow
def test_pdb_stops_inside_a_reward_of_the_recipe(warm_model, tmp_path):
    commands = "b reversed_word\nc\np 'truth is', prompt.ground_truth\nw\nq\n"
    result = run_recipe(
        "-m", "pdb", RECIPES / "rlvr.py", "--model", warm_model / "model", "--data", TASK,
        "--steps", "1", "--run-dir", tmp_path / "run",
        input=commands, timeout=120,
    )  # fmt: skip
    assert "reversed_word(prompt, reply" in result.stdout or "reversed_word()" in result.stdout
    assert "('truth is', '" in result.stdout
    assert "coordinator.py" in result.stdout  # the stack leads from the loop to the reward
