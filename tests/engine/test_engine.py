"""The engine against transformers' generate and the trainer's forward."""

import copy
import math
import os
import random
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from support.models import make_reference
from transformers import AutoModelForCausalLM

from roll_lite.chat import Chat
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.models.attention import PackedAttention
from roll_lite.models.hf import load_model
from roll_lite.types import SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
_KNOWN = WeakKeyDictionary()  # by reference model: what transformers generated before


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
    known, key = _KNOWN.setdefault(reference, {}), (tuple(prompt), max_tokens, tuple(stop_ids))
    if key not in known:
        out = reference.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=list(stop_ids) or None, pad_token_id=0,
        )  # fmt: skip
        known[key] = out[0, len(prompt) :].tolist()
    return known[key]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    reference = make_reference("qwen3")
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.fixture(scope="module")
def other_qwen(tmp_path_factory):
    """The same shape with other weights, which are not to be changed."""
    folder = tmp_path_factory.mktemp("other")
    reference = make_reference("qwen3", seed=5)
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.fixture(scope="module")
def talkative(tiny_folder, tmp_path_factory):
    """(chat, reference, folder) of a tiny model; a fresh one repeats the same letter."""
    folder = tmp_path_factory.mktemp("talkative")
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(0)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    reference.save_pretrained(folder)
    return Chat(tiny_folder), reference, folder


def test_a_cache_larger_than_the_memory_is_refused(qwen):
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with pytest.raises(ValueError, match=rf"kv_cache_gib={total} is more than .* on cpu; lower it"):
        Engine(qwen[1], kv_cache_gib=total)


@pytest.mark.parametrize("burst", [1, 7])
def test_greedy_tokens_equal_transformers_for_every_family(family_folder, burst):
    reference, folder = family_folder
    model = load_model(folder)
    engine = engine_with(model, num_pages=200, burst=burst)
    prompts = prompts_of([1, 3, 4, 5, 17, 40])
    params = replace(GREEDY, max_tokens=16)
    turns = engine.generate([Request(prompt_ids=p, params=params, num_samples=2) for p in prompts])
    for prompt, group in zip(prompts, turns, strict=True):
        expected = reference_greedy(reference, prompt, 16)
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


def test_prompts_without_a_seed_draw_noise_of_their_own(qwen):
    """At a high temperature the noise alone decides: the same noise gives the same tokens."""
    params = SamplingParams(max_tokens=1, temperature=1e4)
    prompts = prompts_of([5] * 64)

    def first_tokens(**options):
        requests = [Request(prompt_ids=ids, params=params, **options) for ids in prompts]
        turns = engine_with(qwen[1], num_pages=512).generate(requests)
        return [samples[0].token_ids[0] for samples in turns]

    assert len(set(first_tokens(seed=3))) < 5
    assert len(set(first_tokens())) > 40  # of 199 tokens, 64 draws have 55 distinct on average
    assert first_tokens() == first_tokens()


def test_some_samples_of_a_request_are_the_same_as_among_all(qwen):
    _, model = qwen
    engine = engine_with(model, num_pages=200)
    params = SamplingParams(max_tokens=12)
    request = Request(prompt_ids=[5, 6, 7], params=params, num_samples=5, seed=3)
    (turns,) = engine.generate([request])
    (some,) = engine.generate([replace(request, wanted=(1, 4))])
    assert [i for i, turn in enumerate(some) if turn] == [1, 4]
    assert [some[i].token_ids for i in (1, 4)] == [turns[i].token_ids for i in (1, 4)]
    assert turns[1].token_ids != turns[4].token_ids and not engine.has_work


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


