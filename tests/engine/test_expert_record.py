"""What the engine records of experts, against the routers of transformers on whole sequences."""

import copy
from itertools import chain

import pytest
import torch
from support.mixtures import make_mixture, routed

from roll_lite.checks import UserError
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.models.hf import load_model
from roll_lite.models.transformer import Transformer
from roll_lite.types import SamplingParams

PARAMS = SamplingParams(max_tokens=15)
PROMPTS = [[5, 6, 7], [9] * 11, [*range(20, 33)], [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    return make_mixture(folder), load_model(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    return make_mixture(folder, seed=1), load_model(folder)


def engine_with(model, num_pages=200, page_size=4, **options):
    config = model.config
    page = config.num_layers * 2 * page_size * config.num_kv_heads * config.head_dim * 4
    gib = (num_pages + 0.5) * page / 2**30
    return Engine(model, kv_cache_gib=gib, page_size=page_size, records_experts=True, **options)


def recorded(turn):
    """(tokens, sparse layers, K)"""
    rows = torch.tensor(list(turn.experts))
    return rows.view(len(turn.prompt_ids) + len(turn.token_ids) - 1, 2, 3)


def assert_recorded(reference, turns):
    for turn in turns:
        expected = routed(reference, (turn.prompt_ids + turn.token_ids)[:-1])
        assert torch.equal(recorded(turn), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"burst": 5, "launch_ahead": True},
        {"max_prefill_tokens": 6},  # prompts in chunks
        {"num_pages": 26},  # preemption
        {"page_size": 64},
    ],
)
def test_samples_of_shared_prompts_have_the_experts_that_routers_choose(mixture, options):
    reference, model = mixture
    engine = engine_with(copy.deepcopy(model), **options)
    requests = [
        Request(prompt_ids=ids, params=PARAMS, num_samples=3, seed=seed)
        for seed, ids in enumerate(PROMPTS)
    ]
    turns = list(chain.from_iterable(engine.generate(requests)))
    assert_recorded(reference, turns)
    assert (engine.scheduler.num_preempted > 0) == ("num_pages" in options)
    distinct = {tuple(row.flatten().tolist()) for turn in turns for row in recorded(turn)}
    assert len(distinct) > 50  # it is not one choice for all


def test_a_later_turn_has_the_experts_of_the_whole_conversation(mixture):
    """Most of it comes from pages that the first turn left."""
    reference, model = mixture
    engine = engine_with(copy.deepcopy(model))
    [[first]] = engine.generate([Request(prompt_ids=PROMPTS[1], params=PARAMS)])
    read = [*first.prompt_ids, *first.token_ids, 40, 41]
    [turns] = engine.generate([Request(prompt_ids=read, params=PARAMS, num_samples=2, seed=3)])
    assert engine.scheduler.num_reused_tokens >= 20
    assert_recorded(reference, [first, *turns])


def test_a_reply_that_a_stop_text_cuts_has_those_of_what_is_left(mixture):
    reference, model = mixture
    engine = engine_with(copy.deepcopy(model), burst=7, decode=lambda ids: "".join(map(chr, ids)))
    [[whole]] = engine.generate([Request(prompt_ids=PROMPTS[0], params=PARAMS)])
    params = SamplingParams(max_tokens=15, stop=(chr(whole.token_ids[9]),))
    [[cut]] = engine.generate([Request(prompt_ids=PROMPTS[0], params=params)])
    assert len(cut.token_ids) <= 10 and cut.finish_reason == "stop"
    assert_recorded(reference, [cut])


@pytest.mark.parametrize("sleeps", [False, True])
def test_tokens_are_recorded_anew_under_new_weights(mixture, other, sleeps):
    """Tokens that were read under the old weights are read again, so the last reading counts."""
    reference, model = mixture
    engine = engine_with(copy.deepcopy(model), burst=3)
    handles = [
        engine.submit(Request(prompt_ids=ids, params=PARAMS, num_samples=2, seed=1))
        for ids in PROMPTS
    ]
    for _ in range(5):
        engine.step()
    if sleeps:
        engine.sleep()
        engine.wake()
    engine.load_weights(list(other[1].named_parameters()), policy_version=1)
    while not all(handle.is_done for handle in handles):
        engine.step()
    turns = [turn for handle in handles for turn in handle.turns]
    assert all([version for _, version in turn.versions] == [0, 1] for turn in turns)
    assert_recorded(other[0], turns)
    turn = turns[0]
    old = routed(reference, (turn.prompt_ids + turn.token_ids)[:-1])
    assert (recorded(turn) != old).float().mean() > 0.5


def test_nothing_is_recorded_where_it_is_not_asked_for(mixture):
    engine = Engine(copy.deepcopy(mixture[1]), kv_cache_gib=0.01)
    [[turn]] = engine.generate([Request(prompt_ids=[5, 6], params=PARAMS)])
    assert turn.experts == b""


def test_samples_that_are_aborted_have_no_record(mixture):
    engine = engine_with(copy.deepcopy(mixture[1]))
    handle = engine.submit(Request(prompt_ids=[5, 6], params=PARAMS))
    for _ in range(4):
        engine.step()
    engine.abort(handle.id)
    assert handle.turns[0].finish_reason == "abort" and handle.turns[0].experts == b""


def test_models_that_cannot_be_recorded_are_refused(mixture, tmp_path):
    make_mixture(tmp_path, num_experts=257, num_hidden_layers=1, mlp_only_layers=[])
    with pytest.raises(UserError, match=r"at most 256 .* num_experts=257; use router=own"):
        engine_with(load_model(tmp_path))
    config = mixture[1].config
    dense = type(config)(**{n: getattr(config, n) for n in config.__slots__} | {"experts": None})
    with pytest.raises(UserError, match=r"records_experts=True, but the model has no experts"):
        engine_with(Transformer(dense))
