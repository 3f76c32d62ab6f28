"""The same training on one rank and on many: FSDP, tensor parallel, expert parallel, mixed."""

import pytest
import torch
from support import train_programs
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.models import make_reference
from transformers import AutoModelForCausalLM

from roll_lite.cluster.cluster import Cluster
from roll_lite.models.attention import PackedAttention
from roll_lite.models.hf import load_model
from roll_lite.train.batch import pack

pytestmark = pytest.mark.slow


# A tied head and norms of q and k, a vocabulary that no tp divides, and one key/value head for all
# ranks; a head of its own and biases, and sizes that tp=2 divides.
# Mixtures: all layers sparse; some, with a shared expert.
FAMILIES = [("qwen3", 99, 1), ("qwen2.5", 200, 2), ("qwen3_moe", 99, 2), ("qwen2_moe", 99, 2)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family[0])
def folder(request, tmp_path_factory):
    family, vocab, kv_heads = request.param
    folder = tmp_path_factory.mktemp("layouts") / family
    sizes = {"vocab_size": vocab, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
    make_reference(family, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def over_ranks(folder):
    result_file = folder.parent / "layouts.pt"
    start = run_torchrun if folder.name == "qwen3" else run_ranks
    start(4, train_programs.__file__, "layouts", folder, result_file)
    return torch.load(result_file, weights_only=False)


@pytest.fixture(scope="module")
def alone(folder):
    results = {}
    with Cluster("train=0", "cpu") as cluster:
        for lora in (None, train_programs.adapters(folder)):
            options = train_programs.options(lora)
            trainer = cluster.role("train", train_programs.Probe, folder=folder, **options)
            if lora:
                trainer.shake_adapters()
            results[bool(lora)] = train_programs.measure(trainer, 1)
        if train_programs.is_mixture(folder):
            options = train_programs.options() | {"balance_coef": 0.5}
            trainer = cluster.role("train", train_programs.Probe, folder=folder, **options)
            results["balanced"] = train_programs.balanced(trainer)
            results["replayed"] = train_programs.replayed(cluster, folder, "train")
    return results


def test_training_does_not_depend_on_the_layout(folder, over_ranks, alone):
    for layout, lora in train_programs.cases(folder):
        got, expected = over_ranks[layout, lora], alone[lora]
        whole = expected["grads"][10_000]
        errors = {}
        for grads in (*got["grads"].values(), *expected["grads"].values()):
            assert grads.keys() == whole.keys()
            for name, grad in grads.items():
                error = ((grad - whole[name]).norm() / whole[name].norm()).item()
                assert error < 1e-5, (layout, name, error)
                errors[error] = name
        print(f"{folder.name} {layout} lora={lora}: {max(errors):.1e}, {errors[max(errors)]}")
        assert got["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert got["losses"][-1] < got["losses"][0]
        assert all(got["holds"])
        for name in ("logprobs", "truncated", "top"):
            for mine, theirs in zip(got[name], expected[name], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        for name, tensor in expected["state"].items():
            torch.testing.assert_close(got["state"][name], tensor, rtol=1e-4, atol=2e-5)


def test_every_layout_exports_the_model_that_it_trained(folder, over_ranks):
    for layout, lora in train_programs.cases(folder):
        result_file = folder.parent / "layouts.pt"
        model = load_model(train_programs.exported(result_file, layout, lora))
        for name, tensor in over_ranks[layout, lora]["state"].items():
            assert torch.equal(model.get_parameter(name), tensor), (layout, name)


def test_recorded_experts_are_those_of_all_layouts(folder, over_ranks, alone):
    for layout, grads in over_ranks.get("replayed", {}).items():
        for name, expected in alone["replayed"].items():
            error = (grads[name] - expected).norm() / expected.norm()
            assert error < 1e-5, (layout, name, error)
    if "replayed" in alone:
        own = alone[False]["grads"][200]["blocks.1.mlp.router"]
        assert not torch.allclose(alone["replayed"]["blocks.1.mlp.router"], own, rtol=0.1)


def test_ranks_that_share_experts_balance_them_once(folder, over_ranks, alone):
    for name, expected in alone["balanced"].items() if "balanced" in alone else ():
        error = (over_ranks["balanced"][name] - expected).norm() / expected.norm()
        assert error < 1e-5, (name, error)


def test_transformers_loads_what_ranks_with_parts_of_experts_export(folder, over_ranks):
    if not train_programs.is_mixture(folder):
        return
    ours = load_model(folder)
    ours.load_state_dict(over_ranks["ep2tp2", False]["state"])
    folder = train_programs.exported(folder.parent / "layouts.pt", "ep2tp2", False)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)
    attend = PackedAttention(torch.tensor([0, 40], dtype=torch.int32), 40)
    with torch.no_grad():
        logits = ours.logits(ours.hidden_states(ids, ids, attend))
        expected = theirs(ids[None]).logits[0]
    assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_the_budgets_give_the_micro_batches_they_say():
    sequences = train_programs.make_sequences()
    found = {budget: len(pack(sequences, budget)) for budget in train_programs.BUDGETS}
    assert found == train_programs.BUDGETS


def test_every_layout_reads_what_another_wrote(over_ranks):
    expected, losses = over_ranks["resumed"]["fsdp2tp2"]
    for layout, (state, found) in over_ranks["resumed"].items():
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), (layout, name)
        assert found == pytest.approx(losses, rel=1e-6), layout


def test_copies_of_the_weights_are_written_once(over_ranks):
    num_bytes, written, read = over_ranks["of copies"]
    once = 3 * sum(tensor.nbytes for tensor in written.values())  # masters and two moments
    assert once <= num_bytes < 1.2 * once
    for name, tensor in written.items():
        assert torch.equal(read[name], tensor), name
