"""The trainer against transformers and plain torch."""

import copy
from collections import Counter

import pytest
import torch
from support.launch import start_alone
from support.models import make_reference
from support.trainers import PPO, make_trainer, same, same_state, step_gradient
from support.training_data import random_sequences
from torch.utils.flop_counter import FlopCounterMode

from roll_lite.models.hf import load_model
from roll_lite.train.batch import pack
from roll_lite.train.losses import LossOptions, PolicyLoss, sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.totals import combine
from roll_lite.train.trainer import MAX_SKIPPED, Diverged


@pytest.fixture
def qwen_folder(tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def gradient_of(trainer, sequences, tokens_per_microbatch):
    return step_gradient(trainer, pack(sequences, tokens_per_microbatch))


def test_sft_gradient_equals_transformers(place, qwen_folder):
    """Token mean over sequences of different lengths, as one backward pass of the reference."""
    sequences = random_sequences()
    grads, metrics = gradient_of(make_trainer(place, qwen_folder, sft_loss), sequences, 64)
    reference = make_reference("qwen3")
    total, count = 0.0, 0
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        logp = torch.log_softmax(reference(ids[None]).logits[0].double(), -1)
        for i in range(1, len(ids)):
            if sequence.loss_mask[i]:
                total, count = total - logp[i - 1, ids[i]], count + 1
    (total / count).backward()
    assert metrics["loss/loss"] == pytest.approx((total / count).item(), rel=1e-5)
    expected = reference.model.embed_tokens.weight.grad
    assert (grads["embedding"] - expected).abs().max() <= 1e-5 * expected.abs().max()
    expected = reference.model.layers[1].mlp.down_proj.weight.grad
    assert (grads["blocks.1.mlp.down"] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("budget", [40, 100, 10**6])
def test_gradient_does_not_depend_on_the_cut(place, qwen_folder, budget):
    sequences = random_sequences()
    whole, whole_metrics = gradient_of(make_trainer(place, qwen_folder), sequences, 10**6)
    cut, cut_metrics = gradient_of(make_trainer(place, qwen_folder), sequences[::-1], budget)
    same(cut, whole)
    for name in ("loss/loss", "loss/grad_norm", "mismatch/logprob_max", "loss/entropy"):
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4)


@pytest.mark.parametrize(
    "loss", [PPO, PolicyLoss(LossOptions(loss="gspo")), PolicyLoss(LossOptions(loss="kimi"))]
)
def test_idle_microbatches_add_nothing(place, qwen_folder, loss):
    """The micro-batches of all ranks, as one rank would add them up; three of twelve are idle."""
    sequences = random_sequences()
    batch = pack(sequences, 10**6, num_shards=12)
    assert [micro.num_sequences for micro in batch].count(0) == 3
    grads, metrics = step_gradient(make_trainer(place, qwen_folder, loss), batch)
    whole, whole_metrics = gradient_of(make_trainer(place, qwen_folder, loss), sequences, 10**6)
    same(grads, whole)
    assert metrics["loss/loss"] == pytest.approx(whole_metrics["loss/loss"], rel=1e-5)


def test_what_is_masked_changes_nothing(place, qwen_folder):
    sequences = random_sequences()
    changed = copy.deepcopy(sequences)
    for sequence in changed:
        for i, is_learned in enumerate(sequence.loss_mask):
            if not is_learned:
                sequence.logprobs[i] = 100.0
                sequence.advantages[i] = 100.0
    # Context after the last learned token is not attended to by anything that is learned.
    changed[0].token_ids += [3, 4, 5]
    changed[0].loss_mask += [False] * 3
    changed[0].logprobs += [100.0] * 3
    changed[0].advantages += [100.0] * 3
    grads, _ = gradient_of(make_trainer(place, qwen_folder), sequences, 10**6)
    again, _ = gradient_of(make_trainer(place, qwen_folder), changed, 10**6)
    same(again, grads)


def test_step_is_plain_adamw(place, qwen_folder):
    """Three steps against the same model in plain torch, without sharding."""
    sequences = random_sequences()
    trainer = make_trainer(
        place,
        qwen_folder,
        max_grad_norm=0.5,
        weight_decay=0.1,
        betas=(0.8, 0.95),
        schedule=Schedule(lr=1e-3, warmup_steps=1),
    )
    model = load_model(qwen_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95))
    for step in range(3):
        trainer.step(pack(sequences, 64))
        (micro,) = pack(sequences, 10**6)
        logprobs, entropy = model(
            micro.token_ids_T, micro.positions_T, micro.attention, micro.rows_R, micro.targets_R
        )
        losses, _ = PolicyLoss()(logprobs, entropy, micro)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 5e-4 if step == 0 else 1e-3
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in trainer.state().items():
        torch.testing.assert_close(
            parameter, model.get_parameter(name), rtol=1e-4, atol=2e-5
        )  # 1% of an update


