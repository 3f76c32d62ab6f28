"""Programs that test_cluster.py runs under torchrun: cluster_programs.py NAME RESULT_FILE."""

import atexit
import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from roll_lite.cluster import cluster, watchdog
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.errors import RoleError
from roll_lite.cluster.role import split

EVENTS: list[str] = []  # what this rank has run, all roles together
MAP_OF_FOUR = "train=all,tp=2 left=0-1 right=2-3 wide=all narrow=1-2 lone=3 generate=all"


class Worker:
    def __init__(self, factor=1, *, place):
        self.place, self.factor = place, factor

    def describe(self):
        p = self.place
        tp_ranks = dist.get_process_group_ranks(p.mesh["tp"].get_group())
        dp_ranks = dist.get_process_group_ranks(p.mesh["dp"].get_group())
        control = dist.get_process_group_ranks(p.control)
        group = dist.get_process_group_ranks(p.group)
        return [p.role, p.rank, p.replica, p.tp_rank, dp_ranks, tp_ranks, control, group]

    def echo(self, *args, **kwargs):
        return args, kwargs

    def process(self):
        return os.getpid()

    def total(self, values):
        """The sum over replicas, by a collective of the role."""
        part = torch.tensor(sum(values) if self.place.tp_rank == 0 else 0)
        dist.all_reduce(part, group=self.place.group)
        return part.item() * self.factor

    def note(self, event):
        EVENTS.append(event)

    def events(self):
        return list(EVENTS)

    def meet(self, folder, name, names):
        """Wait until calls or programs of all these names have come here; whether they have."""
        (folder / name).touch()
        end = time.monotonic() + 60
        while not all((folder / other).exists() for other in names):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def fail(self, ranks, delay=0.0):
        if self.place.rank in ranks:
            time.sleep(delay * ranks.index(self.place.rank))
            raise LookupError(f"no luck on {self.place.rank}")
        return "fine"

    def fail_before_collective(self, rank):
        self.fail([rank])
        dist.all_reduce(torch.ones(1), group=self.place.group)

    def make_closure(self):
        return lambda: None

    def kill(self, rank, signum):
        if self.place.rank == rank:
            os.kill(os.getpid(), signum)
        dist.all_reduce(torch.ones(1), group=self.place.group)

    def stop_at_exit(self, rank):
        if self.place.rank == rank:
            atexit.register(os.kill, os.getpid(), signal.SIGSTOP)

    def hang(self, rank, seconds=600.0, file=None):
        if self.place.rank == rank:
            if file:
                file.touch()
            time.sleep(seconds)
        dist.all_reduce(torch.ones(1), group=self.place.group)

    def wait_for(self, rank, file):
        while self.place.rank == rank and not file.exists():
            time.sleep(0.01)

    def keep_the_lock(self, rank):
        if self.place.rank == rank:
            ctypes.PyDLL(None).sleep(600)  # a PyDLL does not release Python's lock


class Busy:
    def __init__(self):
        self.is_hanging = False

    def receive(self, name):
        self.is_hanging = True

    def work(self):
        while self.is_hanging:
            time.sleep(0.1)
        return False


class Raising(Worker):
    def receive(self, name):
        raise ArithmeticError(name)


class Lonely:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


def caught(action):
    """The error of a call: type, rank, cause and text."""
    try:
        action()
    except (RoleError, AttributeError, ValueError, TypeError) as error:
        cause = type(error.__cause__).__name__
        return [type(error).__name__, getattr(error, "rank", None), cause, str(error)]
    return None


def calls():
    """Everything that works, in one launch of four ranks."""
    out = {}
    with Cluster(MAP_OF_FOUR) as cluster:
        names = cluster.device_map.names
        roles = {name: cluster.role(name, Worker, factor=2) for name in names}
        out["places"] = {
            name: role.describe.options(collect="all")() for name, role in roles.items()
        }
        out["splits"] = check_splits(roles)
        out["no_place"] = cluster.role("lone", Lonely, value=[7] * 100).get()
        roles["lone"] = cluster.role("lone", Worker)
        out["overlap"] = check_overlap(roles)
        out["interleaved"] = check_interleaved(roles)
        out["threads"] = check_threads(roles)
        out["errors"] = check_errors(cluster, roles)
        out["after_errors"] = roles["train"].total(split([1, 2, 3]))
        out["same_everywhere"] = generate_and_train(cluster)
        roles["left"].note.start("late")  # not waited for here; leaving the block does
        start = time.monotonic()
    out["leaving"] = time.monotonic() - start
    return out


