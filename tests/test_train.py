"""Packing, advantages, losses and the trainer against formulas and plain torch."""

import copy
import math
import statistics
from functools import partial

import pytest
import torch
from conftest import make_reference

from roll_lite.models.hf import load_model
from roll_lite.sync import same_bits, sync_weights
from roll_lite.train.advantages import grpo, with_advantages
from roll_lite.train.losses import ppo_loss, sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.packing import TrainingSequence, pack
from roll_lite.train.trainer import Trainer
from roll_lite.types import Group, Prompt, Sample, Score, Turn


def random_sequences(num=9, seed=0, longest=40):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    sequences = []
    for length in draw(3, longest, num):
        prompt = draw(1, length, 1)[0]
        sequences.append(
            TrainingSequence(
                token_ids=draw(0, 199, length),
                loss_mask=[i >= prompt for i in range(length)],
                logprobs=(-5 * torch.rand(length, generator=generator)).tolist(),
                advantage=torch.randn((), generator=generator).item(),
            )
        )
    return sequences


# ---- advantages


def test_grpo_is_the_papers_formula():
    rewards = [0.0, 1.0, 0.0, 0.5, 1.0]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert grpo(rewards) == pytest.approx([(r - mean) / std for r in rewards], rel=1e-5)
    assert grpo(rewards, divide_by_std=False) == pytest.approx([r - mean for r in rewards])


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0, 0.0], [0.3] * 7])
def test_groups_without_a_difference_teach_nothing(rewards):
    assert grpo(rewards) == [0.0] * len(rewards)
    assert grpo(rewards, divide_by_std=False) == pytest.approx([0.0] * len(rewards))


def test_samples_keep_their_tokens_and_get_their_groups_advantage():
    prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
    samples = []
    for index, reward in enumerate([0.0, 1.0]):
        sample = Sample(prompt=prompt, index=index, score=Score(value=reward))
        for start in (0, 5):  # two turns, the second reads two tokens more
            sample.add_turn(
                Turn(
                    prompt_ids=[*sample.token_ids, start, start + 1],
                    token_ids=[7, 8, 9],
                    logprobs=[-0.1, -0.2, -0.3],
                    finish_reason="stop",
                    versions=[(0, 0)],
                )
            )
        samples.append(sample)
    low, high = with_advantages([Group(prompt=prompt, samples=samples)])
    assert low.advantage == pytest.approx(-(0.5**0.5), rel=1e-5)
    assert high.advantage == -low.advantage
    assert low.token_ids == [0, 1, 7, 8, 9, 5, 6, 7, 8, 9]
    assert [int(m) for m in low.loss_mask] == [0, 0, 1, 1, 1] * 2
    assert low.logprobs == [0, 0, -0.1, -0.2, -0.3] * 2


# ---- packing


def test_packing_keeps_every_row_once():
    sequences = random_sequences(30)
    batch = pack(sequences, 64)
    assert all(len(micro.token_ids_T) <= 64 for micro in batch)
    assert sum(len(micro.token_ids_T) for micro in batch) == sum(
        len(s.token_ids) - 1 for s in sequences
    )
    rows = sorted(
        (target, round(logprob, 5), round(advantage, 5))
        for micro in batch
        for target, logprob, advantage in zip(
            micro.targets_R.tolist(),
            micro.logprobs_R.tolist(),
            micro.advantages_R.tolist(),
            strict=True,
        )
    )
    expected = sorted(
        (s.token_ids[i], round(s.logprobs[i], 5), round(s.advantage, 5))
        for s in sequences
        for i in range(1, len(s.token_ids))
        if s.loss_mask[i]
    )
    assert [r[0] for r in rows] == [e[0] for e in expected]
    assert [r[1:] for r in rows] == [pytest.approx(e[1:], abs=2e-5) for e in expected]
    assert sum(micro.weights_R.sum().item() for micro in batch) == pytest.approx(1.0)


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"tokens_per_microbatch=10"):
        pack(random_sequences(), 10)


def test_a_batch_without_loss_is_refused():
    with pytest.raises(ValueError, match="no token"):
        pack([TrainingSequence(token_ids=[1, 2, 3], loss_mask=[True, False, False])], 10)


# ---- losses


