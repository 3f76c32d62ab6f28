"""The command roll-lite: recipes and tools by name, copies of recipes, exports; and the wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support.models import make_reference
from support.paths import RECIPES
from support.training_data import random_sequences

from roll_lite import __main__ as roll_lite_command
from roll_lite.cluster.cluster import Cluster
from roll_lite.models.config import LoraOptions, read_config
from roll_lite.models.hf import hf_tensors
from roll_lite.train import export
from roll_lite.train.batch import pack
from roll_lite.train.checkpoint import start_checkpoint
from roll_lite.train.checkpoint_folders import Checkpoints
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer

ROOT = RECIPES.parent
NAMES = ["agentic", "distill", "dpo", "evaluate", "rlvr", "sft", "eject"]
NAMES += ["plan", "report", "rewards", "envs", "replay", "export", "tiny"]


@pytest.fixture
def roll_lite(monkeypatch, capsys):
    """Runs the command in this process; returns exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["roll-lite", *map(str, arguments)])
        capsys.readouterr()
        try:
            roll_lite_command.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_recipes_run_by_name(roll_lite, tiny_folder, tmp_path):
    code, printed, _ = roll_lite("rlvr", "--model", tiny_folder, "--plan", "--run-dir", tmp_path)
    assert code == 0 and "step: 32 prompts x 8 samples" in printed
    code, printed, _ = roll_lite("evaluate", "--help")  # which imports another recipe
    assert code == 0 and "pass@k of several samples" in printed


def test_a_run_is_planned_by_name(roll_lite):
    code, printed, _ = roll_lite("plan", "--model", "qwen3-8b", "--checkpointing", "full")
    assert code == 0 and "8,190,735,360 parameters" in printed


def test_recipes_are_the_same_modules_however_they_are_imported():
    from roll_lite.recipes import evaluate, rlvr

    assert evaluate.Config.INLINE is rlvr.Config.INLINE
    assert rlvr is sys.modules["roll_lite.recipes.rlvr"]
    with pytest.raises(ImportError, match="poetry"):
        from roll_lite.recipes import poetry  # noqa: F401


