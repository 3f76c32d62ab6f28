"""Model folders: what transformers wrote we read, what we write transformers reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import make_reference
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll_lite.models import hf, hf_write
from roll_lite.models.hf import CheckpointError, load_model
from roll_lite.models.hf_write import save_model


@pytest.fixture
def folder(tmp_path):
    make_reference("qwen2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_round_trip_is_bit_equal_and_loads_in_transformers(family_folder, tmp_path):
    reference, folder = family_folder
    save_model(tmp_path / "copy", load_model(folder), like=folder)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_sharded_folders_are_read_and_written(folder, tmp_path, monkeypatch):
    model = load_model(folder)
    monkeypatch.setattr(hf_write, "SHARD_BYTES", 100_000)
    sharded = save_model(tmp_path / "sharded", model, like=folder)
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    again = load_model(sharded)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    AutoModelForCausalLM.from_pretrained(sharded)


def test_bf16_folders_keep_their_bits(folder, tmp_path):
    model = load_model(folder, dtype=torch.bfloat16)
    save_model(tmp_path / "bf16", model, like=folder)
    assert hf.stored_dtype(tmp_path / "bf16") == torch.bfloat16
    again = load_model(tmp_path / "bf16", dtype=torch.bfloat16)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


def test_tokenizer_and_template_travel_with_the_model(tiny_folder, tmp_path):
    save_model(tmp_path / "copy", load_model(tiny_folder), like=tiny_folder)
    ours, copied = (AutoTokenizer.from_pretrained(f) for f in (tiny_folder, tmp_path / "copy"))
    messages = [{"role": "user", "content": "Hi 12!\n"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert copied.apply_chat_template(messages, **options) == ours.apply_chat_template(
        messages, **options
    )


def test_a_failed_write_leaves_the_old_folder(folder, monkeypatch):
    model = load_model(folder)
    before = (folder / "model.safetensors").read_bytes()

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(hf_write, "content", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(folder, model, like=folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]  # nothing half-written stays
    load_model(folder)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_extra_tensors_are_named(folder):
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    rewrite(folder, lambda t: t.update({"model.layers.9.surprise": torch.zeros(1)}))
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert "missing model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "not expected model.layers.9.surprise" in str(error.value)


def test_wrong_shapes_are_named(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \(63,\), expected \(64,\)"):
        load_model(folder)


def test_truncated_files_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete"):
        load_model(folder)


def test_pickles_are_refused_with_the_remedy(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pickled.*save_pretrained"):
        load_model(folder)


def test_a_shard_that_is_not_there_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_write, "SHARD_BYTES", 100_000)
    sharded = save_model(tmp_path / "sharded", load_model(folder), like=folder)
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(sharded)


def test_an_index_names_files_of_its_folder_only(folder):
    (folder / hf.INDEX).write_text('{"weight_map": {"a": "../other/model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"'\.\./other/.*' *, outside of its folder"):
        load_model(folder)


def test_a_truncated_index_is_named(folder):
    (folder / hf.INDEX).write_text('{"weight_map": {"a"')
    with pytest.raises(ValueError, match=r"index\.json is not valid JSON"):
        load_model(folder)


def test_a_folder_without_config_says_how_to_get_one(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"roll-lite tiny"):
        load_model(folder)


def test_a_value_model_takes_a_language_model_folder(folder, tmp_path):
    critic = load_model(folder, head="value")
    with torch.no_grad():
        critic.value_head.normal_()
    save_model(tmp_path / "critic", critic, like=folder)
    again = load_model(tmp_path / "critic", head="value")
    assert torch.equal(again.value_head, critic.value_head)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(theirs.score.weight, critic.value_head)


def test_companions_that_exist_are_copied(folder, tmp_path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    copy = save_model(tmp_path / "copy", load_model(folder), like=folder)
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