def test_a_conversation_that_goes_on_is_not_computed_again(qwen):
    reference, model = qwen
    engine = engine_with(model, num_pages=200)
    (prompt,) = prompts_of([37])
    ((turn,),) = engine.generate([Request(prompt_ids=prompt, params=GREEDY)])
    longer = prompt + turn.token_ids + prompts_of([10], seed=3)[0]
    engine.scheduler.num_reused_tokens = 0
    ((again,),) = engine.generate([Request(prompt_ids=longer, params=GREEDY)])
    assert engine.scheduler.num_reused_tokens == (37 + 23) // 4 * 4  # whole pages of 4
    assert again.token_ids == reference_greedy(reference, longer, 24)
    assert engine.pool.num_free == engine.pool.num_pages


def test_equal_prompts_of_one_step_share_pages(qwen):
    reference, model = qwen
    engine = engine_with(model, num_pages=200)
    (prompt,) = prompts_of([41])
    other = prompt[:20] + prompts_of([9], seed=2)[0]
    turns = engine.generate(
        [Request(prompt_ids=p, params=GREEDY) for p in (prompt, prompt, other, prompt)]
    )
    assert engine.scheduler.num_reused_tokens == 40 + 20 + 40
    for p, (turn,) in zip((prompt, prompt, other, prompt), turns, strict=True):
        assert turn.token_ids == reference_greedy(reference, p, 24)


def test_pages_of_old_weights_are_not_used_again(qwen, other_qwen):
    _, model = qwen
    other, other_model = other_qwen
    engine = engine_with(copy.deepcopy(model), num_pages=200)
    request = Request(prompt_ids=prompts_of([37])[0], params=GREEDY)
    engine.generate([request])
    engine.load_weights(other_model.named_parameters(), policy_version=1)
    ((turn,),) = engine.generate([request])
    assert engine.scheduler.num_reused_tokens == 0
    assert turn.token_ids == reference_greedy(other, request.prompt_ids, 24)


@pytest.mark.parametrize("budget", [3, 8, 50])
def test_chunked_prefill_changes_no_token(qwen, budget):
    reference, model = qwen
    engine = engine_with(model, num_pages=300, max_prefill_tokens=budget, burst=3)
    prompts = prompts_of([7, 40, 30, 2, 61])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY, num_samples=2) for p in prompts])
    for prompt, group in zip(prompts, turns, strict=True):
        expected = reference_greedy(reference, prompt, 24)
        assert all(turn.token_ids == expected for turn in group)
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize(
    ("seed", "num_rounds", "ahead", "page_size"),
    [
        pytest.param(0, 100, False, 4, marks=pytest.mark.slow),
        (1, 100, True, 64),
        # Few pages, bursts of 1, 3 and 8; then more pages
        pytest.param(2, 200, True, 4, marks=pytest.mark.slow),
        pytest.param(3, 200, False, 4, marks=pytest.mark.slow),
        pytest.param(4, 200, True, 4, marks=pytest.mark.slow),
        pytest.param(5, 200, True, 4, marks=pytest.mark.slow),
    ],
)
def test_random_workloads_lose_nothing(qwen, seed, num_rounds, ahead, page_size):
    """Submits, aborts, preemptions and weight loads in a cache that is too small."""
    _, model = qwen
    r = random.Random(seed)
    weights = [(name, p.clone()) for name, p in model.named_parameters()]
    engine = engine_with(
        model,
        num_pages=r.choice([24, 60]) if page_size == 4 else 14,
        page_size=page_size,
        burst=r.choice([1, 3, 8]),
        max_num_seqs=9,
        max_prefill_tokens=19 if page_size == 4 else 150,
        launch_ahead=ahead,
    )
    ended, handles = [], []
    longest = 30 if page_size == 4 else 200
    stems = prompts_of([longest] * 3, seed)

    def submit():
        number = len(handles)
        prompt = r.choice(stems)[: r.randint(1, longest)] + prompts_of([r.randint(1, 8)], number)[0]
        params = SamplingParams(
            max_tokens=r.randint(1, 30), temperature=r.choice([0.0, 1.0]), stop_ids=(5, 6, 7)
        )
        request = Request(
            prompt_ids=prompt, params=params, num_samples=r.randint(1, 4), seed=number
        )
        handles.append((request, engine.submit(request, lambda i, turn: ended.append((number, i)))))

    for i in range(num_rounds):
        # Busy times and quiet ones, when no request waits.
        for _ in range(r.choice([0, 0, 1, 3]) if i % 50 < 30 else 0):
            submit()
        if r.random() < 0.1 and handles:
            engine.abort(r.choice(handles)[1].id)
        if r.random() < 0.03:
            engine.load_weights(weights, engine.policy_version + 1)
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preempted > num_rounds // 10
    assert engine.pool.num_free == engine.pool.num_pages
    assert sorted(ended) == [
        (n, i) for n, (q, _) in enumerate(handles) for i in range(q.num_samples)
    ]
    roomy = engine_with(model, num_pages=2000, page_size=page_size)
    whole = roomy.generate([request for request, _ in handles])
    for (_, handle), turns in zip(handles, whole, strict=True):
        for turn, expected in zip(handle.turns, turns, strict=True):
            num_tokens = len(turn.token_ids)
            assert turn.token_ids == expected.token_ids[:num_tokens]
            assert turn.logprobs == expected.logprobs[:num_tokens]  # to the last bit
            assert turn.finish_reason in ("abort", expected.finish_reason)


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