def test_another_package_with_the_name_of_a_recipe_is_not_imported(tmp_path):
    """Such as Hugging Face's `evaluate`, also not by a recipe that imports others."""
    for name in ("agentic", "evaluate", "rlvr"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not the recipe')")
    code = "from roll_lite.recipes import evaluate; evaluate.Config.INLINE"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_what_it_cannot_do_it_says(roll_lite):
    code, printed, _ = roll_lite()
    assert code == 0 and all(f"\n  {name} " in printed for name in NAMES)
    for word, near in (("poetry", ""), ("reprot", "did you mean report? "), ("rlvl", "rlvr? ")):
        code, _, errors = roll_lite(word)
        assert code == 2 and f"roll-lite {word} is not understood; " in errors and near in errors
    for words in (["poetry", "mine"], ["rlvr"]):
        code, _, errors = roll_lite("eject", *words)
        assert code == 2 and "usage: roll-lite eject " in errors and "error: " in errors


@pytest.mark.parametrize("name", NAMES)
def test_usage_names_the_command(name, roll_lite):
    code, printed, _ = roll_lite(name, "--help")
    assert code == 0 and printed.startswith(f"usage: roll-lite {name} ")


@pytest.mark.parametrize("name", ["plan", "report", "rewards", "envs", "eject", ""])
def test_help_brings_no_torch(name):
    code = f"import sys; sys.argv = 'roll-lite {name} --help'.split()\n"
    code += "import roll_lite.__main__ as command\ntry:\n    command.main()\nfinally:\n"
    code += "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_recipe_is_copied(roll_lite, tmp_path):
    code, printed, _ = roll_lite("eject", "evaluate", tmp_path / "mine")
    assert code == 0 and f"wrote {tmp_path}/mine/evaluate.py" in printed
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["evaluate.py"]
    assert (tmp_path / "mine" / "evaluate.py").read_text() == (RECIPES / "evaluate.py").read_text()
    (tmp_path / "mine" / "evaluate.py").write_text("# edited")
    code, _, errors = roll_lite("eject", "evaluate", tmp_path / "mine")
    assert code == 2 and "exists; remove it" in errors
    assert (tmp_path / "mine" / "evaluate.py").read_text() == "# edited"


def test_a_model_is_made_once(roll_lite, tmp_path):
    code, printed, _ = roll_lite("tiny", tmp_path / "tiny", "--seed", 3)
    assert code == 0 and printed.startswith(f"wrote {tmp_path / 'tiny'} (torch ")
    code, _, errors = roll_lite("tiny", tmp_path / "tiny")
    assert code == 1 and "tiny holds a model already; remove it" in errors


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2, alpha=4.0)])
def test_a_checkpoint_becomes_the_folder_of_its_model(lora, tmp_path, capsys):
    base = tmp_path / "base"
    make_reference("qwen3").save_pretrained(base)
    fixed = {"model": str(base)}
    if lora:
        fixed |= {"lora_rank": 2, "lora_alpha": 4.0, "lora_targets": list(lora.targets)}
    options = {"folder": base, "loss": sft_loss, "schedule": Schedule(lr=1e-2)}
    with Cluster("train=0", "cpu") as cluster:
        trainer = cluster.role("train", Trainer, **options, lora=lora)
        trainer.step(pack(random_sequences(), 10**6))
        state = {"step": 1, "fixed": fixed, "parts": {}}
        path = start_checkpoint(Checkpoints(tmp_path / "checkpoints"), [trainer], 1, state)()
        trained = hf_tensors(trainer.state(), read_config(base))
    out = tmp_path / "out"
    assert export.main([str(path), str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in trained.items())
    assert export.main([str(path), str(out)]) == 2
    assert "out exists; remove it" in capsys.readouterr().err
    base.rename(tmp_path / "moved")
    assert export.main([str(path), str(tmp_path / "again")]) == 2
    assert "which is not here; name it with --model" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_not_exported(tmp_path, toy_folder, roll_lite):
    code, _, errors = roll_lite("export", toy_folder, tmp_path / "out")
    assert code == 2 and "is not the folder of a checkpoint: it has no manifest.json" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_wheel_holds_library_command_and_recipes(tiny_folder, tmp_path):
    """Installed outside the clone, without its dependencies, which are there already."""
    source = tmp_path / "source"  # building leaves files behind
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", source]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("roll_lite-*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    env = os.environ | {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(target / "bin" / "roll-lite", "sft", "--model", tiny_folder, "--data", "reverse:2",
        "--steps", "2", "--run-dir", "runs/sft", "--checkpoint-every", "2",
        "--rows-per-step", "4", "--eval-rows", "4")  # fmt: skip
    assert (tmp_path / "runs/sft/model/model.safetensors").is_file()
    small = ["--model", "runs/sft/model", "--prompts-per-step", "2", "--steps", "1"]
    small += ["--eval-prompts", "4"]
    run(sys.executable, "-m", "roll_lite.recipes.rlvr", *small, "--run-dir", "runs/a")
    run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "roll_lite",
        "rlvr", *small, "--run-dir", "runs/b")  # fmt: skip
    run(target / "bin" / "roll-lite", "eject", "evaluate", "mine")
    printed = run(sys.executable, "mine/evaluate.py", "--model", "runs/sft/model", "--prompts", "4")
    assert "pass@1" in printed
    (checkpoint,) = Path(tmp_path / "runs/sft/checkpoints").glob("step-*")
    run(target / "bin" / "roll-lite", "export", checkpoint, "out", "--model", tiny_folder)
    files = [tmp_path / folder / "model.safetensors" for folder in ("out", "runs/sft/model")]
    assert files[0].read_bytes() == files[1].read_bytes()