def check_splits(roles):
    train, wide = roles["train"], roles["wide"]
    plain = wide.echo(split(torch.arange(6).view(3, 2)), k=split(list("abcdef")))
    return {
        "tp": train.echo.options(collect="all")(split(list(range(100, 201))), "same"),
        "uneven": [[a[0].tolist(), kw["k"]] for a, kw in plain],
        "few": wide.echo(split([5])),
        "first": wide.echo(1, two=2),
        "replicas": train.echo.options(collect="replicas")(1),
        "chosen_first": wide.echo.options(collect="first")(split([1, 2, 3, 4])),
        "total": train.total(split(list(range(10)))),
    }


def check_overlap(roles):
    """Calls to disjoint roles wait for each other, and for this program to start both."""
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), ["left", "right", "both started"]
        futures = [roles[n].meet.options(collect="all").start(folder, n, names) for n in names[:2]]
        is_done = [future.done() for future in futures]
        (folder / "both started").touch()
        return [is_done, *[future.result() for future in futures]]


def check_interleaved(roles):
    """A thousand calls in flight at once to roles that overlap in part, with collectives inside."""
    order = ["wide", "narrow", "left", "narrow", "train"]
    futures = []
    for i in range(1000):
        role = roles[order[i % len(order)]]
        futures.append((2 * i * role.role.num_replicas, role.total.start([i])))
    wrong = [expected for expected, future in futures if future.result() != expected]
    return {"calls": len(futures), "wrong": wrong}


def check_threads(roles):
    """Several threads call overlapping roles; what each rank ran, in its order."""

    def work(thread):
        futures = []
        for i in range(60):
            name = ("wide", "narrow", "left", "right")[(i + thread) % 4]
            futures.append(roles[name].note.start(f"{name} {thread} {i}"))
        for future in futures:
            future.result()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return roles["wide"].events.options(collect="all")()


def check_errors(cluster, roles):
    wide, right = roles["wide"], roles["right"]
    return {
        "one": caught(lambda: wide.fail([2])),
        "several": caught(lambda: wide.fail([3, 1, 0], delay=0.2)),
        "typo": caught(lambda: wide.fial([2])),
        "closure": caught(lambda: right.make_closure()),
        "lambda": caught(lambda: wide.echo(lambda: None)),
        "init": caught(lambda: cluster.role("right", Worker, factr=2)),
        "collect": caught(lambda: wide.echo.options(collect="some")),
        "role": caught(lambda: cluster.role("critic", Worker)),
        "handle": caught(lambda: wide.echo(right)),
        "dict": caught(lambda: wide.echo(split({"a": 1}))),
    }


def eight():
    with Cluster("train=all,tp=2 wide=all narrow=1-5 left=0-3,tp=4") as cluster:
        names = cluster.device_map.names
        roles = {name: cluster.role(name, Worker, factor=2) for name in names}
        totals = cluster.role("train", Worker).total(split(list(range(10))))
        roles["train"] = cluster.role("train", Worker, factor=2)
        return {"interleaved": check_interleaved(roles), "totals": totals}


def same_everywhere():
    with Cluster("generate=all train=all") as cluster:
        return generate_and_train(cluster)


def same_then_killed():
    with Cluster("generate=all train=all") as cluster:
        Path(sys.argv[2]).write_text(json.dumps(generate_and_train(cluster)))
        print("ready", flush=True)
        cluster.role("train", Worker).kill(cluster.world_size - 1, signal.SIGKILL)


def generate_and_train(cluster):
    """A user's code that does not depend on the number of ranks."""
    generate = cluster.role("generate", Generator, seed=3)
    train = cluster.role("train", Worker, factor=5)
    prompts = [f"prompt {i}" for i in range(37)]
    parts = generate.answer(split(prompts), length=100)
    answers = [answer for part in parts for answer in part]
    future = train.total.start(split([sum(answer) for answer in answers]))
    total = sum(future.result()[:1])
    error = caught(lambda: train.fail([0]))
    return {"answers": answers, "total": total, "error": error[:3]}


class Generator:
    def __init__(self, seed):
        self.seed = seed

    def answer(self, prompts, length):
        return [[(self.seed * len(p) * int(p.split()[1]) + i) % 251 for i in range(length)]
                for p in prompts]  # fmt: skip


def failing(action):
    """Runs `action(train)` in a cluster whose `train` is on all ranks."""
    with Cluster("train=all") as cluster:
        train = cluster.role("train", Worker)
        print("ready", train.total([1]), flush=True)
        action(cluster, train)
    return {}


def restarted():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with Cluster("train=all") as cluster:
        train = cluster.role("train", Worker)
        total = train.total(split([1, 2, 3]))
        if attempt == 0:
            train.kill(1, signal.SIGKILL)
        return {"attempt": attempt, "total": total, "again": train.total([4])}


