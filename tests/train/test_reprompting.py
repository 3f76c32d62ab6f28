"""Replies after other prompts: tokens by hand, logprobs against transformers."""

import pytest
import torch
from support.models import make_reference
from support.training_data import make_groups, make_sample

from roll_lite.cluster.cluster import Cluster
from roll_lite.roles import Roles
from roll_lite.train.advantages import ADVANTAGES, AdvantageOptions, PerToken
from roll_lite.train.losses import PolicyLoss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.reprompting import at_sampled_places, reprompted_sequences
from roll_lite.train.sample_rows import ModelScores, Rows
from roll_lite.train.scorer import Scorer
from roll_lite.train.trainer import Trainer
from roll_lite.types import Group, Prompt, Turn

OTHER = [90, 91, 92, 93]  # what the chat below says to the prompts that have another one


class OtherChat:
    def encode(self, messages):
        return [int(message["content"]) for message in messages]


def messages_of(prompt):
    """p0 has no other prompt."""
    return None if prompt.id == "p0" else tuple({"content": str(i)} for i in OTHER)


def reprompted(groups, reprompt=messages_of, longest=100):
    return reprompted_sequences(groups, OtherChat(), reprompt, longest)


def test_only_the_first_prompt_is_replaced():
    groups = make_groups([[1.0], [0.0, 1.0]], num_turns=2)
    none, short, long = reprompted(groups)
    assert none is None
    # Each turn reads two tokens; samples 0 and 1 of the group then write three and four.
    assert short.token_ids == [*OTHER, 7, 8, 9, 5, 6, 7, 8, 9]
    assert [int(x) for x in short.loss_mask] == [0] * 4 + [1] * 3 + [0] * 2 + [1] * 3
    assert long.token_ids == [*OTHER, 7, 8, 9, 10, 5, 6, 7, 8, 9, 10]
    assert (short.sample, long.sample) == (1, 2)


@pytest.mark.parametrize("num_other", [1, 2, 6])
def test_numbers_come_back_to_the_sampled_places(num_other):
    (sample,) = make_groups([[0.0]], num_turns=2)[0].samples
    (sequence,) = sample.sequences
    numbers = [0.0] * num_other + [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0]
    expected = [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -3.0, -4.0]
    assert at_sampled_places(numbers, sequence) == expected


def test_a_sequence_with_another_beginning_is_refused():
    sample = make_sample(1.0, prompt_id="p1")
    turn = {"logprobs": [-1.0], "finish_reason": "stop", "versions": [(0, 0)]}
    sample.add_turn(Turn(prompt_ids=[0, 1, 8, 9], token_ids=[3], **turn))  # as first thoughts drop
    group = Group(
        prompt=Prompt(id="p1", messages=(), domain="d", ground_truth=""), samples=[sample]
    )
    assert reprompted([group])[1].token_ids == [*OTHER, 8, 9, 3]
    sample.add_turn(Turn(prompt_ids=[8, 9], token_ids=[3], **turn))
    with pytest.raises(ValueError, match=r"sample 0 of prompt p1 .*leave out history"):
        reprompted([group])


def test_what_is_missing_or_too_long_is_named():
    groups = make_groups([[1.0], [0.0, 1.0]])
    assert len(reprompted(groups, longest=7)[-1].token_ids) == 8
    message = (
        r"1 seq.*sample 1 of prompt p1 has 7 tokens .* over the 6 that .*shorten what reprompt"
    )
    with pytest.warns(UserWarning, match=message):
        found = reprompted(groups, longest=6)
    assert found[-1] is None and found[:2] == reprompted(groups, longest=7)[:2]
    with pytest.raises(ValueError, match=r"reprompt=None.*AdvantageFacts\(reprompt="):
        reprompted(groups, reprompt=None)


@torch.no_grad()
def logprobs_after(model, prompt_ids, sample):
    """Of the sampled tokens, after a prompt; 0 on what was read."""
    tail = sample.token_ids[len(sample.turns[0].prompt_ids) :]
    ids = torch.tensor(prompt_ids + tail)
    logp = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
    found = [logp[i - 1, ids[i]].item() for i in range(len(prompt_ids), len(ids))]
    mask = sample.loss_mask[-len(tail) :]
    own = [p if is_sampled else 0.0 for p, is_sampled in zip(found, mask, strict=True)]
    return [0.0] * (len(sample.token_ids) - len(tail)) + own


def test_scores_are_transformers_of_the_policy_or_a_teacher(tmp_path):
    models = {name: make_reference("qwen3", seed) for seed, name in enumerate(("mine", "taught"))}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    groups = make_groups([[0.0, 1.0], [0.0, 1.0], [0.0, 0.5]], num_turns=2)
    groups = [
        Group(
            prompt=Prompt(id=g.prompt.id, messages=(), domain=f"d{i}", ground_truth=""),
            samples=g.samples,
        )
        for i, g in enumerate(groups)
    ]
    with Cluster("train=0 teacher=0", "cpu") as cluster:
        roles = Roles(cluster, tokens_per_microbatch=64)
        options = {"loss": PolicyLoss(), "schedule": Schedule(lr=1e-3)}
        roles.policy = roles.add("train", Trainer, folder=tmp_path / "mine", **options)
        roles.teachers["d2"] = roles.add("teacher", Scorer, folder=tmp_path / "taught")
        arguments = groups, OtherChat(), messages_of
        mine = roles.score_reprompted("policy", *arguments)
        taught = roles.score_reprompted("teacher", *arguments)
        tight = Roles(cluster, tokens_per_microbatch=9)
        tight.policy = roles.policy
        with pytest.warns(UserWarning, match=r"sequences of this step .* over the 9 that"):
            short = tight.score_reprompted("policy", *arguments)
        assert short == [None] * len(mine)
    samples = [sample for group in groups for sample in group.samples]
    for i, sample in enumerate(samples):
        for found, name, first in ((mine[i], "mine", 2), (taught[i], "taught", 4)):
            expected = logprobs_after(models[name], OTHER, sample)
            assert found is None if i < first else found == pytest.approx(expected, abs=1e-4)


def test_an_estimator_reads_reprompted_logprobs(monkeypatch):
    def pull(reprompted_logprobs_R, logprobs_R) -> PerToken:
        return reprompted_logprobs_R - logprobs_R

    monkeypatch.setitem(ADVANTAGES, "pull", pull)
    options = AdvantageOptions(advantage="pull")
    groups = make_groups([[None, None]])
    samples = groups[0].samples
    scores = ModelScores(reprompted_logprobs=[None, [-0.3] * len(samples[1].token_ids)])
    with pytest.raises(ValueError, match="needs reprompted_logprobs; give ModelScores"):
        Rows(groups, options)
    with pytest.raises(ValueError, match="does not read reprompted_logprobs; leave out"):
        Rows(make_groups([[0.0, 1.0]]), AdvantageOptions(), scores)
    rows = Rows(groups, options, scores)
    first, second = rows.sequences(options.estimate(rows))
    assert not any(first.advantages)
    for i, is_sampled in enumerate(second.loss_mask):
        expected = -0.3 - second.logprobs[i] if is_sampled else 0.0
        assert second.advantages[i] == pytest.approx(expected)