@pytest.mark.parametrize(("burst", "ahead"), [(1, False), (5, False), (5, True)])
def test_stop_texts_end_the_turn_like_transformers(talkative, burst, ahead):
    chat, reference, folder = talkative
    engine = Engine(
        load_model(folder), kv_cache_gib=0.01, burst=burst, launch_ahead=ahead,
        decode=chat.decode,
    )  # fmt: skip
    prompts = [chat.encode([{"role": "user", "content": c}]) for c in ("abc", "xyzzy", "q")]
    free = engine.generate([Request(prompt_ids=p, params=GREEDY) for p in prompts])
    num_stopped = 0
    for prompt, (turn,) in zip(prompts, free, strict=True):
        text = chat.decode(turn.token_ids)
        stop = (text[5:8], "@@@")  # three letters that the reply contains, and some it does not
        params = SamplingParams(max_tokens=24, temperature=0.0, stop=stop)
        ((got,),) = engine.generate([Request(prompt_ids=prompt, params=params)])
        out = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None,
            pad_token_id=0, stop_strings=list(stop), tokenizer=chat.tokenizer,
        )  # fmt: skip
        assert got.token_ids == out[0, len(prompt) :].tolist()
        assert got.token_ids == turn.token_ids[: len(got.token_ids)]
        assert got.logprobs == turn.logprobs[: len(got.token_ids)]
        assert got.finish_reason == "stop" and stop[0] in chat.decode(got.token_ids)
        num_stopped += len(got.token_ids) < 24
    assert num_stopped == 3
    assert engine.pool.num_free == engine.pool.num_pages


def test_stop_texts_need_a_decoder(qwen):
    engine = engine_with(qwen[1], num_pages=20)
    params = SamplingParams(max_tokens=4, stop=("x",))
    with pytest.raises(ValueError, match="decode="):
        engine.submit(Request(prompt_ids=[1], params=params))