def spare_engine():
    """An engine of two ranks ends while it has no call; the other goes on."""
    with Cluster("train=0 generate=1-4,tp=2") as cluster:
        train, engines, reports = *two_roles(cluster), []
        engines.listen(lambda *report: reports.append(report), reports.append)
        pids = engines.process.options(collect="all")()
        os.kill(pids[3], signal.SIGKILL)
        wait_until(lambda: reports)
        ranks = [row[1] for row in engines.describe.options(collect="all")()]
        engines.post(1, "nothing")  # to the lost one: it has no effect
        again = []
        engines.listen(lambda *report: again.append(report), again.append)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[2:]))
        return {"reports": reports, "again": again, "ranks": ranks, "total": train.total([4])}


def last_engine():
    with Cluster("train=0 generate=1-2") as cluster:
        _, engines = two_roles(cluster)
        pids = engines.process.options(collect="all")()
        engines.post(1, "raise")
        wait_until(lambda: cluster._controller.lost)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: cluster._controller.failure)
        raise cluster._controller.failure


def engine_in_a_call():
    """Also ends if the program goes on after the error."""
    try:
        with Cluster("train=0 generate=1-2") as cluster:
            two_roles(cluster)[1].kill(2, signal.SIGKILL)
    except RoleError as error:
        print("RoleError:", error, flush=True)


def engine_before_sync():
    with Cluster("train=0 generate=1-2") as cluster:
        pids = two_roles(cluster, has_sync=False)[1].process.options(collect="all")()
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: cluster._controller.failure)
        raise cluster._controller.failure


def two_roles(cluster, has_sync=True):
    roles = cluster.role("train", Worker), cluster.role("generate", Raising)
    if has_sync:
        cluster.role("sync", Worker)
    print("ready", flush=True)
    return roles


def wait_until(condition):
    while not condition():
        time.sleep(0.01)


def hang_in_work(cluster, train):
    """First a slow rank; then one is stuck while no call waits for it."""
    call = train.wait_for.start(1, file := Path(sys.argv[2]))
    while not cluster._controller.pending()[0].is_slow:
        time.sleep(0.01)
    file.touch()
    call.result()
    cluster._watchdog._deadline = 2.0
    cluster.role("train", Busy).post(1, "hang")
    while not cluster._controller.failure:
        time.sleep(0.01)
    raise cluster._controller.failure


def fail_then_kill(cluster, train):
    """The last rank fails while the others wait for it in a collective; then it is killed."""
    print(caught(lambda: train.fail_before_collective(cluster.world_size - 1))[3], flush=True)
    train.kill(cluster.world_size - 1, signal.SIGKILL)


def raise_in_body(cluster, train):
    raise ZeroDivisionError("the recipe's own error")


def ignore_everything(cluster, train):
    train.kill.start(1, signal.SIGKILL)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            print("still here", flush=True)


FAILURES = {
    "killed_idle": lambda c, t: (t.echo(), Path(sys.argv[2]).touch(), time.sleep(600)),
    "stopped": lambda c, t: t.kill(c.world_size - 1, signal.SIGSTOP),
    "silent": lambda c, t: t.keep_the_lock(1),
    "slow_then_stuck": hang_in_work,
    "stuck": lambda c, t: t.hang.options(deadline=2)(c.world_size - 1),
    "one_fails_then_dies": fail_then_kill,
    "crash": lambda c, t: (t.hang.start(1), time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)),
    "exit": lambda c, t: (t.hang.start(1), time.sleep(1), os._exit(7)),
    "stopped_at_exit": lambda c, t: t.stop_at_exit(1),
    "controller_stopped": lambda c, t: os.kill(os.getpid(), signal.SIGSTOP),
    "body": raise_in_body,
    "stubborn": ignore_everything,
    "body_while_busy": lambda c, t: (t.hang.start(1), time.sleep(0.5), 1 / 0),
    "interrupted": lambda c, t: t.hang(1, file=Path(sys.argv[2])),
}  # fmt: skip


def main(name, result_file):
    if name == "silent":
        watchdog.HEARTBEAT_TIMEOUT = 4.0
    if name in ("stopped", "controller_stopped"):
        watchdog.STOPPED_SECONDS = 2.0
    if name == "stopped_at_exit":
        cluster.STOPPED_SECONDS = 2.0
    if name == "slow_then_stuck":
        watchdog.SLOW_SECONDS = 0.5
    result = failing(FAILURES[name]) if name in FAILURES else globals()[name]()
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:3])
