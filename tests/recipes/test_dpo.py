"""Preference optimization as a user runs it, from a short fine-tuning."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.forked_ranks import run_ranks
from support.launch import run_recipe, run_torchrun
from support.paths import RECIPES
from support.recipes import call_recipe
from transformers import AutoModelForCausalLM

from roll_lite.options import from_flat
from roll_lite.recipes import dpo
from roll_lite.report.reader import RunFolder
from roll_lite.train import scorer

SHORT = {
    "data": "reverse:2", "task_pairs": 64, "steps": 8, "rows_per_step": 16, "lr": 3e-3,
    "eval_rows": 32, "eval_every": 8, "device": "cpu",
}  # fmt: skip
BRIEF = {"task_pairs": 16, "rows_per_step": 4, "eval_rows": 2}


def run(imitator, run_dir, **changes):
    values = {"model": str(imitator / "model"), "run_dir": str(run_dir)} | SHORT | changes
    call_recipe(dpo, from_flat(dpo.Config, **values))
    return run_dir


def metric(run_dir, name):
    return [value for _, value in RunFolder(run_dir).metric(name)]


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def same_weights(a, b):
    return all(torch.equal(tensor, weights(b)[name]) for name, tensor in weights(a).items())


def test_dpo_learns_to_prefer_right_answers(imitator, tmp_path):
    run_dir = run(imitator, tmp_path / "run")
    before, *_, after = metric(run_dir, "eval/accuracy")
    assert before == 0.5 and after > 0.9
    assert metric(run_dir, "loss/loss")[0] == pytest.approx(torch.log(torch.tensor(2.0)).item())
    margins = metric(run_dir, "reward/margin")
    chosen, rejected = metric(run_dir, "reward/chosen"), metric(run_dir, "reward/rejected")
    assert margins[-1] > 0.1
    for margin, good, bad in zip(margins, chosen, rejected, strict=True):
        assert margin == pytest.approx(good - bad, abs=1e-5)
    AutoModelForCausalLM.from_pretrained(run_dir / "model")


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_resumed_runs_are_the_same_and_keep_the_reference(
    imitator, tmp_path, monkeypatch, lora_rank
):
    changes = BRIEF | {"lora_rank": lora_rank, "steps": 4}
    whole = run(imitator, tmp_path / "whole", **changes)
    parts = run(imitator, tmp_path / "parts", **(changes | {"steps": 2}))
    monkeypatch.setattr(scorer, "score_over_ranks", None)  # not to be called again
    run(imitator, parts, resume=True, **changes)
    assert metric(parts, "reward/margin") == metric(whole, "reward/margin")
    assert same_weights(parts, whole)


def test_a_stale_reference_is_computed_again_by_the_starting_policy(imitator, tmp_path, capsys):
    """Also in a resumed run, whose trainer has moved on."""
    whole = run(imitator, tmp_path / "whole", **BRIEF, steps=4)
    parts = run(imitator, tmp_path / "parts", **BRIEF, steps=2)
    (parts / "reference.safetensors").write_bytes(b"not what it was")
    run(imitator, parts, **BRIEF, steps=4, resume=True)
    assert "is damaged" in capsys.readouterr().out
    assert metric(parts, "reward/margin") == metric(whole, "reward/margin")


def test_adapters_change_the_projections_that_are_named(imitator, tmp_path):
    options = {"lora_rank": 2, "lora_targets": ("out",), "moments": "bfloat16"}
    run_dir = run(imitator, tmp_path / "run", **BRIEF, **options, steps=2)
    before = weights(imitator)
    changed = {name for name, w in weights(run_dir).items() if not torch.equal(w, before[name])}
    assert changed == {name for name in before if "o_proj" in name}


def test_another_reference_gives_its_own_margins(imitator, small_folder, tmp_path):
    """The starting policy as a folder is the same reference; the untrained model is another."""
    own = metric(run(imitator, tmp_path / "own", **BRIEF, steps=2), "reward/chosen")
    same = run(imitator, tmp_path / "same", **BRIEF, steps=2, reference=str(imitator / "model"))
    assert metric(same, "reward/chosen") == pytest.approx(own, abs=1e-5)
    other = run(imitator, tmp_path / "other", **BRIEF, steps=2, reference=str(small_folder))
    assert metric(other, "reward/chosen")[0] > own[0] + 0.1  # it has learnt since


@pytest.mark.slow
def test_dpo_from_a_file_as_a_user_runs_it(imitator, tmp_path):
    rows = [
        {"prompt": f"Reverse {a}{b}", "chosen": b + a, "rejected": b} for a in "abcd" for b in "xyz"
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run_recipe(
        "dpo", "--model", imitator / "model", "--data", path, "--eval-data", path,
        "--kind", "ipo", "--steps", 3, "--rows-per-step", 4, "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert "step 3  loss" in printed and "eval accuracy" in printed
    assert metric(tmp_path / "run", "loss/loss")[0] == pytest.approx(25.0)  # (0 - 1 / 0.2)^2


@pytest.mark.slow
def test_ranks_do_not_change_dpo(imitator, tmp_path):
    arguments = ["--model", imitator / "model", "--data", "reverse:2", "--task-pairs", 64]
    arguments += ["--steps", 6, "--rows-per-step", 5, "--eval-rows", 9]
    for start, num_ranks in ((run_ranks, 1), (run_torchrun, 2)):
        start(num_ranks, RECIPES / "dpo.py", *arguments, "--run-dir", tmp_path / str(num_ranks))
    for name in ("loss/loss", "reward/margin", "eval/margin"):
        one, two = (metric(tmp_path / n, name) for n in "12")
        assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, r"beta=0\.0 must be above 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be above 0"),
        (
            {"kind": "ipo", "label_smoothing": 0.1},
            "label_smoothing=0.1 is only read with kind='sigmoid'",
        ),
        ({"data": __file__}, "task_pairs=64 is not read with a file in data"),
        ({"reference": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_wrong_values_are_named(imitator, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(imitator, tmp_path / "run", **changes)