def test_nonfinite_gradients_skip_the_step(place, qwen_folder):
    trainer = make_trainer(place, qwen_folder)
    before = copy.deepcopy(trainer.state())
    broken = random_sequences()
    broken[0].advantages = [float("nan")] * len(broken[0].token_ids)
    assert trainer.step(pack(broken, 10**6))["loss/skipped_steps"] == 1
    assert same_state(trainer.state(), before)
    assert trainer.step(pack(random_sequences(), 10**6))["loss/skipped_steps"] == 0
    assert not same_state(trainer.state(), before)
    before = copy.deepcopy(trainer.state())
    for _ in range(MAX_SKIPPED - 1):
        trainer.step(pack(broken, 10**6))
    with pytest.raises(Diverged, match="gradient of the policy was not finite in 5 updates"):
        trainer.step(pack(broken, 10**6))
    assert same_state(trainer.state(), before)


def test_sequences_beyond_the_models_positions_are_refused(place, qwen_folder):
    long = TrainingSequence(token_ids=[1] * 600, loss_mask=[True] * 600)
    with pytest.raises(ValueError, match=r"599 tokens.*512 positions"):
        make_trainer(place, qwen_folder, sft_loss).step(pack([long], 1000))


def test_logprobs_leave_the_trainer_ready_to_train(place, qwen_folder):
    trainer = make_trainer(place, qwen_folder, PolicyLoss(LossOptions.of(clip_low=0.1)))
    batch = pack(random_sequences(), 64)
    logprobs = trainer.logprobs(batch)
    assert [len(x) for x in logprobs] == [len(micro.rows_R) for micro in batch]
    trainer.step(batch)
    assert not torch.equal(trainer.logprobs(batch)[0], logprobs[0])


def test_saved_models_start_where_training_ended(place, qwen_folder, tmp_path):
    trainer = make_trainer(place, qwen_folder)
    trainer.step(pack(random_sequences(), 10**6))
    saved = load_model(trainer.export(tmp_path / "saved"))
    assert same_state(dict(saved.named_parameters()), trainer.state())


# ---- memory


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_computes_again_and_changes_nothing(place, qwen_folder, monkeypatch, mode):
    calls = Counter()
    for operator in ("linear", "rms_norm"):
        function = getattr(torch.nn.functional, operator)

        def counted(*args, function=function, operator=operator):
            calls[operator] += 1
            return function(*args)

        monkeypatch.setattr(torch.nn.functional, operator, counted)
    sequences = random_sequences()
    kept, _ = gradient_of(make_trainer(place, qwen_folder), sequences, 10**6)
    without = calls.copy()
    calls.clear()
    again, _ = gradient_of(make_trainer(place, qwen_folder, checkpointing=mode), sequences, 10**6)
    same(again, kept)
    assert calls["rms_norm"] > without["rms_norm"]
    assert calls["linear"] > without["linear"]  # selective ones are called, but do not compute


def test_selective_checkpointing_keeps_products(place, qwen_folder):
    (micro,) = pack(random_sequences(), 10**6)
    flops = {}
    for mode in ("none", "selective", "full"):
        trainer = make_trainer(place, qwen_folder, checkpointing=mode)
        loss = trainer._forward(micro, micro.targets_R)[0].sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[mode] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_cuda_gradient_is_near_the_exact_one(qwen_folder, mode):
    sequences = random_sequences(num=40, longest=200)
    grads = {}
    for device in ("cpu", "cuda"):
        with start_alone(device) as place:
            trainer = make_trainer(place, qwen_folder, sft_loss, checkpointing=mode)
            found, _ = gradient_of(trainer, sequences, 4096)
            grads[device] = {name: grad.cpu() for name, grad in found.items()}
    for name, exact in grads["cpu"].items():
        assert (grads["cuda"][name] - exact).norm() < 0.03 * exact.norm(), name


def test_metrics_of_several_updates_are_one():
    updates = [
        {
            "loss/loss": 1.0, "policy/ratio_max": 4.0, "time/train": 2.0, "loss/skipped_steps": 1.0,
            "mismatch/k3": 0.1, "mismatch/logprob_max": 0.2, "train/tokens": 5.0,
        },
        {
            "loss/loss": 2.0, "policy/ratio_max": 3.0, "time/train": 5.0, "loss/skipped_steps": 1.0,
            "mismatch/k3": 0.3, "mismatch/logprob_max": 0.4, "train/tokens": 6.0,
        },
    ]  # fmt: skip
    assert combine(updates) == {
        "loss/loss": 1.5, "policy/ratio_max": 4.0, "time/train": 7.0, "loss/skipped_steps": 2.0,
        "mismatch/k3": 0.1, "mismatch/logprob_max": 0.2, "train/tokens": 11.0,
    }  # fmt: skip
    assert combine([]) == {}


# ---- after something went wrong


def test_a_step_that_raised_leaves_no_gradient_behind(place, qwen_folder):
    good = pack(random_sequences(), 10**6)
    long = TrainingSequence(
        token_ids=[1] * 600, loss_mask=[True] * 600, logprobs=[-1.0] * 600, advantages=[1.0] * 600
    )
    trainer = make_trainer(place, qwen_folder)
    expected = make_trainer(place, qwen_folder).step(good)["loss/grad_norm"]
    with pytest.raises(ValueError, match="512 positions"):
        trainer.step([*good, *pack([long], 1000)])
    with pytest.raises(ValueError, match="512 positions"):
        trainer.logprobs(pack([long], 1000))
    assert trainer.step(good)["loss/grad_norm"] == pytest.approx(expected, rel=1e-6)
    trainer.state()
