"""The engine against transformers' generate, the trainer's forward, and exact distributions."""

import copy
import random

import pytest
import torch
from conftest import make_reference

from roll_lite.engine.engine import Engine
from roll_lite.engine.sampler import gumbel, noise_key, sample
from roll_lite.engine.sequence import Request
from roll_lite.models.attention import PackedAttention
from roll_lite.models.hf import load_model
from roll_lite.types import SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def page_bytes(model, page_size):
    config = model.config
    return config.num_layers * 2 * page_size * config.num_kv_heads * config.head_dim * 4


def engine_with(model, *, num_pages, page_size=4, **options):
    gib = (num_pages + 0.5) * page_bytes(model, page_size) / 2**30
    return Engine(model, kv_cache_gib=gib, page_size=page_size, **options)


def prompts_of(lengths, seed=0):
    r = random.Random(seed)
    return [[r.randrange(1, 199) for _ in range(n)] for n in lengths]


def reference_greedy(reference, prompt, max_tokens, stop_ids=()):
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=list(stop_ids) or None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    reference = make_reference("qwen3")
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.mark.parametrize("burst", [1, 7])
def test_greedy_tokens_equal_transformers_for_every_family(family_folder, burst):
    reference, folder = family_folder
    model = load_model(folder)
    engine = engine_with(model, num_pages=200, burst=burst)
    prompts = prompts_of([1, 3, 4, 5, 17, 40])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY, num_samples=2) for p in prompts])
    for prompt, group in zip(prompts, turns, strict=True):
        expected = reference_greedy(reference, prompt, 24)
        assert [turn.token_ids for turn in group] == [expected, expected]
    assert engine.pool.num_free == engine.pool.num_pages


def test_logprobs_equal_the_trainers_forward(family_folder):
    _, folder = family_folder
    model = load_model(folder)
    engine = engine_with(model, num_pages=200)
    params = SamplingParams(max_tokens=20, temperature=0.8)
    requests = [
        Request(prompt_ids=p, params=params, num_samples=3, seed=i)
        for i, p in enumerate(prompts_of([2, 9, 31]))
    ]
    for turn in (turn for group in engine.generate(requests) for turn in group):
        ids = torch.tensor(turn.prompt_ids + turn.token_ids)
        attend = PackedAttention(torch.tensor([0, len(ids) - 1], dtype=torch.int32), len(ids) - 1)
        rows = torch.arange(len(turn.prompt_ids) - 1, len(ids) - 1)
        with torch.no_grad():
            expected, _ = model(
                ids[:-1], torch.arange(len(ids) - 1), attend, rows, ids[rows + 1], 0.8
            )
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("burst", [1, 5])
def test_preemption_changes_no_token(qwen, burst):
    reference, model = qwen
    engine = engine_with(
        model, num_pages=18, burst=burst
    )  # one sequence of 64 tokens and little more
    prompts = prompts_of([30, 12, 21, 40, 3])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY, num_samples=2) for p in prompts])
    assert engine.scheduler.num_preempted > 0
    for prompt, group in zip(prompts, turns, strict=True):
        expected = reference_greedy(reference, prompt, 24)
        assert [turn.token_ids for turn in group] == [expected, expected]
    assert engine.pool.num_free == engine.pool.num_pages


def test_limits_on_sequences_and_prefill_change_no_token(qwen):
    reference, model = qwen
    engine = engine_with(model, num_pages=300, max_num_seqs=3, max_prefill_tokens=8)
    prompts = prompts_of([7, 7, 30, 2])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY, num_samples=4) for p in prompts])
    for prompt, group in zip(prompts, turns, strict=True):
        expected = reference_greedy(reference, prompt, 24)
        assert all(turn.token_ids == expected for turn in group)


@pytest.mark.parametrize("burst", [1, 4, 16])
def test_stop_ids_end_the_turn_and_stay_in_it(qwen, burst):
    reference, model = qwen
    prompt = prompts_of([9])[0]
    free = reference_greedy(reference, prompt, 24)
    stop = free[10]
    params = SamplingParams(max_tokens=24, temperature=0.0, stop_ids=(stop,))
    ((turn,),) = engine_with(model, num_pages=50, burst=burst).generate(
        [Request(prompt_ids=prompt, params=params)]
    )
    assert turn.token_ids == reference_greedy(reference, prompt, 24, [stop])
    assert turn.token_ids[-1] == stop and turn.finish_reason == "stop"
    assert len(turn.logprobs) == len(turn.token_ids)


