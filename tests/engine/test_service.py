"""Engines that work on their own in a role, over real ranks, against an engine alone."""

import json
import re
import shutil

import pytest
from support.forked_ranks import run_ranks
from support.launch import run_failing
from support.models import make_reference
from support.paths import SUPPORT
from support.service_programs import Mailbag, make_requests

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.errors import RoleError
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.engine.service import EngineService
from roll_lite.models.hf import load_model
from roll_lite.types import SamplingParams

PROGRAMS = SUPPORT / "service_programs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose vocabulary two ranks can share."""
    folder = tmp_path_factory.mktemp("models") / "even"
    make_reference("qwen3", vocab_size=200).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Every sample of the requests, from an engine on its own."""
    turns = Engine(load_model(folder), kv_cache_gib=0.01).generate(make_requests())
    return {
        (str(key), index): [turn.token_ids, turn.finish_reason]
        for key, group in enumerate(turns)
        for index, turn in enumerate(group)
    }


@pytest.mark.slow
def test_requests_and_calls_interleave_over_tensor_parallel_ranks(expected, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    run_ranks(4, PROGRAMS, "interleaved", tmp_path / "interleaved.json")
    result = json.loads((tmp_path / "interleaved.json").read_text())
    answers = {(key, index): [ids, reason] for key, index, ids, reason in result["answers"]}
    ids, reason = answers.pop(("aborted", 0))
    assert reason == "abort" and len(ids) < 500
    assert answers == expected
    assert result["seen_twice"] == []
    assert all(a == b for a, b in result["rings"]) and len(result["rings"]) > 20
    assert result["again"] == [4, 1, 19]  # the last weights that came are those of version 19
    ((key, why),) = result["refused"]
    assert key == "refused" and "max_tokens=1000000" in why


def test_alone_the_controller_pumps(expected, folder):
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=folder, kv_cache_gib=0.01)
        mail = Mailbag(engines)
        for key, request in enumerate(make_requests()):
            engines.post(0, "submit", key, request)
        while engines.pump():
            pass
        answers = {(str(k), i): [t.token_ids, t.finish_reason] for (k, i), t in mail.turns.items()}
        assert answers == expected
        assert not engines.pump()
        with pytest.raises(RoleError, match=r"generate.receive failed.*does not know 'sumbit'"):
            engines.post(0, "sumbit", 1)


def test_a_step_that_raises_is_reported_with_what_was_under_way(folder, place, monkeypatch):
    reports = []
    monkeypatch.setattr(type(place), "report", lambda self, *args: reports.append(args))
    service = EngineService(folder, place=place, kv_cache_gib=0.01)
    params = SamplingParams(max_tokens=8)
    service.receive("submit", "a", Request(prompt_ids=[1, 2], params=params, num_samples=2))
    assert service.work()
    decode = service.engine.runner.decode
    service.engine.runner.decode = lambda *_: 1 / 0
    while reports[-1][0] != "failed":
        service.work()
    _, keys, text = reports[-1]
    assert keys == ["a"] and "ZeroDivisionError" in text
    service.engine.runner.decode = decode
    service.receive("submit", "b", Request(prompt_ids=[1, 2], params=params, num_samples=2))
    while service.work():
        pass
    turns = [turn for report in reports if report[0] == "answers" for turn in report[1].turns]
    assert sorted((key, index) for key, index, _ in turns) == [("b", 0), ("b", 1)]


@pytest.mark.parametrize("running", ["go_on", "finish", "abort"])
def test_with_new_weights_an_engine_reports_which_samples_continue_since_which_version(
    folder, place, monkeypatch, running
):
    """Two samples have started and two wait; the report agrees with the turns that come later."""
    reports = []
    monkeypatch.setattr(type(place), "report", lambda self, *args: reports.append(args))
    service = EngineService(folder, place=place, kv_cache_gib=0.01, max_num_seqs=2)
    for key in "abcd":
        request = Request(prompt_ids=[1], params=SamplingParams(max_tokens=8))
        service.receive("submit", key, request)
    for _ in range(3):
        service.work()
    service.engine.load_weights(service.engine.model.named_parameters(), 4, running)
    while service.work():
        pass
    answers = [answers for _, answers in reports]
    turns = {key: turn for a in answers for key, _, turn in a.turns}
    first = {key: turn.versions[0][1] for key, turn in turns.items()}
    assert first == {"a": 0, "b": 0, "c": 4, "d": 4}
    reported = [(a.policy_version, *sample) for a in answers for sample in a.first_versions]
    assert reported == ([(4, "a", 0, 0), (4, "b", 0, 0)] if running == "go_on" else [])
    aborted = [key for key, turn in turns.items() if turn.finish_reason == "abort"]
    assert aborted == (["a", "b"] if running == "abort" else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("work_raises", "RoleError: train.work failed on rank 1: LookupError: no luck on 1"),
        ("receive_raises", "RoleError: train.receive failed on rank 1: ZeroDivisionError"),
    ],
)
def test_an_error_outside_of_calls_ends_the_run_too(tmp_path, name, message):
    output = run_failing(name, 2, tmp_path, programs=PROGRAMS)
    assert message in output
    assert re.search(r'File ".*service_programs.py", line \d+, in (work|receive)\n', output)


@pytest.mark.slow
def test_work_that_never_ends_is_named_by_the_call_that_waits_for_it(tmp_path):
    output = run_failing("hanging", 2, tmp_path, programs=PROGRAMS)
    assert re.search(r"RoleError: train.answer is not done on ranks? .* after \d+\.\d s", output)
    assert "time.sleep(60)" in output
