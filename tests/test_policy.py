"""Options of a run that trains a policy: which losses, advantages and filters fit together."""

import json
import re
from dataclasses import replace

import pytest
from support.runs import toy_options
from support.training_data import make_groups, make_sample

from roll_lite import data
from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.options import from_flat
from roll_lite.recipes import agentic, distill, dpo, evaluate, rlvr, sft
from roll_lite.train.advantages import (
    ADVANTAGES,
    AdvantageFacts,
    AdvantageOptions,
    PerSample,
    PerToken,
    PerTurn,
)
from roll_lite.train.losses import LOSSES, LossFacts, LossOptions
from roll_lite.train.sample_rows import with_advantages
from roll_lite.types import Group, TurnResult, has_equal_rewards


def config(toy_folder, **changes):
    return from_flat(rlvr.Config, **toy_options(toy_folder, "no-such-run") | changes)


def of_games(toy_folder, **changes):
    options = toy_options(toy_folder, "no-such-run", data=("frozen_lake",)) | changes
    return from_flat(agentic.Config, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "gspo", "advantage": "gae"},
        {"loss": "kimi", "advantage": "reinforce", "gamma": 0.9},
        {"loss": "topr", "advantage": "reinforce", "kl_coef": 0.1, "kl_in": "reward"},
    ],
)
def test_losses_of_sequences_refuse_advantages_of_tokens(toy_folder, changes):
    with pytest.raises(UserError, match="has one advantage per sequence"):
        config(toy_folder, **changes)
    config(toy_folder, **changes | {"loss": "ppo"})


def test_losses_of_sequences_take_whole_returns(toy_folder):
    config(toy_folder, loss="gspo", advantage="reinforce")
    config(toy_folder, loss="kimi", advantage="reinforce++")


def test_a_loss_of_ones_own_says_that_it_is_of_sequences(toy_folder, monkeypatch):
    @LossFacts(by_sequence=True, aggregation="seq_mean_token_mean")
    def mine(logprobs_R, delta_R, advantages_R, batch):
        return -advantages_R * logprobs_R

    monkeypatch.setitem(LOSSES, "mine", mine)
    with pytest.raises(UserError, match="loss='mine' has one advantage per sequence"):
        config(toy_folder, loss="mine", advantage="gae")
    options = config(toy_folder, loss="mine").policy_loss
    assert options.pack_options == {
        "aggregation": "seq_mean_token_mean", "constant": None, "by_sample": True,
    }  # fmt: skip
    assert LossOptions(loss="reinforce").pack_options["by_sample"] is False


# ---- what the loop knows of an estimator of one's own


def by_turn(turn_rewards, groups_S) -> PerTurn:
    return turn_rewards


def by_token(rewards_R, groups_S) -> PerToken:
    return rewards_R


def by_sample(rewards_S, groups_S, *, alone: bool = False) -> PerSample:
    return rewards_S


def alone_by_token(rewards_R) -> PerToken:
    return rewards_R


@pytest.mark.parametrize("estimator", [by_turn, by_token, by_sample])
def test_an_estimator_of_ones_own_that_reads_groups_needs_two(toy_folder, monkeypatch, estimator):
    monkeypatch.setitem(ADVANTAGES, "mine", estimator)
    cfg = of_games(toy_folder, advantage="mine", samples_per_prompt=2)
    assert cfg.min_samples == 2
    with pytest.raises(UserError, match="samples_per_prompt=1 must be at least 2"):
        of_games(toy_folder, advantage="mine", samples_per_prompt=1)


def test_an_estimator_that_reads_no_groups_takes_single_samples(toy_folder, monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", alone_by_token)
    one = {"advantage": "mine", "samples_per_prompt": 1}
    assert of_games(toy_folder, **one).min_samples == 1
    # The normalisation of its rewards compares them all the same.
    with pytest.raises(UserError, match="samples_per_prompt=1 must be at least 2"):
        of_games(toy_folder, **one, reward_norm="group")


def test_facts_above_an_estimator_may_depend_on_its_options(toy_folder, monkeypatch):
    facts = AdvantageFacts(compares_group=lambda alone: not alone, whitened=True)
    monkeypatch.setattr(by_sample, "facts", facts, raising=False)
    monkeypatch.setitem(ADVANTAGES, "mine", by_sample)
    one = {"advantage": "mine", "samples_per_prompt": 1}
    assert of_games(toy_folder, **one, alone=True).min_samples == 1
    with pytest.raises(UserError, match="samples_per_prompt=1 must be at least 2"):
        of_games(toy_folder, **one)
    assert AdvantageOptions(advantage="mine").is_whitened


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("grpo", 2), ("rloo", 2), ("lite_ppo", 2), ("gigpo", 2), ("reinforce", 1),
        ("reinforce++", 1), ("gae", 1), ("agentic_reinforce", 1), ("opd", 1),
    ],
)  # fmt: skip
def test_built_in_estimators_that_compare_samples_need_two(name, size):
    options = AdvantageOptions(advantage=name)
    assert options.compares_samples == (size == 2)
    if name == "reinforce":
        assert AdvantageOptions.of(advantage=name, baseline="group").compares_samples


