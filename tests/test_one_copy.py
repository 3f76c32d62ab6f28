"""With LoRA, engines on the ranks of the trainer compute with its frozen weights."""

import pytest
import torch
import transformers
from support.forked_ranks import run_ranks
from support.models import make_reference
from support.one_copy_program import PROMPTS
from support.paths import SUPPORT

from roll_lite.device_map import parse_device_map

PROGRAM = SUPPORT / "one_copy_program.py"
MAPS = {  # and whether there is one copy
    "train=0 generate=0": True,
    "train=0-1,tp=2 generate=0-1,tp=2": True,
    "train=0-1,fsdp=1 generate=0-1": True,
    "train=0-1 generate=0-1": False,  # FSDP
}
CASES = ["train=0 generate=0", *(pytest.param(m, marks=pytest.mark.slow) for m in [*MAPS][1:])]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    make_reference(request.param).save_pretrained(folder)
    return folder


def ran(tmp_path, device_map, model, *options):
    num_ranks = 2 if "0-1" in device_map else 1
    run_ranks(num_ranks, PROGRAM, device_map, model, tmp_path / "result.pt", *options)
    return torch.load(tmp_path / "result.pt", weights_only=False)


def largest_difference(found, expected):
    return max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(
        found, expected, strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("turns", ["no", "yes"])
@pytest.mark.parametrize("device_map", CASES)
def test_engine_and_trainer_say_the_same(tmp_path, model, device_map, turns):
    found = ran(tmp_path, device_map, model, turns)
    is_shared = MAPS[device_map]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    for prompt, (ids, logprobs) in zip(PROMPTS, found["base"], strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
    check(found, is_shared, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("turns", ["no", "yes"])
def test_one_copy_on_a_gpu(tmp_path, model, turns):
    """In bf16, where engine and trainer have attention kernels of their own."""
    check(ran(tmp_path, CASES[0], model, turns, "cuda"), True, 0.05)


def check(found, is_shared, tolerance):
    base = [logprobs for _, logprobs in found["base"]]
    assert largest_difference(found["reference"], base) < tolerance
    for turns_of, scores in zip(found["generated"], found["scored"], strict=True):
        assert largest_difference([logprobs for _, logprobs in turns_of], scores) < tolerance
    assert found["generated"][0] != found["generated"][1] != found["base"]  # it has learnt
    first, second = found["digests"]
    assert first != second
    for places, later in zip(*found["addresses"], strict=True):
        frozen = {name: place for name, place in places.items() if not place[1]}
        stay = all(later[name] == place for name, place in frozen.items())
        assert len(frozen) > 20 and (stay or not is_shared)
        assert all((ours == theirs) == is_shared for ours, _, theirs in frozen.values())
        trained = [place for place in places.values() if place[1]]
        assert bool(trained) == is_shared
        assert all(ours != theirs for ours, _, theirs in trained)
    if is_shared:
        assert all(found["equal"]) and all(found["refused"])
        assert found["after_sleep"] == found["generated"][-1]
    for are_held, is_ready in found["held"]:
        assert all(held == is_shared for held in are_held) and not is_ready


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *MAPS.items(),
        ("train=0-3,tp=2 generate=0-3,tp=2", False),  # FSDP over two replicas
        ("train=0-3,tp=2,fsdp=1 generate=0-3,tp=2", True),
        ("train=0-3,tp=2,fsdp=1 generate=0-1,tp=2", True),  # two ranks only train
        ("train=0-3,tp=2,fsdp=1 generate=1-2,tp=2", False),  # other parts
        ("train=0-1,tp=2 generate=0-1", False),
        ("train=0-1,tp=2 generate=0-1,tp=2,ep=2", False),  # parts of experts, and whole ones
        ("train=0 generate=0-1", False),
        ("train=0 generate=1", False),
        ("train=0-1,cp=2 generate=0-1", False),
        ("train=0-1", False),
        ("generate=0", False),
    ],
)
def test_which_maps_have_one_copy(text, is_one):
    assert parse_device_map(text, 4).shares_weights == is_one