@pytest.mark.parametrize("running", ["go_on", "finish", "abort"])
def test_running_samples_go_on_finish_or_end_when_weights_come(qwen, running, other_qwen):
    reference, model = qwen
    model = copy.deepcopy(model)
    other, other_model = other_qwen
    # Room for two at a time: the third waits, and the second is preempted on the way.
    engine = engine_with(model, num_pages=14, burst=3, max_num_seqs=2)
    prompts = prompts_of([9, 14, 5])
    handles = [engine.submit(Request(prompt_ids=p, params=GREEDY)) for p in prompts]
    for _ in range(3):
        engine.step()
    assert engine.scheduler.waiting
    engine.load_weights(other_model.named_parameters(), 3, running)
    ended = [handle.is_done for handle in handles]
    assert ended == ([False] * 3 if running == "go_on" else [True, True, False])
    while engine.has_work:
        engine.step()
    turns = [handle.turns[0] for handle in handles]
    assert turns[2].versions == [(0, 3)]
    assert turns[2].token_ids == reference_greedy(other, prompts[2], 24)
    for turn in turns[:2]:
        old = reference_greedy(reference, turn.prompt_ids, 24)
        num_old = turn.versions[1][0] if len(turn.versions) > 1 else len(turn.token_ids)
        assert turn.token_ids[:num_old] == old[:num_old]
        assert (num_old == 24) == (running == "finish")
        assert turn.finish_reason == ("abort" if running == "abort" else "length")
    assert engine.pool.num_free == engine.pool.num_pages
    with pytest.raises(ValueError, match="running='later'"):
        engine.load_weights(other_model.named_parameters(), 4, "later")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sleep_gives_memory_back_and_samples_go_on_after_it(qwen, device):
    _, model = qwen
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = copy.deepcopy(model).to(device, dtype)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    engine = Engine(model, kv_cache_gib=1.0 if device == "cuda" else 0.01, burst=3)
    requests = [
        Request(prompt_ids=p, params=SamplingParams(max_tokens=24), num_samples=3, seed=i)
        for i, p in enumerate(prompts_of([9, 14, 40]))
    ]
    expected = engine.generate(requests)
    handles = [engine.submit(request) for request in requests]
    for _ in range(4):
        engine.step()
    for part in ("all", "weights"):
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        engine.sleep()
        engine.sleep()  # nothing more happens
        if device == "cuda":
            assert torch.cuda.mem_get_info()[0] - free > 2**30
        with pytest.raises(RuntimeError, match="call load_weights"):
            engine.step()
        with pytest.raises(RuntimeError, match="call wake"):
            engine.load_weights(weights.items(), 1)
        engine.wake(part)
        with pytest.raises(RuntimeError, match="call load_weights"):
            engine.step()
        engine.load_weights(weights.items(), 1)
        if part == "weights":
            with pytest.raises(RuntimeError, match=r"no KV cache since sleep\(\); call wake"):
                engine.step()
            if device == "cuda":
                assert torch.cuda.mem_get_info()[0] - free > 2**30
            engine.wake()
        engine.step()
    while engine.has_work:
        engine.step()
    got = [turn for handle in handles for turn in handle.turns]
    for turn, whole in zip(got, (t for group in expected for t in group), strict=True):
        if device == "cpu":  # bf16 prefill and decode round differently
            assert (turn.token_ids, turn.logprobs) == (whole.token_ids, whole.logprobs)
        assert turn.finish_reason == "length" and all(map(math.isfinite, turn.logprobs))
    again = engine.generate(requests)
    assert [t.token_ids for g in again for t in g] == [t.token_ids for g in expected for t in g]
    assert engine.pool.num_free == engine.pool.num_pages


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
    had = dropped.turns[0].token_ids
    assert len(had) > 2 and had == reference_greedy(reference, drop, 24)[: len(had)]
    assert kept.turns[0].token_ids == reference_greedy(reference, keep, 24)
    assert engine.pool.num_free == engine.pool.num_pages


def test_new_weights_are_used_at_once_and_recorded(qwen, other_qwen):
    _, model = qwen
    model = copy.deepcopy(model)
    other, other_model = other_qwen
    engine = engine_with(model, num_pages=60)
    handle = engine.submit(Request(prompt_ids=prompts_of([8])[0], params=GREEDY))
    for _ in range(5):
        engine.step()
    engine.load_weights(other_model.named_parameters(), policy_version=7)
    while engine.has_work:
        engine.step()
    turn = handle.turns[0]
    assert turn.versions == [(0, 0), (5, 7)]
    # The rest of the turn is what the other model says after the first five tokens.
    expected = reference_greedy(other, turn.prompt_ids + turn.token_ids[:5], 19)
    assert turn.token_ids[5:] == expected


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
    assert len(second.turns[0].token_ids) == len(second.turns[0].logprobs) == 3
    assert engine.pool.num_free == engine.pool.num_pages


