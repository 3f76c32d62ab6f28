"""How tokens spread over experts, and the loss that balances them, against transformers' and a
formula."""

import pytest
import torch
from support.models import make_reference
from support.trainers import make_trainer, step_gradient
from support.training_data import random_sequences
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll_lite.models.hf import hf_tensors
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss

COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    reference = make_reference("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("mixture")
    reference.save_pretrained(folder)
    return reference, folder


def router_logits(reference, sequences):
    """Of all tokens that are read, by layer."""
    found = [
        reference(torch.tensor([s.token_ids[:-1]]), output_router_logits=True).router_logits
        for s in sequences
    ]
    return [torch.cat(layer) for layer in zip(*found, strict=True)]


@pytest.mark.parametrize("budget", [10**6, 40])
def test_the_gradient_that_it_adds_is_that_of_transformers_loss(place, mixture, budget):
    reference, folder = mixture
    sequences = random_sequences()
    batch = pack(sequences, budget)
    assert (len(batch) > 2) == (budget == 40)
    grads = {}
    for coefficient in (0.0, COEFFICIENT):
        trainer = make_trainer(place, folder, sft_loss, balance_coef=coefficient)
        grads[coefficient] = step_gradient(trainer, batch)[0]
    added = {name: grads[COEFFICIENT][name] - grads[0.0][name] for name in grads[0.0]}
    reference.zero_grad()
    total = sum(len(micro.token_ids_T) for micro in batch)
    for micro in batch:
        members = [sequences[i] for i in micro.indices_S.tolist()]
        layers = router_logits(reference, members)
        losses = [load_balancing_loss_func((logits,), 8, 3) for logits in layers]
        share = len(micro.token_ids_T) / total
        (COEFFICIENT * share * torch.stack(losses).mean()).backward()
    found = hf_tensors(added, trainer.config, "fused")
    for name, parameter in reference.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            assert found[name].norm() < 1e-6, name
        else:
            error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, (name, error)  # of the difference of two gradients


def test_load_is_the_busiest_expert_over_the_mean(place, mixture):
    reference, folder = mixture
    sequences = random_sequences()
    trainer = make_trainer(place, folder, sft_loss, checkpointing="full")
    metrics = trainer.step(pack(sequences, 60))
    loads = []
    with torch.no_grad():
        for logits in router_logits(reference, sequences):
            counts = logits.topk(3).indices.flatten().bincount(minlength=8).double()
            loads.append(counts.max() / counts.mean())
    assert metrics["train/expert_load"] == pytest.approx(torch.stack(loads).mean().item())
    assert metrics["train/expert_load"] > 1.2


def test_a_balanced_mixture_is_trained(place, mixture):
    """The loss spreads tokens that a router sends to a few experts."""
    _, folder = mixture
    batch = pack(random_sequences(), 10**6)
    loads = {}
    for coefficient in (0.0, 3.0):
        trainer = make_trainer(place, folder, sft_loss, balance_coef=coefficient)
        loads[coefficient] = [trainer.step(batch)["train/expert_load"] for _ in range(12)]
    assert loads[3.0][0] == loads[0.0][0]
    assert loads[3.0][-1] < loads[0.0][-1] - 0.1


def test_dense_models_have_nothing_to_balance(place, tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"balance_coef=0.1 is for mixtures of experts.*leave it"):
        make_trainer(place, tmp_path, sft_loss, balance_coef=0.1)