def test_samples_do_not_depend_on_who_else_runs(qwen):
    _, model = qwen
    params = SamplingParams(max_tokens=16)
    requests = [
        Request(prompt_ids=p, params=params, num_samples=3, seed=i)
        for i, p in enumerate(prompts_of([5, 11, 24]))
    ]
    together = engine_with(model, num_pages=200).generate(requests)
    crowded = engine_with(model, num_pages=12, burst=3).generate(requests)
    alone = [engine_with(model, num_pages=200).generate([request])[0] for request in requests]
    tokens = [
        [[turn.token_ids for turn in group] for group in x] for x in (together, crowded, alone)
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({tuple(t) for t in tokens[0][0]}) == 3  # samples of a group differ


def test_abort_frees_everything_and_the_rest_goes_on(qwen):
    reference, model = qwen
    engine = engine_with(model, num_pages=60)
    keep, drop = prompts_of([8, 8])
    ended = []
    dropped = engine.submit(
        Request(prompt_ids=drop, params=GREEDY, num_samples=3), lambda i, turn: ended.append(i)
    )
    kept = engine.submit(Request(prompt_ids=keep, params=GREEDY))
    waiting = engine.submit(Request(prompt_ids=drop, params=GREEDY, num_samples=2))
    engine.abort(waiting.id)
    for _ in range(5):
        engine.step()
    engine.abort(dropped.id)
    engine.abort(dropped.id)
    engine.abort(12345)
    while engine.has_work:
        engine.step()
    assert sorted(ended) == [0, 1, 2]
    assert {turn.finish_reason for turn in dropped.turns + waiting.turns} == {"abort"}
    assert dropped.turns[0].token_ids == reference_greedy(reference, drop, 24)[:6]
    assert kept.turns[0].token_ids == reference_greedy(reference, keep, 24)
    assert engine.pool.num_free == engine.pool.num_pages


def test_new_weights_are_used_at_once_and_recorded(qwen, tmp_path):
    _, model = qwen
    model = copy.deepcopy(model)
    other = make_reference("qwen3", seed=5)
    other.save_pretrained(tmp_path)
    engine = engine_with(model, num_pages=60)
    handle = engine.submit(Request(prompt_ids=prompts_of([8])[0], params=GREEDY))
    for _ in range(5):
        engine.step()
    engine.load_weights(load_model(tmp_path).named_parameters(), policy_version=7)
    while engine.has_work:
        engine.step()
    turn = handle.turns[0]
    assert turn.versions == [(0, 0), (6, 7)]
    # The rest of the turn is what the other model says after the first six tokens.
    expected = reference_greedy(other, turn.prompt_ids + turn.token_ids[:6], 18)
    assert turn.token_ids[6:] == expected


def test_weights_that_do_not_fit_change_nothing(qwen):
    _, model = qwen
    model = copy.deepcopy(model)
    engine = engine_with(model, num_pages=10)
    good = {name: p + 1 for name, p in model.named_parameters()}
    before = {name: p.clone() for name, p in model.named_parameters()}
    missing = {name: p for name, p in good.items() if name != "embedding"}
    for weights, name in [
        (missing, "embedding"),
        (good | {"extra": torch.zeros(1)}, "extra"),
        (good | {"norm.weight": torch.zeros(1)}, "norm.weight"),
    ]:
        with pytest.raises(ValueError, match=f"do not fit the model: {name}"):
            engine.load_weights(weights.items(), 1)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_callback_may_abort_others(qwen):
    _, model = qwen
    engine = engine_with(model, num_pages=60)
    short = SamplingParams(max_tokens=3, temperature=0.0)
    first = engine.submit(
        Request(prompt_ids=[1, 2], params=short), lambda index, turn: engine.abort(second.id)
    )
    second = engine.submit(Request(prompt_ids=[3, 4], params=GREEDY))
    while engine.has_work:
        engine.step()
    assert first.turns[0].finish_reason == "length"
    assert second.turns[0].finish_reason == "abort"
    assert len(second.turns[0].token_ids) == len(second.turns[0].logprobs) == 2
    assert engine.pool.num_free == engine.pool.num_pages


def test_one_bad_request_leaves_nothing_behind(qwen):
    _, model = qwen
    engine = engine_with(model, num_pages=60)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        engine.generate([Request(prompt_ids=p, params=GREEDY) for p in ([1], [])])
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_follows_the_softmax(temperature):
    """Chi-squared over 50,000 draws; 5 sigma of the statistic."""
    torch.manual_seed(0)
    logits = torch.randn(40) * 2 / temperature
    draws = 50_000
    keys = torch.tensor([noise_key(3, i) for i in range(draws)])
    positions = torch.arange(draws) % 7
    ids, logprobs = sample(
        (logits * temperature).expand(draws, -1),
        torch.full((draws,), temperature),
        torch.zeros(draws, dtype=torch.bool),
        keys,
        positions,
    )
    exact = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(logprobs.double(), exact.log()[ids], rtol=0, atol=1e-5)
    expected = exact * draws
    big = expected >= 5
    counts = torch.bincount(ids, minlength=40).double()
    cells = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    chi2 = ((cells - wanted) ** 2 / wanted).sum().item()
    freedom = len(cells) - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def test_noise_is_gumbel_and_uncorrelated():
    keys = torch.tensor([noise_key(seed, index) for seed in range(20) for index in range(20)])
    noise = gumbel(keys, torch.full((400,), 11), 1000).double()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.02
    assert torch.corrcoef(noise[:40]).fill_diagonal_(0).abs().max() < 0.17  # 5 sigma of 1/sqrt(V)
    # No two positions share the set of their bits, whatever the order.
    key = torch.tensor([noise_key(1, 1)]).expand(512, 2)
    sums = gumbel(key, torch.arange(512), 4096).double().sort(-1).values.sum(-1)
    assert len(set(sums.tolist())) == 512
    other_position = gumbel(keys, torch.full((400,), 12), 1000).double()
    assert (
        abs(torch.corrcoef(torch.stack([noise.flatten(), other_position.flatten()]))[0, 1]) < 0.01
    )


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [5, 199]}, r"5..199.*0..198"),
        ({"prompt_ids": [1], "num_samples": 0}, "num_samples=0"),
        ({"prompt_ids": [1] * 500}, "500 prompt tokens.*max_tokens=24.*512 positions"),
    ],
)
def test_bad_requests_are_refused_with_the_numbers(qwen, request_fields, message):
    _, model = qwen
    with pytest.raises(ValueError, match=message):
        engine_with(model, num_pages=500).submit(Request(**request_fields, params=GREEDY))