def test_a_callback_that_raises_loses_no_token(qwen):
    reference, model = qwen
    engine = engine_with(model, num_pages=60, burst=4)

    def fail(index, turn):
        raise KeyError("callback broke")

    first = engine.submit(
        Request(prompt_ids=[1, 2], params=SamplingParams(max_tokens=3, temperature=0.0)), fail
    )
    second = engine.submit(Request(prompt_ids=[3, 4], params=GREEDY))
    with pytest.raises(KeyError, match="callback broke"):
        while engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    assert first.turns[0].finish_reason == "length"
    assert second.turns[0].token_ids == reference_greedy(reference, [3, 4], 24)


def test_a_step_that_fails_leaves_no_wrong_pages(qwen, monkeypatch):
    reference, model = qwen
    engine = engine_with(model, num_pages=60)
    request = Request(prompt_ids=prompts_of([21])[0], params=GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", lambda *_: (_ for _ in ()).throw(MemoryError()))
        engine.submit(request)
        with pytest.raises(MemoryError):
            engine.step()
    engine.abort_all()
    ((turn,),) = engine.generate([request])
    assert turn.token_ids == reference_greedy(reference, request.prompt_ids, 24)
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("where", ["step", "load_weights"])
def test_a_decoder_that_raises_loses_no_sample(qwen, where):
    reference, model = qwen
    weights = [(name, p.clone()) for name, p in model.named_parameters()]
    is_broken = False

    def decode(ids):
        if is_broken:
            raise KeyError("decoder broke")
        return "".join(chr(300 + i) for i in ids)

    engine = engine_with(model, num_pages=80, burst=4, decode=decode)
    with_stop = SamplingParams(max_tokens=24, temperature=0.0, stop=("@",))
    short = SamplingParams(max_tokens=5, temperature=0.0)
    prompts = prompts_of([7, 9, 11])
    handles = [
        engine.submit(Request(prompt_ids=p, params=params))
        for p, params in zip(prompts, (short, with_stop, GREEDY), strict=True)
    ]
    for _ in range(2):
        engine.step()
    is_broken = True
    with pytest.raises(KeyError, match="decoder broke"):
        engine.step() if where == "step" else engine.load_weights(weights, 1)
    is_broken = False
    while engine.has_work:
        engine.step()
    for prompt, handle, num_tokens in zip(prompts, handles, (5, 24, 24), strict=True):
        assert handle.turns[0].token_ids == reference_greedy(reference, prompt, num_tokens)
    assert engine.pool.num_free == engine.pool.num_pages


def test_every_callback_is_called_though_one_raises(qwen):
    _, model = qwen
    engine = engine_with(model, num_pages=60)
    called = []

    def fail_first(index, turn):
        called.append(index)
        if index == 0:
            raise KeyError("the first broke")

    params = SamplingParams(max_tokens=2, temperature=0.0)
    engine.submit(Request(prompt_ids=[1, 2], params=params, num_samples=3), fail_first)
    with pytest.raises(KeyError, match="the first broke"):
        while engine.has_work:
            engine.step()
    assert called == [0, 1, 2]


def test_a_wake_that_fails_can_be_repeated(qwen, monkeypatch):
    _, model = qwen
    engine = engine_with(copy.deepcopy(model), num_pages=20)
    engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.arena, "restore", lambda: (_ for _ in ()).throw(OSError()))
        with pytest.raises(OSError):
            engine.wake()
    engine.load_weights(model.named_parameters(), 1)  # their memory is there
    with pytest.raises(RuntimeError, match=r"no KV cache .* call wake"):
        engine.step()
    engine.wake()
    ((turn,),) = engine.generate([Request(prompt_ids=[1, 2], params=GREEDY)])
    assert len(turn.token_ids) == 24


