"""Stop texts against a brute-force loop: decode after every token, cut where the text appears."""

import json
import pickle
import random
import shutil
from dataclasses import replace

import pytest
from support.chat_templates import save_tokenizer
from support.launch import Program
from support.models import make_toy
from support.paths import SUPPORT
from support.service_programs import Mailbag

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request, Sequence, find_stop
from roll_lite.engine.service import EngineService
from roll_lite.models.hf import load_model
from roll_lite.models.shapes import SHAPES
from roll_lite.types import SamplingParams

WORDS = ["a", "stop", " ", "\n", "é", "☃", "日本", "🙂", "</answer>", "no."]


def find_by_brute_force(token_ids, stop, decode):
    for num_tokens in range(1, len(token_ids) + 1):
        if any(text in decode(token_ids[:num_tokens]) for text in stop):
            return num_tokens
    return None


def stopped_at(token_ids, stop, burst, decode):
    """How many tokens `find_stop` keeps of tokens that arrive in bursts, behind a prompt."""
    sequence = Sequence(
        request_id=0, index=0, params=SamplingParams(max_tokens=10**6, stop=stop),
        noise_key=(0, 0), prompt_ids=token_ids[-3:],
    )  # fmt: skip
    for start in range(0, len(token_ids), burst):
        new = token_ids[start : start + burst]
        sequence._token_ids += new
        sequence.length += len(new)
        if (found := find_stop(sequence, len(new), decode)) is not None:
            return found
    return None


@pytest.mark.parametrize("burst", [1, 5])
@pytest.mark.parametrize("kind", ["qwen3", "llama2"])
def test_the_end_of_a_reply_is_enough_to_find_stop_texts(tmp_path, kind, burst):
    """Characters of several tokens, half characters, special tokens, spaces that are stripped."""
    chat, r = Chat(save_tokenizer(kind, tmp_path)), random.Random(f"{kind} {burst}")
    special = chat.tokenizer.all_special_ids[0]
    found = []
    for _ in range(30):
        token_ids = []
        while len(token_ids) < 150:
            token_ids += chat.tokenizer.encode(r.choice(WORDS), add_special_tokens=False)
            token_ids = token_ids[: -1 if r.random() < 0.05 else None]
            token_ids += [special] * (r.random() < 0.1) * r.choice([1, 40])
        text = chat.decode(token_ids)
        place, length = r.randrange(len(text)), r.randint(2, 12)
        stop = (text[place : place + length].strip("\ufffd") or "?", "not in it")
        expected = find_by_brute_force(token_ids, stop, chat.decode)
        assert stopped_at(token_ids, stop, burst, chat.decode) == expected
        found.append(expected)
    assert len(set(found)) > 12


@pytest.mark.parametrize(
    ("text", "stop", "burst"), [("☃" * 40 + "!", "☃!", 1), ("☃" * 2, "☃", 5)], ids=["begin", "end"]
)
def test_a_run_of_bytes_is_text_only_as_a_whole(tmp_path, text, stop, burst):
    """Llama 2's tokenizer: with half a character at either end, none of them is decoded."""
    chat = Chat(save_tokenizer("llama2", tmp_path))
    token_ids = chat.tokenizer.encode(text, add_special_tokens=False)
    expected = find_by_brute_force(token_ids, (stop,), chat.decode)
    assert stopped_at(token_ids, (stop,), burst, chat.decode) == expected is not None


def test_what_is_decoded_does_not_grow_with_the_reply(tmp_path):
    chat, num_decoded = Chat(save_tokenizer("qwen3", tmp_path)), []

    def decode(token_ids):
        num_decoded.append(len(token_ids))
        return chat.decode(token_ids)

    token_ids = chat.tokenizer.encode("word " * 400)
    assert stopped_at(token_ids, ("</answer>",), 1, decode) is None
    assert len(token_ids) > 1000 and max(num_decoded) < 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose vocabulary two ranks can share."""
    sizes = {"vocab_size": 100, "num_key_value_heads": 2, "initializer_range": 0.5}
    return make_toy(tmp_path_factory.mktemp("models") / "even", **sizes)


@pytest.fixture(scope="module")
def asked(folder):
    """Requests with stop texts that their replies have, and where brute force cuts the replies."""
    chat, engine, r = Chat(folder), Engine(load_model(folder), kv_cache_gib=0.01), random.Random(0)
    requests, expected = [], []
    for i in range(12):
        params = SamplingParams(max_tokens=40, temperature=float(i % 2))
        free = Request(prompt_ids=[r.randrange(3, 90) for _ in range(4)], params=params, seed=i)
        ((turn,),) = engine.generate([free])
        text, place = chat.decode(turn.token_ids), r.randrange(35)
        stop = (text[place : place + 3], "not in it")
        requests.append(replace(free, params=replace(params, stop=stop)))
        expected.append(turn.token_ids[: find_by_brute_force(turn.token_ids, stop, chat.decode)])
    assert sum(len(token_ids) < 40 for token_ids in expected) > 8
    return requests, expected


def test_stop_texts_through_the_service(folder, asked):
    requests, expected = asked
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=folder, kv_cache_gib=0.01)
        mail = Mailbag(engines)
        for key, request in enumerate(requests):
            engines.post(0, "submit", key, request)
        while engines.pump():
            pass
    assert [mail.turns[key, 0].token_ids for key in range(len(requests))] == expected
    assert {turn.finish_reason for turn in mail.turns.values()} == {"stop"}


@pytest.mark.slow
def test_stop_texts_over_tensor_parallel_ranks(folder, asked, tmp_path):
    requests, expected = asked
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "requests.pickle").write_bytes(pickle.dumps(requests))
    program = Program("stop_texts", 2, tmp_path, programs=SUPPORT / "service_programs.py")
    assert program.result() == expected


@pytest.mark.parametrize(
    ("name", "message"), [("shape:toy", "shape:toy has none; use stop_ids"), ("bare", "no tokeni")]
)
def test_without_a_tokenizer_stop_texts_are_refused(
    folder, place, monkeypatch, tmp_path, name, message
):
    reports = []
    monkeypatch.setattr(type(place), "report", lambda self, *args: reports.append(args))
    monkeypatch.setitem(SHAPES, "toy", json.loads((folder / "config.json").read_text()))
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    model = tmp_path / name if name == "bare" else name
    service = EngineService(model, place=place, kv_cache_gib=0.01)
    params = SamplingParams(max_tokens=4, stop=("x",))
    service.receive("submit", 1, Request(prompt_ids=[5], params=params))
    service.work()
    ((_, report),) = reports
    ((key, reason),) = report.refused
    assert key == 1 and message in reason