def test_a_request_larger_than_the_cache_is_refused(qwen):
    _, model = qwen
    with pytest.raises(ValueError, match="cache's 40 tokens"):
        engine_with(model, num_pages=10).submit(Request(prompt_ids=[1] * 20, params=GREEDY))


@pytest.mark.parametrize("field", [{"max_tokens": 0}, {"max_tokens": 1, "temperature": -1.0}])
def test_bad_sampling_params_are_named(field):
    with pytest.raises(ValueError, match=list(field)[-1]):
        SamplingParams(**field)


@pytest.mark.gpu
def test_cuda_fp32_greedy_equals_transformers(qwen):
    reference, model = qwen
    engine = Engine(copy.deepcopy(model).to("cuda"), kv_cache_gib=0.1)
    prompts = prompts_of([1, 5, 33])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY) for p in prompts])
    for prompt, (turn,) in zip(prompts, turns, strict=True):
        assert turn.token_ids == reference_greedy(reference, prompt, 24)


@pytest.mark.gpu
def test_noise_is_the_same_on_every_device():
    keys = torch.tensor([noise_key(seed, 1) for seed in range(50)])
    positions = torch.arange(50)
    on_cuda = gumbel(keys.cuda(), positions.cuda(), 1000).cpu()
    torch.testing.assert_close(on_cuda, gumbel(keys, positions, 1000), rtol=1e-5, atol=1e-5)