def with_a_preempted_sample(model):
    """An engine, and the handles of three samples that have started."""
    engine = engine_with(model, num_pages=14, burst=3)
    handles = [engine.submit(Request(prompt_ids=p, params=GREEDY)) for p in prompts_of([9, 14, 5])]
    while not engine.scheduler.num_preempted:
        engine.step()
    return engine, handles


def test_preempted_samples_are_aborted_with_the_running_ones(qwen):
    _, model = qwen
    engine, handles = with_a_preempted_sample(model)
    assert any(sequence.num_sampled for sequence in engine.scheduler.waiting)
    weights = [(name, p.clone()) for name, p in model.named_parameters()]
    engine.load_weights(weights, 1, "abort")
    assert [handle.turns[0].finish_reason for handle in handles] == ["abort"] * 3


def test_preempted_samples_finish_though_new_ones_wait_ahead_of_them(qwen):
    """Followers without room are put ahead of them."""
    _, model = qwen
    engine, started = with_a_preempted_sample(model)
    (new_prompt,) = prompts_of([6], seed=1)
    new = engine.submit(Request(prompt_ids=new_prompt, params=GREEDY))
    engine.scheduler.waiting.rotate(1)
    assert [s.num_sampled > 0 for s in engine.scheduler.waiting][:2] == [False, True]
    steps_left, step = iter(range(1000)), engine.step

    def counted_step():
        next(steps_left)  # StopIteration where they never finish
        step()

    engine.step = counted_step
    engine.load_weights([(name, p.clone()) for name, p in model.named_parameters()], 1, "finish")
    assert all(len(handle.turns[0].token_ids) == 24 for handle in started)
    assert new.turns == [None]


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "qwen3_moe", "qwen2_moe"])
def test_long_prompts_give_the_same_bits_alone_and_together(family, tmp_path):
    make_reference(family).save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=12)
    requests = [
        Request(prompt_ids=p, params=params, seed=i)
        for i, p in enumerate(prompts_of([200, 70, 129, 64, 190], seed=2))
    ]
    together = Engine(load_model(tmp_path), kv_cache_gib=0.01).generate(requests)
    small = Engine(load_model(tmp_path), kv_cache_gib=0.01, max_prefill_tokens=33, burst=5)
    for request, (expected,) in zip(requests, together, strict=True):
        ((alone,),) = small.generate([request])
        assert (alone.token_ids, alone.logprobs) == (expected.token_ids, expected.logprobs)


def test_one_bad_request_leaves_nothing_behind(qwen):
    _, model = qwen
    engine = engine_with(model, num_pages=60)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        engine.generate([Request(prompt_ids=p, params=GREEDY) for p in ([1], [])])
    assert not engine.has_work


def test_truncation_reaches_the_samples_of_an_engine(qwen):
    reference, model = qwen
    (prompt,) = prompts_of([9])
    turns = [
        engine_with(model, num_pages=80, burst=burst).generate(
            [
                Request(
                    prompt_ids=prompt,
                    params=SamplingParams(max_tokens=12, top_k=1),
                    num_samples=2,
                ),
                Request(prompt_ids=prompt, params=SamplingParams(max_tokens=12)),
            ]
        )
        for burst in (1, 4)
    ]
    expected = reference_greedy(reference, prompt, 12)
    for (first, second), (free,) in turns:
        assert first.token_ids == second.token_ids == expected
        assert first.logprobs == [0.0] * 12  # the only token left
        assert free.token_ids != expected


