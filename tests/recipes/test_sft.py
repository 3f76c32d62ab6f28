"""Supervised fine-tuning as a user runs it: over ranks, interrupted, from files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.forked_ranks import run_ranks
from support.launch import run_recipe
from support.models import EXPERTS, make_toy
from support.paths import RECIPES
from support.process_checks import wait_until
from support.runs import flags, losses, run_sft, sft_options
from transformers import AutoModelForCausalLM

from roll_lite.models.attention import PackedAttention
from roll_lite.models.hf import load_model
from roll_lite.options import from_flat
from roll_lite.recipes import sft
from roll_lite.report.reader import RunFolder
from roll_lite.train import export, trainer
from roll_lite.train.checkpoint_folders import read_manifest, verify


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run_in_two_parts(run, model, run_dir, **changes):
    """Ten updates, an end, and another ten."""
    values = sft_options(model, run_dir, checkpoint_every=5, **changes)
    run(values | {"steps": 10})
    run(values | {"resume": True})


def no_json(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_a_run_that_diverges_ends_and_its_records_are_json(command, toy_folder, tmp_path):
    values = sft_options(toy_folder, tmp_path, lr=1e9, warmup_steps=0, eval_every=1)
    code, output = command(RECIPES / "sft.py", *flags(values))
    assert code == 1
    assert "error: the gradient of the policy was not finite in 5 updates in a row" in output
    assert "Traceback" not in output
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=no_json) for line in lines]
    assert rows[-1]["loss/grad_norm"] is None and rows[-1]["loss/skipped_steps"] == 1
    assert len(RunFolder(tmp_path).metric("loss/grad_norm")) < len(rows)
    assert all(value is not None for row in RunFolder(tmp_path).rows for value in row.values())


def run_on_two_ranks(values):
    run_ranks(2, RECIPES / "sft.py", *flags(values))


@pytest.fixture(scope="module")
def whole_run(small_folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("sft") / "whole"
    run_sft(sft_options(small_folder, run_dir))
    return run_dir


def test_sft_learns_and_transformers_loads_the_result(imitator):
    """Untrained, the loss is log 99 = 4.6; that of guessing letters is about 2.3.

    What is left when it knows them is whether the teacher is careless.
    """
    (_, first), *_, (_, last) = RunFolder(imitator).metric("eval/loss")
    assert last < first < 3.5 and last < 1.2
    assert json.loads((imitator / "config.json").read_text())["data"] == "reverse:2"
    reference = AutoModelForCausalLM.from_pretrained(imitator / "model", dtype=torch.float32)
    model = load_model(imitator / "model")
    ids = torch.arange(3, 40)
    attention = PackedAttention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    places = torch.arange(len(ids))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0].log_softmax(-1)[places[:-1], ids[1:]]
        found, _ = model(ids, places, attention, places[:-1], ids[1:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_resumed_run_is_the_same_to_the_last_bit(small_folder, whole_run, tmp_path):
    run_in_two_parts(run_sft, small_folder, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole_run)
    assert same_weights(tmp_path / "run", whole_run)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000020"]


def test_a_damaged_checkpoint_is_passed_over(small_folder, whole_run, tmp_path, capsys):
    values = sft_options(small_folder, tmp_path / "run", checkpoint_every=5)
    run_sft(values | {"steps": 10})
    (shard,) = (tmp_path / "run" / "checkpoints" / "step-00000010").glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"x")
    capsys.readouterr()
    run_sft(values | {"resume": True})
    printed = capsys.readouterr().out
    assert "step-00000010 is damaged" in printed
    assert "resuming from" in printed and "step 6  " in printed and "step 5  " not in printed
    assert losses(tmp_path / "run") == losses(whole_run)
    assert same_weights(tmp_path / "run", whole_run)


def test_resume_without_a_checkpoint_starts(small_folder, tmp_path):
    values = sft_options(small_folder, tmp_path / "run", steps=1, resume=True)
    run_sft(values)
    with pytest.raises(ValueError, match=r"records of an earlier run; name another folder"):
        run_sft(values | {"resume": False})


def test_resume_with_other_options_is_refused(small_folder, tmp_path):
    values = sft_options(small_folder, tmp_path / "run", steps=2)
    run_sft(values)
    with pytest.raises(ValueError, match=r"cannot be resumed with seed=5 \(was 0\)"):
        run_sft(values | {"seed": 5, "resume": True, "steps": 3})


@pytest.mark.slow
def test_ranks_do_not_change_the_run(small_folder, whole_run, tmp_path):
    """At two ranks: the same losses, resumed to the last bit, and resumed on one rank."""
    run_recipe("sft", *flags(sft_options(small_folder, tmp_path / "two")), num_ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(whole_run), abs=1e-5)
    validation = [
        RunFolder(run).metric("eval/loss")[-1][1] for run in (tmp_path / "two", whole_run)
    ]
    assert validation[0] == pytest.approx(validation[1], abs=1e-5)
    run_in_two_parts(run_on_two_ranks, small_folder, tmp_path / "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "two")
    assert same_weights(tmp_path / "again", tmp_path / "two")
    values = sft_options(small_folder, tmp_path / "fewer")
    run_on_two_ranks(values | {"steps": 10})
    run_sft(values | {"resume": True})
    assert losses(tmp_path / "fewer") == pytest.approx(losses(tmp_path / "two"), abs=1e-6)


@pytest.mark.slow
def test_the_default_run_learns_to_reverse_words(tiny_folder, tmp_path):
    run_recipe("sft", "--model", tiny_folder, "--steps", 100, "--run-dir", tmp_path / "run")
    assert RunFolder(tmp_path / "run").metric("eval/loss")[-1][1] < 0.5


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_with_a_dialogue_that_is_too_long(small_folder, tmp_path):
    rows = [{"prompt": "word", "reply": "b" * 4 * n} for n in range(1, 5)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    values = sft_options(
        small_folder, tmp_path / "run", data=str(path), steps=2, tokens_per_microbatch=18
    )
    with pytest.raises(
        ValueError, match=r"rows\.jsonl line 3 has \d+ tokens.*allow 19; .*too_long"
    ):
        run_sft(values | {"run_dir": str(tmp_path / "refused")})
    run_sft(values | {"too_long": "truncate", "eval_data": str(path)})
    assert [count for _, count in RunFolder(tmp_path / "run").metric("data/truncated")] == [2, 2]
    assert len(RunFolder(tmp_path / "run").metric("eval/loss")) == 1


def test_adapters_are_merged_and_resume(small_folder, tmp_path):
    values = {"lora_rank": 4, "lora_alpha": 8.0, "steps": 4}
    run_sft(sft_options(small_folder, tmp_path / "whole", **values))
    parts = sft_options(small_folder, tmp_path / "parts", **values)
    run_sft(parts | {"steps": 2})
    run_sft(parts | {"resume": True})
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    start, end = load_file(small_folder / "model.safetensors"), weights(tmp_path / "whole")
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert end.keys() == start.keys()
    assert changed == {name for name in end if "_proj" in name}


def test_a_bad_row_is_named_and_nothing_is_left(small_folder, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "reply": "b"}, {"prompt": "a"})
    with pytest.raises(
        ValueError, match=r"rows\.jsonl line 2: no field 'reply'; a dialogue row has"
    ):
        run_sft(sft_options(small_folder, tmp_path / "run", data=str(path)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_map": "train=0", "tp": 2}, "tp=2 is not read with device_map"),
        ({"keep_last": 0}, "keep_last=0 must be at least 1"),
        ({"lora_rank": 2, "lora_targets": ("mlp",)}, "lora targets=mlp are not known"),
    ],
)
def test_wrong_values_are_named(small_folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        from_flat(sft.Config, **sft_options(small_folder, tmp_path / "run", **changes))


def test_checkpoints_beside_training_are_those_that_stop_it(small_folder, tmp_path, monkeypatch):
    """They are written from copies: here not before the next update has changed the weights."""
    three = {"steps": 3, "checkpoint_every": 1, "keep_last": 3}
    run_sft(sft_options(small_folder, tmp_path / "before", **three))
    write, step, updates = trainer.write_shard, trainer.Trainer.step, []

    def late(folder, *args, **kwargs):
        number = int(Path(folder).name.split("-")[1].split(".")[0])
        wait_until(lambda: len(updates) > min(number, 2), 600)  # none follows the third
        return write(folder, *args, **kwargs)

    def counted(*args, **kwargs):
        metrics = step(*args, **kwargs)
        updates.append(metrics)
        return metrics

    monkeypatch.setattr(trainer, "write_shard", late)
    monkeypatch.setattr(trainer.Trainer, "step", counted)
    run_sft(sft_options(small_folder, tmp_path / "beside", checkpoint_beside=True, **three))
    for folder in (tmp_path / "before" / "checkpoints").iterdir():
        other = tmp_path / "beside" / "checkpoints" / folder.name
        for file in folder.glob("*.safetensors"):
            assert file.read_bytes() == (other / file.name).read_bytes()
        assert read_manifest(folder).state == read_manifest(other).state and not verify(other)


def test_epochs_in_place_of_steps(toy_folder, tmp_path, capsys):
    """As many steps as the passes take, the last in part; a resumed run comes to the same."""
    rows = [{"prompt": "Reverse ab", "reply": "ba"}] * 10
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = sft_options(
        toy_folder, tmp_path / "run", data=str(tmp_path / "rows.jsonl"), epochs=1.5
    )
    values = {n: v for n, v in values.items() if n not in ("steps", "eval_rows")}
    run_sft(values)
    assert "chosen for epochs=1.5 of 10 rows: steps=4" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["steps"] == 4 and len(losses(tmp_path / "run")) == 4
    assert config["chosen"]["steps"] == 100
    with pytest.raises(ValueError, match="steps=7 is not read with epochs"):
        from_flat(sft.Config, **values | {"steps": 7})
    with pytest.raises(ValueError, match=r"epochs=1\.5 is not read with a task in data"):
        from_flat(sft.Config, **values | {"data": "reverse:2"})


def test_models_on_the_way_are_whole_folders(toy_folder, tmp_path):
    run_sft(sft_options(toy_folder, tmp_path, steps=5, export_every=2, eval_every=0, lora_rank=2))
    exports = sorted((tmp_path / "exports").iterdir())
    assert [path.name for path in exports] == ["step-00000002", "step-00000004"]
    first, second, last = (
        load_file(path / "model.safetensors") for path in (*exports, tmp_path / "model")
    )
    assert not all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == last.keys()
    AutoModelForCausalLM.from_pretrained(exports[0])


@pytest.mark.parametrize(
    ("targets", "experts", "num_projections"),
    [
        (("qkv", "out", "gate_up", "down"), {}, 7),
        (("qkv",), {}, 3),
        (("out", "expert_gate_up", "expert_down"), EXPERTS, 13),
        (("qkv", "out", "gate_up", "down"), EXPERTS, 4),  # the default: none of a routed expert
    ],
)
def test_the_adapter_alone_is_what_peft_loads(tmp_path, targets, experts, num_projections):
    """Its names, shapes and scale as PEFT documents them: W + lora_alpha / r * B @ A of each
    projection is the merged model."""
    toy_folder = make_toy(tmp_path / "toy", **experts)
    run_sft(sft_options(
        toy_folder, tmp_path / "run", steps=3, lora_rank=2, lora_alpha=5.0, lora_targets=targets,
        eval_every=0,
    ))  # fmt: skip
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert export.main([str(checkpoint), str(tmp_path / "out"), "--adapter"]) == 0
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA" and about["base_model_name_or_path"] == str(toy_folder)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    base, merged = load_file(toy_folder / "model.safetensors"), weights(tmp_path / "run")
    names = {name for name in base if name.split(".")[-2] in about["target_modules"]}
    assert len(names) == num_projections
    lora = {f"base_model.model.{name.removesuffix('weight')}" for name in names}
    assert adapter.keys() == {f"{n}lora_{half}.weight" for n in lora for half in "AB"}
    for name in base:
        expected = base[name]
        if name in names:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (adapter[f"{module}.lora_{half}.weight"] for half in "AB")
            assert a.shape == (2, expected.shape[1]) and b.shape == (expected.shape[0], 2)
            expected = expected + about["lora_alpha"] / about["r"] * b @ a
            assert not torch.equal(expected, base[name])
        torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)


def test_a_run_without_adapters_has_none_to_export(toy_folder, tmp_path, capsys):
    run_sft(sft_options(toy_folder, tmp_path / "run", steps=1, eval_every=0))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert export.main([str(checkpoint), str(tmp_path / "out"), "--adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err
