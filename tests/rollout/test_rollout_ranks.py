"""The coordinator over real engines, alone and on several ranks."""

import itertools
import json
import re
import shutil
import threading
from dataclasses import replace
from unittest.mock import ANY

import pytest
from support.forked_ranks import run_ranks
from support.launch import Program, run_failing
from support.paths import SUPPORT

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.data.tasks import prompts
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.engine.service import EngineService
from roll_lite.envs.play import question_player
from roll_lite.models.hf import load_model
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.prompts import derive_seed
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import SamplingParams

PROGRAMS = SUPPORT / "rollout_programs.py"


def test_alone_a_real_engine_gives_what_it_gives_by_itself(tiny_folder):
    """Compared with the engine itself, given the seeds of the groups; there is no thread."""
    chat, engine = Chat(tiny_folder), Engine(load_model(tiny_folder), kv_cache_gib=0.05)
    params = SamplingParams(max_tokens=12, stop_ids=chat.stop_ids)
    asked = list(itertools.islice(prompts("reverse:3", seed=0), 12))
    requests = [
        Request(
            prompt_ids=chat.encode(prompt.messages),
            params=params,
            num_samples=3,
            seed=derive_seed(7, prompt.id, 0),
        )
        for prompt in asked
    ]
    expected = engine.generate(requests)
    threads = threading.active_count()
    with Cluster("generate=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=tiny_folder, kv_cache_gib=0.05)
        with Coordinator(
            engines=engines,
            chat=chat,
            play=question_player({"reverse": lambda prompt, reply: float(len(reply))}),
            prompts=prompts("reverse:3", seed=0),
            params=params,
            options=RolloutOptions(samples_per_prompt=3, prompts_per_step=6, deadline=60),
            seed=7,
        ) as rollout:
            groups = rollout.collect() + rollout.collect()
            assert threading.active_count() == threads
            (greedy,) = rollout.answer(
                asked[:1], num_samples=1, params=SamplingParams(max_tokens=4, temperature=0.0)
            )
    assert len(greedy.samples[0].turns[0].token_ids) <= 4
    for group, turns in zip(groups, expected, strict=True):
        for sample, turn in zip(group.samples, turns, strict=True):
            assert sample.turns == [replace(turn, state=ANY, result=ANY)]


def with_model(folder, tiny_folder):
    """A folder for the results of programs, with a model in it."""
    shutil.copytree(tiny_folder, folder / "model")
    return folder


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return with_model(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def alone(tiny_folder, tmp_path_factory):
    """The samples of one rank."""
    folder = with_model(tmp_path_factory.mktemp("alone"), tiny_folder)
    return result("synchronous", 1, folder)


def result(name, num_ranks, folder):
    """What a program on forked ranks wrote."""
    run_ranks(num_ranks, PROGRAMS, name, folder / "result.json")
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_engines_on_several_ranks_give_the_samples_of_one(folder, alone, num_ranks):
    if num_ranks == 2:
        several = Program("synchronous", 2, folder, programs=PROGRAMS).result()
    else:
        several = result("synchronous", num_ranks, folder)
    assert len(alone["rows"]) == 3 * 8 * 3
    assert several["rows"] == alone["rows"]
    assert not alone["had_thread"]
    assert several["had_thread"] and not several["left"]


@pytest.mark.slow
def test_conversations_that_move_between_real_engines_stay_the_same(folder, tmp_path_factory):
    one = with_model(tmp_path_factory.mktemp("one"), folder / "model")
    alone, several = result("conversations", 1, one), result("conversations", 2, folder)
    assert several["num_later"] == 8 * 2 * 5 and several["num_moved"] > 0
    assert several["rows"] == alone["rows"]


@pytest.mark.slow
def test_real_engines_generate_during_training(folder):
    found = result("asynchronous", 3, folder)
    assert len(found["gaps"]) == 7 * 6 * 2 and set(found["states"]) == {"done"}
    assert min(found["gaps"]) >= 0 and max(found["gaps"]) == 1
    assert found["totals"]["rollout/failed"] == 0 and found["totals"]["rollout/retried"] > 0


@pytest.mark.slow
def test_ten_thousand_samples_over_real_ranks(folder):
    found = result("many", 4, folder)
    totals = found["totals"]
    assert len(found["ids"]) == len(set(map(tuple, found["ids"]))) == totals["rollout/done"]
    assert totals["rollout/done"] + totals["rollout/failed"] == totals["rollout/started"] == 10000
    assert totals["rollout/retried"] > 0
    print(f"{10000 / found['seconds']:.0f} samples a second")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_collect(folder):
    output = run_failing("dying", 2, folder, programs=PROGRAMS)
    assert re.search(r"RoleError: rank 1 \(generate; pid \d+ on .*\) died", output)


@pytest.mark.slow
def test_ctrl_c_ends_a_collect(folder):
    Program("interrupted", 2, folder, programs=PROGRAMS).check_ctrl_c()