def test_a_model_that_breaks_fails_its_requests_and_no_others(qwen):
    _, model = qwen
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.embedding[150] = float("nan")  # a token that breaks every sequence that reads it
        model.lm_head = torch.nn.Parameter(model.embedding.nan_to_num())
    engine = engine_with(model, num_pages=80, burst=4)
    (good,), (bad,) = engine.generate(
        [Request(prompt_ids=p, params=GREEDY) for p in ([1, 2, 3], [1, 150, 3])]
    )
    assert bad.finish_reason == "error" and bad.token_ids == []
    assert good.finish_reason == "length" and len(good.token_ids) == 24
    assert engine.pool.num_free == engine.pool.num_pages
    # Neither its prefix nor its pages harm those who come later, in a cache as small as can be.
    engine = engine_with(model, num_pages=9)
    for prompt, reason in (([1, 2, 3, 4, 5, 150], "error"), ([1, 2, 3, 4, 5], "length")):
        ((turn,),) = engine.generate([Request(prompt_ids=prompt, params=GREEDY)])
        assert turn.finish_reason == reason
        assert engine.scheduler.num_preempted == 1  # the broken one alone is computed again


@pytest.mark.parametrize("burst", [1, 4])
def test_who_shares_pages_with_a_broken_sample_goes_on(qwen, burst):
    reference, model = qwen
    model = copy.deepcopy(model)
    with torch.no_grad():
        whole = model.embedding.clone()
        model.embedding[150] = torch.nan
        model.lm_head = torch.nn.Parameter(whole)
    engine = engine_with(model, num_pages=60, burst=burst)
    prompts = [[1, 2, 3, 4, 5, 150], [1, 2, 3, 4, 5], [9, 8, 7]]
    (bad,), *good = engine.generate([Request(prompt_ids=p, params=GREEDY) for p in prompts])
    assert bad.finish_reason == "error" and bad.token_ids == []
    for prompt, (turn,) in zip(prompts[1:], good, strict=True):
        expected = reference_greedy(reference, prompt, 24)
        assert 150 not in expected
        assert turn.token_ids == expected
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("ahead", [False, True])
def test_a_page_that_breaks_is_computed_again(qwen, ahead):
    """Also if the next burst was launched before the host saw it."""
    reference, model = qwen
    engine = engine_with(model, num_pages=60, burst=4, launch_ahead=ahead)
    prompts = prompts_of([9, 12, 5])
    handles = [engine.submit(Request(prompt_ids=p, params=GREEDY)) for p in prompts]
    broken = handles[0].sequences[0]
    while broken.num_sampled < 5:
        engine.step()
    engine.runner.cache[:, :, broken.pages[1]] = torch.nan
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preempted == 1
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.turns[0].token_ids == reference_greedy(reference, prompt, 24)
    assert engine.pool.num_free == engine.pool.num_pages


def test_a_sample_starts_as_soon_as_another_has_ended(qwen):
    """Not a burst later: bursts of four tokens take hardly more steps than bursts of one."""
    _, model = qwen
    requests = [
        Request(prompt_ids=prompt, params=SamplingParams(max_tokens=n, temperature=0.0))
        for prompt, n in zip(prompts_of([6] * 12), [5, 25, 9, 17, 3, 30] * 2, strict=True)
    ]

    def num_steps(burst):
        engine = engine_with(model, num_pages=900, max_num_seqs=4, burst=burst, launch_ahead=False)
        counted, decode = [], engine.runner.decode

        def decode_and_count(sequences, num_steps):
            counted.append(num_steps)
            return decode(sequences, num_steps)

        engine.runner.decode = decode_and_count
        engine.generate(requests)
        return sum(counted)

    assert num_steps(1) <= num_steps(4) <= num_steps(1) + 4


