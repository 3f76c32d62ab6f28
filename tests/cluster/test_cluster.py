"""Role calls over real processes: torchrun programs with 1, 2, 4 and 8 gloo ranks.

The programs are in cluster_programs.py. Starting ranks takes seconds, so one launch of four ranks
serves all tests of what works, and the fast ones fork them; each way of ending needs a launch of
its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from itertools import combinations
from pathlib import Path

import pytest
import torch.distributed as dist
from support.cluster_programs import same_everywhere
from support.forked_ranks import run_ranks
from support.launch import GONE_SECONDS, Program, run_failing
from support.paths import PYTHONPATH, SCRIPTS, SUPPORT

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.launch import Launch, _interface_of, choose_interface
from roll_lite.cluster.role import split
from roll_lite.models.config import shape_config


@pytest.fixture(scope="module", params=["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def four(request, tmp_path_factory):
    """The results of the program `calls` on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    if request.param == "torchrun":
        program = Program("calls", 4, folder)
        return program.result() | {"output": program.output()}
    output = run_ranks(4, SUPPORT / "cluster_programs.py", "calls", folder / "calls.json")
    return json.loads((folder / "calls.json").read_text()) | {"output": output}


def test_the_table_is_printed_once_and_nothing_else(four):
    lines = four["output"].splitlines()
    assert [line.split()[0] for line in lines] == [
        "role", "train", "left", "right", "wide", "narrow", "lone", "generate",
        "torchrun's",  # store listens on all interfaces
    ]  # fmt: skip


def test_places_and_groups(four):
    # role, rank, replica, tp_rank, then the ranks of dp, tp, control and group
    assert four["places"]["train"] == [
        ["train", 0, 0, 0, [0, 2], [0, 1], [0, 1], [0, 1, 2, 3]],
        ["train", 1, 0, 1, [1, 3], [0, 1], [0, 1], [0, 1, 2, 3]],
        ["train", 2, 1, 0, [0, 2], [2, 3], [2, 3], [0, 1, 2, 3]],
        ["train", 3, 1, 1, [1, 3], [2, 3], [2, 3], [0, 1, 2, 3]],
    ]
    assert four["places"]["narrow"] == [
        ["narrow", 1, 0, 0, [1, 2], [1], [1], [1, 2]],
        ["narrow", 2, 1, 0, [1, 2], [2], [2], [1, 2]],
    ]
    assert [place[1] for place in four["places"]["lone"]] == [3]
    assert four["no_place"] == [7] * 100


def test_splits_and_collects(four):
    splits = four["splits"]
    first, second = list(range(100, 151)), list(range(151, 201))
    assert splits["tp"] == [
        [[first, "same"], {}], [[first, "same"], {}], [[second, "same"], {}], [[second, "same"], {}]
    ]  # fmt: skip
    assert splits["uneven"] == [
        [[[0, 1]], ["a", "b"]], [[[2, 3]], ["c", "d"]], [[[4, 5]], ["e"]], [[], ["f"]],
    ]  # fmt: skip
    assert splits["few"] == [[[[5]], {}], [[[]], {}], [[[]], {}], [[[]], {}]]
    assert splits["first"] == [[1], {"two": 2}]
    assert splits["replicas"] == [[[1], {}]] * 2
    assert splits["chosen_first"] == [[[1]], {}]
    assert splits["total"] == [2 * sum(range(10))] * 2


def test_disjoint_roles_work_at_the_same_time(four):
    is_done, *met = four["overlap"]
    assert is_done == [False, False] and met == [[True, True], [True, True]]


def test_a_thousand_interleaved_calls_to_overlapping_roles(four):
    assert four["interleaved"] == {"calls": 1000, "wrong": []}


def test_ticket_order_under_pipelined_calls_from_several_threads(four):
    events = four["threads"]
    per_role = {"wide": range(4), "narrow": (1, 2), "left": (0, 1), "right": (2, 3)}
    for rank, ran in enumerate(events):
        names = [name for name, ranks in per_role.items() if rank in ranks]
        assert len(ran) == len(set(ran)) == 60 * len(names)
        for thread in range(4):  # a thread's own calls ran in its order
            mine = [int(e.split()[2]) for e in ran if e.split()[1] == str(thread)]
            assert mine == sorted(mine)
    for one, other in combinations(events, 2):  # and any two ranks agree on what they share
        shared = set(one) & set(other)
        assert [e for e in one if e in shared] == [e for e in other if e in shared]