# ---- groups from which nothing is learnt


@pytest.mark.parametrize("advantage", ["agentic_reinforce", "gae", "reinforce", "reinforce++"])
def test_equal_groups_are_kept_where_they_teach_something(toy_folder, advantage):
    with pytest.raises(UserError, match=f"drop_equal=True with advantage='{re.escape(advantage)}'"):
        of_games(toy_folder, advantage=advantage, drop_equal=True)
    assert of_games(toy_folder, advantage=advantage).advantages.nothing_to_learn is None


@pytest.mark.parametrize("estimator", [by_turn, by_token])
def test_of_ones_own_turns_and_tokens_it_is_not_known(toy_folder, monkeypatch, estimator):
    monkeypatch.setitem(ADVANTAGES, "mine", estimator)
    with pytest.raises(UserError, match="drop_equal=True with advantage='mine'"):
        of_games(toy_folder, advantage="mine", drop_equal=True)
    monkeypatch.setattr(
        estimator, "facts", AdvantageFacts(nothing_to_learn=has_equal_rewards), raising=False
    )
    of_games(toy_folder, advantage="mine", drop_equal=True)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "lite_ppo"])
def test_estimators_that_compare_rewards_learn_nothing_from_equal_ones(toy_folder, advantage):
    cfg = config(toy_folder, advantage=advantage, drop_equal=True)
    equal, different = make_groups([[1.0, 1.0], [1.0, 0.0]])
    assert cfg.advantages.nothing_to_learn(equal)
    assert not cfg.advantages.nothing_to_learn(different)


def episodes(*rewards):
    """A group with an episode for each list of its turns' rewards."""
    samples = []
    for i, turns in enumerate(rewards):
        sample = make_sample(float(sum(turns)), num_turns=len(turns), index=i)
        for turn, reward in zip(sample.turns, turns, strict=True):
            turn.result = TurnResult(reward=reward)
        samples.append(sample)
    return Group(prompt=samples[0].prompt, samples=samples)


def test_gigpo_learns_from_episodes_that_win_at_different_turns(toy_folder):
    advantages = of_games(toy_folder, advantage="gigpo", drop_equal=True).advantages
    won = episodes([0, 1], [0, 0, 0, 0, 1])
    assert has_equal_rewards(won) and not advantages.nothing_to_learn(won)
    for sample in won.samples:
        for number, turn in enumerate(sample.turns):
            turn.state = number  # both begin with the same: the quicker one is ahead
    found = [a for s in with_advantages([won], advantages) for a in s.advantages if a]
    assert max(found) > 0 > min(found)

    lost = episodes([0, 0], [0, 0, 0, 0, 0])
    assert advantages.nothing_to_learn(lost)
    for sample in lost.samples:
        for turn in sample.turns:
            turn.state = "same"
    assert not any(a for s in with_advantages([lost], advantages) for a in s.advantages)


def test_gigpo_compares_the_rewards_of_questions(toy_folder):
    """Beside environments in data; the reward of a reply is not that of a turn's result."""
    advantages = of_games(toy_folder, advantage="gigpo", drop_equal=True).advantages
    equal, different = make_groups([[1.0, 1.0], [1.0, 0.0]])
    for group in (equal, different):
        group.prompt = replace(group.prompt, messages=({"role": "user", "content": "?"},))
    assert advantages.nothing_to_learn(equal)
    assert not advantages.nothing_to_learn(different)


@pytest.mark.parametrize("recipe", [rlvr, sft, dpo, distill, evaluate])
def test_columns_are_of_files(recipe, toy_folder, tmp_path):
    options = {"model": str(toy_folder), "columns": ("prompt=question",)}
    options |= {"teacher": str(toy_folder)} if recipe is distill else {}
    options |= {"max_tokens": 4} if recipe in (rlvr, evaluate) else {}

    def make(source, eval_source=None):
        chosen = {"data": source, "eval_data": eval_source}
        if recipe in (rlvr, evaluate):
            chosen = {name: (value,) for name, value in chosen.items() if value}
        return from_flat(recipe.Config, **options, **{n: v for n, v in chosen.items() if v})

    path = str(tmp_path / "rows.jsonl")
    make(path)
    refused = r"columns=\('prompt=question',\) is only read with a file in data.*leave it at \(\)"
    with pytest.raises(UserError, match=refused):
        make("reverse:2")
    if recipe is not evaluate:
        make("reverse:2", path)
        with pytest.raises(UserError, match=refused):
            make("reverse:2", "reverse:3")


def test_a_file_is_read_once_for_training_and_evaluation(toy_folder, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Reverse {a}{b}", "domain": "reverse"} for a in "abcd" for b in "abcd"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources, read = [], data.read_prompts

    def reading(source, *args):
        sources.append(source)
        return read(source, *args)

    monkeypatch.setattr(data, "read_prompts", reading)
    cfg = config(toy_folder, data=(str(path),), eval_share=0.5)
    prompts, held_out = rlvr.read_prompts(cfg, Chat(toy_folder), 128)
    assert sources == [str(path)]
    assert len(prompts.rows) + len(held_out) == len(rows) and prompts.rows and held_out
