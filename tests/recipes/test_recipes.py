"""The recipes as a user runs them, on the tiny model."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch
from support.paths import RECIPES
from support.recipes import call_recipe
from transformers import AutoModelForCausalLM

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.options import flatten, from_flat
from roll_lite.planning.resolve import resolved
from roll_lite.recipes import distill, dpo, evaluate, rlvr, sft
from roll_lite.report.config_file import read_options
from roll_lite.report.reader import RunFolder
from roll_lite.report.run import refuse_old_run
from roll_lite.report.terminal import draw_curve

TASK = "reverse:2"


def small_config(imitator, run_dir, **changes):
    options = {
        "model": str(imitator / "model"), "data": (TASK,), "steps": 12, "prompts_per_step": 32,
        "lr": 1e-3, "max_tokens": 8, "eval_every": 6, "eval_prompts": 64, "kv_cache_gib": 0.05,
        "run_dir": str(run_dir),
    } | changes  # fmt: skip
    return from_flat(rlvr.Config, **options)


def test_rlvr_learns(imitator, tmp_path):
    cfg = small_config(imitator, tmp_path / "run")
    before, *_, after = call_recipe(rlvr, cfg)
    assert before < 0.4 and after > 0.7

    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[6]["mismatch/logprob_max"] < 1e-4  # training and generation agree
    written = read_options(tmp_path / "run" / "config.json")
    again = from_flat(rlvr.Config, **written | {"resume": True})
    assert flatten(again) == flatten(resolved(cfg)) | {"resume": True, "chosen": {}}
    assert written["samples_per_prompt"] == 8 and written["model"] == cfg.model
    lines = (tmp_path / "run" / "rollouts" / "step_00012.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 32 * 8
    for sample in samples:
        assert sample["reward"] == float(sample["reply"].strip() == sample["ground_truth"])
        assert [event[0] for event in sample["events"]][-1] == "done"
        assert sample["turns"][0]["versions"] == [[0, 11]]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert "step    12" in draw_curve(RunFolder(tmp_path / "run").metric("eval/pass@1"))


@pytest.fixture
def loud_folder(tiny_folder, tmp_path):
    """The tiny model with a template that reads an argument, and refuses system messages."""
    folder = shutil.copytree(tiny_folder, tmp_path / "loud")
    template = (folder / "chat_template.jinja").read_text()
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    loud = "{% if add_generation_prompt and loud %}!{% endif %}"
    (folder / "chat_template.jinja").write_text(refusal + template + loud)
    return folder


def test_template_arguments_reach_the_model(loud_folder, tmp_path):
    run = tmp_path / "run"
    options = {"model": str(loud_folder), "template_args": ("loud=true",), "run_dir": str(run)}
    call_recipe(
        evaluate, from_flat(evaluate.Config, prompts=1, max_tokens=2, kv_cache_gib=0.05, **options)
    )
    (line,) = (run / "rollouts" / "step_00000.jsonl").read_text().splitlines()
    ids, chat = json.loads(line)["token_ids"], Chat(loud_folder)
    assert ids[:-2] == chat.encode(json.loads(line)["messages"]) + chat.tokenizer.encode("!")
    assert json.loads((run / "config.json").read_text())["template_args"] == ["loud=true"]


@pytest.mark.parametrize("recipe", [rlvr, evaluate, sft, dpo, distill], ids=lambda r: r.__name__)
def test_arguments_and_rows_that_the_template_refuses_are_named(recipe, loud_folder, tmp_path):
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    replies = {"reply": "a", "chosen": "a", "rejected": "b", "domain": "reverse"}
    rows = [{"prompt": "u"} | replies, {"prompt": [system, user]} | replies]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "d.jsonl")
    options = {"model": str(loud_folder), "data": (path,) if recipe in (rlvr, evaluate) else path}
    options |= {"teacher": str(loud_folder)} if recipe is distill else {}
    options |= {"run_dir": str(tmp_path / "run")}
    with pytest.raises(ValueError, match=r"'lowd', which the chat template of .*; it reads loud"):
        call_recipe(recipe, from_flat(recipe.Config, **options, template_args=("lowd=true",)))
    with pytest.raises(
        ValueError, match=r"d\.jsonl line 2.*: the chat template refuses .*no system"
    ):
        call_recipe(recipe, from_flat(recipe.Config, **options))


@pytest.mark.slow
def test_the_quickstart_learns(tiny_folder, tmp_path):
    """The model and the task of scripts/quickstart.sh, in fewer steps of RL."""
    cfg = from_flat(sft.Config, 
        model=str(tiny_folder), data="reverse:5", steps=140, careless=0.7, eval_every=70,
        run_dir=str(tmp_path / "sft"),
    )  # fmt: skip
    call_recipe(sft, cfg)
    losses = [loss for _, loss in RunFolder(tmp_path / "sft").metric("eval/loss")]
    assert len(losses) == 2 and losses[-1] < 0.7 * losses[0]
    cfg = from_flat(rlvr.Config, 
        model=str(tmp_path / "sft" / "model"), data=("reverse:5",), steps=10, prompts_per_step=32,
        max_tokens=8, eval_every=5, run_dir=str(tmp_path / "rlvr"),
    )  # fmt: skip
    before, *_, after = call_recipe(rlvr, cfg)
    assert before < 0.4 and after > 0.7


@pytest.mark.slow
def test_rlvr_with_the_wrong_sign_does_not_learn(imitator, tmp_path, monkeypatch):
    def flipped(*arguments):
        sequences = original(*arguments)
        return [dataclasses.replace(s, advantages=[-a for a in s.advantages]) for s in sequences]

    original = rlvr.prepare
    monkeypatch.setattr(rlvr, "prepare", flipped)
    before, *_, after = call_recipe(rlvr, small_config(imitator, tmp_path / "run"))
    rewards = [reward for _, reward in RunFolder(tmp_path / "run").metric("reward/mean")]
    assert after <= before and rewards[-1] < 0.7 * rewards[0]


def test_several_updates_on_one_batch_move_the_ratio(imitator, tmp_path):
    cfg = small_config(imitator, tmp_path / "run", steps=1, updates_per_step=4, clip_high=0.05)
    call_recipe(rlvr, cfg)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["mismatch/logprob_mean"] < 1e-5  # before the first of them
    assert metrics["policy/kl"] > 1e-4 and metrics["policy/clip_fraction"] > 0


def test_without_learning_rate_nothing_changes(imitator, tmp_path):
    options = {"steps": 3, "lr": 0.0, "prompts_per_step": 8, "eval_every": 1, "eval_prompts": 32}
    cfg = small_config(imitator, tmp_path / "run", **options)
    accuracies = call_recipe(rlvr, cfg)
    assert len(set(accuracies)) == 1
    before, after = (
        AutoModelForCausalLM.from_pretrained(f / "model", dtype=torch.float32).state_dict()
        for f in (imitator, tmp_path / "run")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_same_seed_gives_the_same_run(imitator, tmp_path):
    runs = []
    for name in ("a", "b"):
        options = {"steps": 2, "prompts_per_step": 8, "eval_every": 0}
        call_recipe(rlvr, small_config(imitator, tmp_path / name, **options))
        lines = (tmp_path / name / "rollouts" / "step_00002.jsonl").read_text().splitlines()
        runs.append([json.loads(line)["token_ids"] for line in lines])
    assert runs[0] == runs[1]


def test_an_old_run_folder_is_not_written_over(imitator):
    with pytest.raises(ValueError, match=r"earlier run; .* with --resume"):
        call_recipe(rlvr, small_config(imitator, imitator, steps=0))


def test_an_evaluation_is_not_to_be_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "evaluate"}))
    with pytest.raises(ValueError, match=r"earlier run; name another folder or remove it$"):
        refuse_old_run(tmp_path)


@pytest.mark.parametrize("recipe", [rlvr, sft, dpo, distill, evaluate])
def test_other_ranks_need_no_files_of_data(recipe, toy_folder, tmp_path):
    """Their options are read; the first rank, which goes into `main`, refuses what is missing."""
    several = ("x.jsonl",) if recipe in (rlvr, evaluate) else "x.jsonl"
    options = {"model": str(toy_folder), "data": several, "run_dir": str(tmp_path / "run")}
    options |= {"teacher": str(toy_folder)} if recipe is distill else {}
    cfg = from_flat(recipe.Config, **options, device="cpu")
    with pytest.raises(UserError, match=r"'x\.jsonl' is neither a file"):
        call_recipe(recipe, cfg)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ("poetry:3",)}, "'poetry:3' is neither a file, a task nor an env.*addition:N"),
        ({"samples_per_prompt": 1}, "samples_per_prompt=1 must be at least 2"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        (
            {"model": "no/such/folder"},
            r"no/such/folder is not a model folder.*roll-lite tiny",
        ),
        ({"device": "tpu"}, "device='tpu'.*auto, cpu or cuda"),
    ],
)
def test_wrong_values_are_named(imitator, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call_recipe(rlvr, small_config(imitator, tmp_path / "run", **changes))


def test_a_plan_starts_nothing(imitator, tmp_path, command):
    arguments = ["--model", f"{imitator}/model", "--plan", "--run-dir", str(tmp_path / "run")]
    code, printed = command(RECIPES / "rlvr.py", *arguments)
    assert code == 0 and "step: 32 prompts x 8 samples" in printed
    code, printed = command(RECIPES / "rlvr.py", *arguments, "--kv-cache-gib", "1e-5")
    assert code == 1 and "does not fit: rank 0 has a KV cache of" in printed
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_is_an_error(command):
    code, printed = command(RECIPES / "rlvr.py", "--learning-rate", "1")
    assert code == 2 and "--learning-rate" in printed


@pytest.mark.slow
def test_pdb_stops_inside_a_reward_of_the_recipe(imitator, tmp_path):
    commands = "b reversed_word\nc\np 'truth is', prompt.ground_truth\nw\nq\n"
    result = subprocess.run(
        [sys.executable, "-m", "pdb", RECIPES / "rlvr.py", "--model", imitator / "model",
         "--data", TASK, "--steps", "1", "--run-dir", tmp_path / "run"],
        input=commands, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert "reversed_word(prompt, reply" in result.stdout or "reversed_word()" in result.stdout
    assert "('truth is', '" in result.stdout
    assert "coordinator.py" in result.stdout  # the stack leads from the loop to the reward