def test_errors_of_ranks_arrive(four):
    kind, rank, cause, text = four["errors"]["one"]
    assert (kind, rank, cause) == ("RoleError", 2, "LookupError")
    assert text.startswith("wide.fail failed on rank 2: LookupError: no luck on 2\n")
    assert re.search(r'File ".*cluster_programs.py", line \d+, in fail\n', text)
    kind, rank, cause, text = four["errors"]["several"]
    assert (kind, rank, cause) == ("RoleError", 3, "LookupError")
    assert text.splitlines()[:3] == [
        "wide.fail failed on rank 3: LookupError: no luck on 3",
        "  then on rank 1: LookupError: no luck on 1",
        "  then on rank 0: LookupError: no luck on 0",
    ]
    assert four["after_errors"] == [12, 12]  # the roles still work


@pytest.mark.parametrize(
    ("mistake", "kind", "message"),
    [
        ("typo", "AttributeError", "role wide, has no method fial; it has describe, echo, "),
        ("closure", "RoleError", "right.make_closure failed on rank 2: .*pickle"),
        ("lambda", "TypeError", "an argument of wide.echo cannot be sent: .*pickle.*; .*module"),
        ("init", "RoleError", "right.__init__ failed on rank [23]: TypeError: .*factr"),
        ("collect", "UserError", "collect='some' is not known; use first, replicas or all"),
        ("role", "UserError", "no role critic in the device map; it has train, left"),
        ("handle", "TypeError", "handle of role right stays with the controller"),
        ("dict", "TypeError", "split.. takes a list, tuple or tensor, not dict"),
    ],
)
def test_mistakes_are_named(four, mistake, kind, message):
    found, _, _, text = four["errors"][mistake]
    assert found == kind and re.search(message, text)


def test_exit_is_quick(four):
    assert four["leaving"] < 120  # seconds: less than a second, unless the machine is busy


@pytest.fixture(scope="module")
def alone():
    """What the program gives with world size 1."""
    return same_everywhere()


def test_world_size_one(alone):
    assert alone["error"] == ["RoleError", 0, "LookupError"]
    assert alone["total"] == 5 * sum(map(sum, alone["answers"]))


def test_four_ranks_give_the_result_of_one(four, alone):
    assert four["same_everywhere"] == alone


def test_two_ranks_give_the_result_of_one_and_a_killed_rank_is_named(alone, tmp_path):
    program = Program("same_then_killed", 2, tmp_path)
    program.wait_for(lambda: "ready" in program.output())
    assert program.end(within=GONE_SECONDS) != 0
    assert json.loads(program.result_file.read_text()) == alone
    who = r"rank 1 \(generate, train, sync; pid \d+ on .*\)"
    assert re.search(rf"RoleError: {who} died.*; train.kill was called \d", program.output())


@pytest.mark.slow
def test_one_rank_fails_while_others_wait_for_it_and_is_then_killed(tmp_path):
    output = run_failing("one_fails_then_dies", 4, tmp_path)
    assert "train.fail_before_collective failed on rank 3: LookupError: no luck on 3" in output
    assert "still running on ranks 0, 1 and 2" in output
    message = r"RoleError: rank 3 \(train; pid \d+ on .*\) died.*; train.kill was called \d"
    assert re.search(message, output)


@pytest.mark.slow
def test_a_rank_killed_while_it_has_no_call_is_named(tmp_path):
    program = Program("killed_idle", 2, tmp_path)
    program.wait_for(program.result_file.exists)
    os.kill(program.process_of_rank(1), signal.SIGKILL)
    assert program.end(within=GONE_SECONDS) != 0
    assert re.search(
        r"RoleError: rank 1 \(train; pid .*\) died.*; it had no call", program.output()
    )


