"""Low-rank adapters against the formula, through training, merging and checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from support.models import make_reference
from support.training_data import random_sequences

from roll_lite.cluster.cluster import Cluster
from roll_lite.models.config import LoraOptions
from roll_lite.models.hf import load_model
from roll_lite.models.lora import Adapter, adapters, is_of_adapter
from roll_lite.train.batch import pack
from roll_lite.train.checkpoint import load_checkpoint, start_checkpoint
from roll_lite.train.checkpoint_folders import Checkpoints, read_manifest
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer


@pytest.fixture
def folder(tmp_path):
    make_reference("qwen2").save_pretrained(tmp_path / "qwen2")
    return tmp_path / "qwen2"


def make_trainer(place, folder, **options):
    options = {"lora": LoraOptions(rank=3, alpha=6.0), "schedule": Schedule(lr=1e-2)} | options
    return Trainer(folder, place=place, loss=sft_loss, **options)


def logprobs_of(model, micro):
    inputs = micro.token_ids_T, micro.positions_T, micro.attention, micro.rows_R, micro.targets_R
    with torch.no_grad():
        return model(*inputs)[0]


def test_only_adapters_are_trained_and_the_merged_model_says_the_same(place, folder, tmp_path):
    trainer = make_trainer(place, folder)
    (micro,) = batch = pack(random_sequences(), 10**6)
    base = logprobs_of(load_model(folder), micro)
    torch.testing.assert_close(trainer.logprobs(batch)[0], base, rtol=1e-5, atol=1e-5)
    losses = [trainer.step(batch)["loss/loss"] for _ in range(10)]
    assert losses[-1] < 0.95 * losses[0]
    trained = trainer.logprobs(batch)[0]
    assert (trained - base).abs().max() > 0.1
    merged = load_model(trainer.export(tmp_path / "merged"))
    torch.testing.assert_close(logprobs_of(merged, micro), trained, rtol=1e-4, atol=1e-4)
    # With the adapters off it is the base again, and then they are on again.
    torch.testing.assert_close(trainer.reference_logprobs(batch)[0], base, rtol=1e-5, atol=1e-5)
    assert torch.equal(trainer.logprobs(batch)[0], trained)


def test_an_adapter_adds_its_product(place, folder):
    """alpha / rank * up @ down, on each of the targets."""
    trainer = make_trainer(place, folder)
    before = trainer.state()
    for index, adapter in enumerate(adapters(trainer.model)):
        torch.manual_seed(index)
        torch.nn.init.normal_(adapter.up.to_local())
    names = dict(trainer.model.named_parameters())
    for name, weight in trainer.state().items():
        expected = before[name].double()
        if f"{name}_adapter.up" in names:
            up, down = (names[f"{name}_adapter.{part}"].full_tensor() for part in ("up", "down"))
            expected = expected + 2.0 * torch.einsum("...r,rh->...h", up.double(), down.double())
            assert not torch.equal(weight, before[name])
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype):
    """Numbers that cancel, so that another order of adding up shows."""
    torch.manual_seed(0)
    adapter = Adapter(torch.empty(3, 40, 768), LoraOptions(rank=16, alpha=8.0), None, True)
    half, down, up = torch.randn(700, 384), torch.randn(16, 384), torch.randn(3, 40, 16)
    adapter.down.copy_(torch.cat([down, -down], 1)), adapter.up.copy_(up)
    x = torch.cat([half, half + 1e-3 * torch.randn(700, 384)], 1).to(dtype)
    adapter.to(dtype)
    whole = adapter(x, zeros := torch.zeros(700, 120, dtype=dtype))
    exact = 0.5 * x.double() @ adapter.down.double().T @ adapter.up.flatten(0, 1).double().T
    assert (whole - exact).abs().max() <= 0.1 * exact.abs().max()
    for num_rows in (1, 5, 16, 17, 33, 64, 65, 100, 511, 512, 577):
        assert torch.equal(adapter(x[:num_rows], zeros[:num_rows]), whole[:num_rows]), num_rows


def test_targets_choose_the_weights(place, folder):
    trainer = make_trainer(place, folder, lora=LoraOptions(rank=2, targets=("out", "down")))
    trained = {name.split(".", 2)[2] for name in trainer.optimizer.parameters}
    assert trained == {
        f"{target}_adapter.{part}" for target in ("attention.out", "mlp.down")
        for part in ("down", "up")
    }  # fmt: skip


def test_a_first_layer_without_adapters(place, tmp_path):
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    make_reference("qwen2_moe", **sizes).save_pretrained(tmp_path)
    trainer = make_trainer(place, tmp_path, lora=LoraOptions(targets=("expert_down",)))
    assert {name.split(".")[1] for name in trainer.optimizer.parameters} == {"1"}


def test_whole_weights_keep_the_precision_of_adapters(place, folder, monkeypatch):
    """Over ranks, frozen weights in 16 bits and adapters in 32 travel in messages of their own."""
    trainer = make_trainer(place, folder)
    mesh = object()  # of all parameters, as where FSDP has cut frozen ones too
    for name in trainer._parameters:
        dtype = torch.float32 if is_of_adapter(name) else torch.bfloat16
        trainer._parameters[name] = SimpleNamespace(dtype=dtype, device_mesh=mesh)
    messages = []
    start = "roll_lite.train.trainer.start_gathering"
    monkeypatch.setattr(start, lambda held, dtype: messages.append((held, dtype)))
    for wanted in (None, torch.bfloat16):
        messages.clear()
        trainer._start_gathering(trainer._buckets[0], wanted)
        found = {name: dtype for held, dtype in messages for name in held}
        adapters = {name for name in found if is_of_adapter(name)}
        assert len(adapters) > 1 and {found[name] for name in adapters} == {torch.float32}
        assert {found[name] for name in found.keys() - adapters} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora rank=0 must be at least 1"),
        ({"targets": ("q_proj",)}, "targets=q_proj are not known; use qkv, out, gate_up"),
        ({"targets": ()}, "targets are empty"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LoraOptions(**options)


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("qwen2", ("qkv", "expert_down"), "targets=expert_down are experts, and this model has no"),
        ("qwen3_moe", ("gate_up",), "targets=gate_up are in no layer of this model; add others"),
    ],
)
def test_targets_that_a_model_does_not_have(place, tmp_path, family, targets, message):
    make_reference(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_trainer(place, tmp_path, lora=LoraOptions(targets=targets))


def test_a_full_model_is_no_reference_of_itself(place, folder):
    trainer = make_trainer(place, folder, lora=None)
    with pytest.raises(ValueError, match="give lora options"):
        trainer.reference_logprobs(pack(random_sequences(), 10**6))


def test_checkpoints_hold_adapters_alone(folder, tmp_path):
    batch = pack(random_sequences(), 10**6)
    options = {"folder": folder, "loss": sft_loss, "schedule": Schedule(lr=1e-2)}
    with Cluster("train=0", "cpu") as cluster:
        trainer = cluster.role("train", Trainer, **options, lora=LoraOptions(rank=3))
        trainer.step(batch)
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        path = start_checkpoint(checkpoints, [trainer], 1, {"position": 7, "fixed": {}})()
        manifest = read_manifest(path)
        assert manifest.kind == "adapter"
        tensors = [name for file in manifest.files for name in file.pieces]
        assert tensors and all("_adapter." in name for name in tensors)
        losses = [trainer.step(batch)["loss/loss"] for _ in range(3)]
        again = cluster.role("train", Trainer, **options, lora=LoraOptions(rank=3, seed=5))
        assert load_checkpoint(checkpoints, [again], {})["position"] == 7
        assert [again.step(batch)["loss/loss"] for _ in range(3)] == losses
        full = cluster.role("train", Trainer, **options)
        with pytest.raises(Exception, match="kind='adapter'"):
            load_checkpoint(checkpoints, [full], {})