def test_rows_move_while_the_device_works(qwen):
    """Samples end at many lengths, and some are aborted: every next burst is launched ahead all the
    same, and no sample changes."""
    _, model = qwen
    prompts = prompts_of([5, 9, 13, 17, 6, 30])
    requests = [
        Request(
            prompt_ids=prompt, seed=seed, num_samples=3,
            params=SamplingParams(max_tokens=12 + 9 * seed, temperature=1.0, stop_ids=(5, 6, 7, 8)),
        )
        for seed, prompt in enumerate(prompts)
    ]  # fmt: skip
    whole = engine_with(model, num_pages=900, burst=3).generate(requests)
    engine = engine_with(model, num_pages=900, burst=3, launch_ahead=True)
    decoded, decode = [], engine.runner.decode
    engine.runner.decode = lambda *args: decoded.append(args) or decode(*args)
    handles = [engine.submit(request) for request in requests]
    while not any(handles[4].turns):
        engine.step()
    engine.abort(handles[5].id)
    while engine.has_work:
        engine.step()
    assert len(decoded) == 1  # the first
    for handle, expected in zip(handles, whole, strict=True):
        for turn, other in zip(handle.turns, expected, strict=True):
            assert turn.token_ids == other.token_ids[: len(turn.token_ids)]
            assert turn.logprobs == other.logprobs[: len(turn.token_ids)]
            assert turn.finish_reason in (other.finish_reason, "abort")


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [5, 199]}, r"5..199.*0..198"),
        ({"prompt_ids": [1], "num_samples": 0}, "num_samples=0"),
        ({"prompt_ids": [1], "num_samples": 2, "wanted": ()}, r"wanted=\(\).*0..1"),
        ({"prompt_ids": [1], "num_samples": 2, "wanted": (1, 1)}, r"\(1, 1\).*0..1, each once"),
        ({"prompt_ids": [1], "num_samples": 2, "wanted": (1, 2)}, r"wanted=\(1, 2\).*0..1"),
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


@pytest.mark.gpu
def test_cuda_fp32_greedy_equals_transformers(qwen):
    reference, model = qwen
    engine = Engine(copy.deepcopy(model).to("cuda"), kv_cache_gib=0.1)
    prompts = prompts_of([1, 5, 33])
    turns = engine.generate([Request(prompt_ids=p, params=GREEDY) for p in prompts])
    for prompt, (turn,) in zip(prompts, turns, strict=True):
        assert turn.token_ids == reference_greedy(reference, prompt, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_triton_under_graphs_agrees_with_the_trainer(family, tmp_path):
    """bf16 on CUDA: preemption, chunks, shared pages, new weights in a small cache."""
    make_reference(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cuda", dtype=torch.bfloat16)
    engine = Engine(
        model,
        kv_cache_gib=70 * page_bytes(model, 16) / 2 / 2**30,
        max_prefill_tokens=50,
        max_num_seqs=24,
        burst=6,
    )
    assert engine.runner.backend == "triton"
    weights = {name: p.clone() for name, p in model.named_parameters()}
    params = SamplingParams(max_tokens=60, temperature=0.9)
    for version in range(3):
        requests = [
            Request(prompt_ids=p, params=params, num_samples=4, seed=i)
            for i, p in enumerate(prompts_of([5, 33, 33, 90, 17, 64, 16], seed=1))
        ]
        errors = []
        for turn in (turn for group in engine.generate(requests) for turn in group):
            ids = torch.tensor(turn.prompt_ids + turn.token_ids, device="cuda")
            n = len(ids) - 1
            attend = PackedAttention(torch.tensor([0, n], dtype=torch.int32, device="cuda"), n)
            rows = torch.arange(len(turn.prompt_ids) - 1, n, device="cuda")
            positions = torch.arange(n, device="cuda")
            exact, _ = model(ids[:-1], positions, attend, rows, ids[rows + 1], 0.9)
            errors.append((torch.tensor(turn.logprobs, device="cuda") - exact).abs())
        assert torch.cat(errors).mean() < 0.02
        assert engine.pool.num_free == engine.pool.num_pages
        torch.manual_seed(version)
        noisy = {n: w + 0.02 * torch.randn_like(w) for n, w in weights.items()}
        engine.load_weights(noisy.items(), version + 1)
    assert engine.scheduler.num_preempted > 0 and engine.scheduler.num_reused_tokens > 0
    assert len(engine.runner._graphs) > 1