@pytest.mark.slow
def test_a_run_goes_on_without_an_engine_that_others_replace(tmp_path):
    program = Program("spare_engine", 5, tmp_path)
    assert program.result() == {
        "reports": [[1, "lost"]], "again": [[1, "lost"]], "ranks": [1, 2], "total": 4,
    }  # fmt: skip
    said = r"^rank 4 \(generate, sync, feed1; pid .*\) died .*; .* the other engines, 1 of 2\. "
    assert len(re.findall(said, program.output(), re.MULTILINE)) == 1
    assert "Error" not in program.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last_engine", r"rank 1 \(.*\) died.*; it had no call"),  # the other has failed before
        ("engine_in_a_call", r"rank 2 \(.*\) died.*; generate.kill was called \d"),
        ("engine_before_sync", r"rank 2 \(.*\) died.*; it had no call"),
    ],
)
def test_a_run_ends_with_an_engine_that_it_needs(tmp_path, name, message):
    output = run_failing(name, 3, tmp_path)
    assert re.search(f"RoleError: {message}", output)
    said = (
        r"in receive\n(.*\n)+.*rank 2 \(.*\) failed in generate.receive \(ArithmeticError: raise\)"
    )
    assert bool(re.search(said, output)) == (name == "last_engine")


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_killed(tmp_path):
    output = run_failing("stopped", 2, tmp_path)
    message = (
        r"RoleError: rank 1 \(train; pid .*\) was stopped \(SIGSTOP\) and is killed; train.kill"
    )
    assert re.search(message, output)


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_all_others_end_is_named_and_killed(tmp_path):
    output = run_failing("stopped_at_exit", 2, tmp_path)
    assert re.search(r"rank 1 \(pid .*\) was stopped \(SIGSTOP\) and is killed, as all", output)


@pytest.mark.slow
def test_a_silent_rank_is_named_after_its_heartbeat_stops(tmp_path):
    output = run_failing("silent", 2, tmp_path)
    message = (
        r"RoleError: rank 1 \(train; pid .*\) sent no heartbeat for \d+ s; train.keep_the_lock"
    )
    assert re.search(message, output)


@pytest.mark.slow
def test_a_slow_rank_is_named_and_so_is_one_that_is_stuck_while_no_call_waits(tmp_path):
    output = run_failing("slow_then_stuck", 2, tmp_path)
    slow = r"^train.wait_for: rank 1 \(pid .*\) is slow; all other ranks answered \d+ s ago$"
    assert len(re.findall(slow, output, re.MULTILINE)) == 1
    assert re.search(
        r"RoleError: the work of rank 1 takes \d+\.\d s; its deadline is 2 s\n", output
    )
    assert re.search(r'--- rank 1 .* is at ---\n.*cluster_programs.py", line \d+, in work', output)


@pytest.mark.slow
def test_a_stuck_rank_is_named_with_its_stack(tmp_path):
    output = run_failing("stuck", 4, tmp_path)
    message = (
        r"RoleError: train.hang is not done on rank 3 after (\d+\.\d) s; its deadline is 2 s\n"
    )
    assert float(re.search(message, output)[1]) >= 2
    assert "waiting in a collective: ranks 0, 1 and 2\n" in output
    stack = re.search(r"--- rank 3 .* is at ---(.*?)--- rank 0", output, re.DOTALL)[1]
    assert "cluster_programs.py" in stack and "time.sleep(seconds)" in stack


@pytest.mark.slow
@pytest.mark.parametrize("name", ["crash", "exit"])
def test_serving_ranks_exit_when_the_controller_crashes(tmp_path, name):
    output = run_failing(name, 2, tmp_path)
    assert re.search(r"Root Cause.*rank +: 0 \(local_rank: 0\)", output, re.DOTALL)


@pytest.mark.slow
def test_a_stopped_controller_is_named_and_killed(tmp_path):
    output = run_failing("controller_stopped", 2, tmp_path)
    message = r"rank 1 exits: the controller \(rank 0, .*\) was stopped \(SIGSTOP\) and is killed"
    assert re.search(message, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["body", "body_while_busy"])
def test_an_error_of_the_recipe_ends_all(tmp_path, name):
    assert "ZeroDivisionError" in run_failing(name, 2, tmp_path)


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    Program("interrupted", 2, tmp_path).check_ctrl_c()


@pytest.mark.slow
def test_sigterm_blames_no_rank(tmp_path):
    program = Program("interrupted", 2, tmp_path)
    program.wait_for(program.result_file.exists)
    program.process.terminate()
    assert program.end(within=GONE_SECONDS) != 0
    assert "rank 0 exits: SIGTERM, and no rank was lost" in program.output()
    assert "RoleError" not in program.output()


