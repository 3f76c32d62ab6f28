"""Masters and moments in host memory while engines generate: nothing changes by it."""

import dataclasses

import pytest
import torch
from support.launch import start_alone
from support.models import make_reference
from support.trainers import make_trainer, same_state
from support.training_data import random_sequences

from roll_lite.models.config import LoraOptions
from roll_lite.models.fsdp import local
from roll_lite.train import offload
from roll_lite.train.batch import pack
from roll_lite.train.checkpoint_folders import Manifest, write_manifest
from roll_lite.train.offload import Offload


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def qwen_folder(request, tmp_path):
    make_reference(request.param, num_hidden_layers=2).save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


@pytest.mark.gpu
def test_offloaded_training_goes_on_bit_for_bit(qwen_folder):
    batch = pack(random_sequences(), 64)
    states = []
    with start_alone("cuda") as place:
        for offloads in (False, True):
            trainer = make_trainer(place, qwen_folder)
            for _ in range(4):
                trainer.step(batch)
                if offloads:
                    held = torch.cuda.memory_allocated()
                    trainer.offload()
                    freed = held - torch.cuda.memory_allocated()
                    assert freed >= 12 * sum(p.numel() for p in trainer.model.parameters())
                    trainer.reload()
            states.append({name: tensor.cpu() for name, tensor in trainer.state().items()})
    assert same_state(*states)


def test_an_offloaded_trainer_refuses_to_compute_and_goes_on_bit_for_bit(place, qwen_folder):
    """On a CPU, where host memory is plain memory."""
    batch, options = pack(random_sequences(), 10**6), {"lora": LoraOptions(rank=2)}
    for changes in ({}, {"moments": "bfloat16"}, options):
        trainer, other = (make_trainer(place, qwen_folder, **changes) for _ in range(2))
        trainer.offload()  # before FSDP's first pass
        trainer.reload()
        for _ in range(2):
            trainer.step(batch), other.step(batch)
            trainer.offload()
            trainer.offload()
            held = [*trainer.model.parameters(), *trainer.optimizer.moments["exp_avg"].values()]
            assert all(local(t.detach()).untyped_storage().nbytes() == 0 for t in held)
            for use in (trainer.step, trainer.logprobs):
                with pytest.raises(RuntimeError, match=r"are offloaded; call reload\(\)"):
                    use(batch)
            trainer.reload()
        assert same_state(trainer.state(), other.state())
        assert all(map(torch.equal, trainer.logprobs(batch), other.logprobs(batch)))


def test_an_offloaded_trainer_is_exported_and_checkpointed_from_the_host(
    place, qwen_folder, tmp_path
):
    batch = pack(random_sequences(), 10**6)
    trainer, other = make_trainer(place, qwen_folder), make_trainer(place, qwen_folder)
    trainer.step(batch)
    expected = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.offload()
    assert same_state(trainer.state(), expected)
    record = trainer.write_checkpoint(tmp_path)
    write_manifest(
        tmp_path,
        Manifest(
            step=1, kind="full", score=None, layout={}, files=[record],
            architecture=dataclasses.asdict(trainer.config),
            state={"progress": trainer.describe_checkpoint()["progress"]},
        ),
    )  # fmt: skip
    other.offload()
    other.read_checkpoint(tmp_path)  # into host memory
    other.reload()
    trainer.reload()
    assert same_state(other.state(), expected)
    assert trainer.step(batch)["loss/grad_norm"] == other.step(batch)["loss/grad_norm"]
    assert same_state(trainer.state(), other.state())


def test_host_memory_is_packed_into_slabs(monkeypatch):
    monkeypatch.setattr(offload, "SLAB_BYTES", 4096)
    sizes = [3000, 1, 700, 5000, 200, 2500, 0]
    tensors = [torch.randint(0, 9, (size,), dtype=torch.uint8) for size in sizes]
    expected, moved = [t.clone() for t in tensors], Offload(tensors[:3], tensors[3:])
    for _ in range(2):
        moved.out()
        assert all(not t.untyped_storage().nbytes() for t in tensors)
        assert all(map(torch.equal, map(moved.host_copy, tensors), expected))
        slabs = {copy.untyped_storage()._cdata: copy for copy in moved._host.values()}
        assert [s.untyped_storage().nbytes() for s in slabs.values()] == [8192, 8192]
        moved.back()
        assert all(map(torch.equal, tensors, expected))
        tensors[0].add_(1), expected[0].add_(1)