def test_ppo_is_the_papers_formula_in_float64():
    (micro,) = pack(random_sequences(), 10**6)
    torch.manual_seed(0)
    logprobs = (micro.logprobs_R + 0.4 * torch.randn_like(micro.logprobs_R)).requires_grad_()
    losses, measured = ppo_loss(
        logprobs, torch.zeros_like(logprobs), micro, clip_low=0.2, clip_high=0.28
    )
    losses.sum().backward()
    rows = zip(
        logprobs.tolist(), micro.logprobs_R.tolist(), micro.advantages_R.tolist(), strict=True
    )
    for r, (new, old, advantage) in enumerate(rows):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 0.8), 1.28)
        assert losses[r].item() == pytest.approx(
            -min(ratio * advantage, clipped * advantage), rel=1e-5
        )
        is_clipped = clipped * advantage < ratio * advantage
        slope = 0.0 if is_clipped else -ratio * advantage
        assert logprobs.grad[r].item() == pytest.approx(slope, rel=1e-5)
        assert bool(measured["loss/clip_fraction"][r]) == is_clipped
        assert measured["mismatch/k3"][r].item() == pytest.approx(ratio - 1 - (new - old), abs=1e-5)
    assert 0 < measured["loss/clip_fraction"].mean() < 1


# ---- the trainer


@pytest.fixture
def qwen_folder(tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def make_trainer(place, folder, loss=ppo_loss, **options):
    options = {"schedule": Schedule(lr=1e-3), "max_grad_norm": 1e9} | options
    return Trainer(folder, place=place, loss=loss, **options)


def gradient_of(trainer, sequences, tokens_per_microbatch):
    """The gradient that step() would use, caught before the optimizer takes it."""
    grads = {}
    update = trainer.optimizer.step

    def catch(lr):
        for name, parameter in trainer.model.named_parameters():
            grads[name] = parameter.grad.full_tensor().clone()
        update(lr)

    trainer.optimizer.step = catch
    metrics = trainer.step(pack(sequences, tokens_per_microbatch))
    trainer.optimizer.step = update
    return grads, metrics


def same(a, b, tolerance=1e-5):
    for name in a:
        scale = b[name].abs().max()
        assert (a[name] - b[name]).abs().max() <= tolerance * scale + 1e-9, name


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


def test_what_is_masked_changes_nothing(place, qwen_folder):
    sequences = random_sequences()
    changed = copy.deepcopy(sequences)
    for sequence in changed:
        for i, is_learned in enumerate(sequence.loss_mask):
            if not is_learned:
                sequence.logprobs[i] = 100.0
    # Context after the last learned token is not attended to by anything that is learned.
    changed[0].token_ids += [3, 4, 5]
    changed[0].loss_mask += [False] * 3
    changed[0].logprobs += [100.0] * 3
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
        schedule=Schedule(lr=1e-3, warmup_steps=1),
    )
    model = load_model(qwen_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        trainer.step(pack(sequences, 64))
        (micro,) = pack(sequences, 10**6)
        logprobs, entropy = model(
            micro.token_ids_T, micro.positions_T, micro.attention, micro.rows_R, micro.targets_R
        )
        losses, _ = ppo_loss(logprobs, entropy, micro)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 5e-4 if step == 0 else 1e-3
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in trainer.state().items():
        torch.testing.assert_close(
            parameter, model.get_parameter(name), rtol=1e-4, atol=2e-5
        )  # 1% of an update


def same_state(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def test_nonfinite_gradients_skip_the_step(place, qwen_folder):
    trainer = make_trainer(place, qwen_folder)
    before = copy.deepcopy(trainer.state())
    broken = random_sequences()
    broken[0].advantage = float("nan")
    assert trainer.step(pack(broken, 10**6))["loss/skipped_steps"] == 1
    assert same_state(trainer.state(), before)
    assert trainer.step(pack(random_sequences(), 10**6))["loss/skipped_steps"] == 0
    assert not same_state(trainer.state(), before)


def test_sequences_beyond_the_models_positions_are_refused(place, qwen_folder):
    long = TrainingSequence(token_ids=[1] * 600, loss_mask=[True] * 600)
    with pytest.raises(ValueError, match=r"599 tokens.*512 positions"):
        make_trainer(place, qwen_folder, sft_loss).step(pack([long], 1000))


def test_logprobs_leave_the_trainer_ready_to_train(place, qwen_folder):
    trainer = make_trainer(place, qwen_folder, partial(ppo_loss, clip_low=0.1))
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


# ---- sync


class BrokenEngine:
    """Loses one bit of one weight."""

    def __init__(self, model):
        self.model = model

    def load_weights(self, weights, version):
        with torch.no_grad():
            for name, tensor in weights:
                self.model.get_parameter(name).copy_(tensor)
            self.model.norm.weight.view(torch.int32)[3] += 1


def test_a_sync_that_corrupts_a_bit_is_an_error(place, qwen_folder):
    trainer = make_trainer(place, qwen_folder)
    with pytest.raises(RuntimeError, match=r"does not hold what was sent for norm\.weight"):
        sync_weights(trainer, BrokenEngine(load_model(qwen_folder)))