@pytest.mark.slow
def test_ranks_exit_when_torchrun_is_killed(tmp_path):
    program = Program("interrupted", 2, tmp_path)
    program.wait_for(program.result_file.exists)
    program.process.kill()
    assert program.end(within=GONE_SECONDS) != 0


@pytest.mark.slow
def test_a_restarted_program_serves_calls_again(tmp_path):
    result = Program("restarted", 2, tmp_path, "--max-restarts=1").result()
    assert result == {"attempt": 1, "total": [6, 6], "again": 8}


@pytest.mark.slow
def test_a_recipe_that_does_not_react_is_ended(tmp_path):
    output = run_failing("stubborn", 2, tmp_path)
    assert re.search(r"RoleError: rank 1 \(train; pid \d+ on .*\) died", output)


@pytest.mark.slow
def test_eight_ranks(tmp_path):
    run_ranks(8, SUPPORT / "cluster_programs.py", "eight", tmp_path / "eight.json")
    found = json.loads((tmp_path / "eight.json").read_text())
    assert found == {"interleaved": {"calls": 1000, "wrong": []}, "totals": [45, 45, 45, 45]}


@pytest.mark.slow
def test_two_nodes_with_their_own_addresses(tmp_path, alone):
    script = SCRIPTS / "two_nodes.sh"
    result_file = tmp_path / "result.json"
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [script, SUPPORT / "cluster_programs.py", "same_everywhere", result_file]
    run = subprocess.run(command, env=env, timeout=1800, capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip("network namespaces are not allowed here")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(result_file.read_text()) == alone


class Counter:
    def __init__(self, start, place):
        self.count, self.place = start, place

    def add(self, numbers):
        self.count += sum(numbers)
        return self.count

    def who(self):
        return threading.current_thread(), sys._getframe()

    def divide(self):
        return 1 / 0


def test_alone_calls_are_plain_calls(capsys):
    threads = threading.active_count()
    with Cluster("train=all generate=0", "cpu") as cluster:
        counter = cluster.role("train", Counter, start=5)
        future = counter.add.start([1, 2])
        assert isinstance(future, Future) and future.done() and future.result() == 8
        assert counter.add(split([1])) == [9] and counter.add.options(collect="all")([1]) == [10]
        thread, frame = counter.who()
        while frame.f_code.co_name != "test_alone_calls_are_plain_calls":
            frame = frame.f_back  # a debugger can go up to here
        assert thread is threading.current_thread() and threading.active_count() == threads
        assert dist.get_backend() == "gloo"
        with pytest.raises(RoleError, match=r"train.divide failed on rank 0: ZeroDiv") as caught:
            counter.divide()
        error = caught.value
        assert (error.role, error.method, error.rank) == ("train", "divide", 0)
        assert error.__cause__.__traceback__.tb_next.tb_next.tb_frame.f_code.co_name == "divide"
    assert not dist.is_initialized()
    assert capsys.readouterr().out.startswith("role      ranks  tp  replicas\ntrain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "'auto' in the device map is not understood"),
        ({"device_map": "train=1"}, "role train: there is no rank 1; world size 1"),
        ({"device_map": "train=all", "deadline": 0}, "deadline=0 must be above 0"),
        ({"device_map": "train=all", "device": "tpu"}, "device='tpu' is not known"),
        ({"device_map": "train=all", "config": shape_config("qwen3-8b")}, "generate is missing"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**options)


def test_the_interface_towards_the_store(monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    loopback = _interface_of("127.0.0.1")
    choose_interface(Launch(world_size=2, local_world_size=1, port=1))
    assert "NCCL_SOCKET_IFNAME" not in os.environ  # on several nodes
    for name in names[:2]:
        del os.environ[name]
    with Cluster("train=all", "cpu"):
        assert {os.environ[name] for name in names} == {loopback}
    assert not os.environ.keys() & names
    # A host name may lead to the network: 192.0.2.1 is no address of this machine.
    choose_interface(Launch(world_size=2, local_world_size=2, master="192.0.2.1", port=1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["TP_SOCKET_IFNAME"] == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    choose_interface(Launch(world_size=2, local_world_size=2, port=1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    assert os.environ["NCCL_SOCKET_IFNAME"] == loopback
    assert _interface_of("192.0.2.1") is None
