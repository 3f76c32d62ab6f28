"""A torchrun program as one cluster: rank 0 runs the recipe, all ranks run the roles.

    with Cluster("train=0-3 generate=4-7") as cluster:      # every rank gets here
        trainer = cluster.role("train", Trainer, lr=1e-4)   # only rank 0 continues
        trainer.step(batch)

All other ranks serve calls inside `__enter__` and exit from there. With world size 1 there are no
threads and no RPC: role calls are plain method calls.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.futures import Future

from roll_lite import progress
from roll_lite.checks import USER_ERROR, UserError
from roll_lite.cluster import wire
from roll_lite.cluster.controller import Controller, Exit, LocalController
from roll_lite.cluster.errors import RoleError, exit_code_of
from roll_lite.cluster.launch import choose_interface, end_torchrun, first_of_node, read_launch
from roll_lite.cluster.places import (
    DEVICES,
    choose_device,
    form_group_again,
    free_bytes,
    make_places,
    start_group,
)
from roll_lite.cluster.rank_monitor import ENDED, RankMonitor, fork_rank, needs_monitor
from roll_lite.cluster.rank_worker import BUILD, RankCall, Worker
from roll_lite.cluster.rendezvous import Session, describe, rendezvous
from roll_lite.cluster.role import Method, RoleHandle
from roll_lite.cluster.watchdog import STOPPED, Heartbeat, Watchdog
from roll_lite.cluster.wire import Mailbox, Post
from roll_lite.device_map import DeviceMap, listing, parse_device_map
from roll_lite.hub import download_weights, snapshots
from roll_lite.models.config import ModelConfig
from roll_lite.options import flatten
from roll_lite.processes import (
    STOPPED_SECONDS,
    StoppedProcesses,
    end_with_launcher,
    launcher_pid,
)
from roll_lite.stopping import Stopped, StopRequest

DEADLINE = 1800.0
GROUP_MARGIN = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
IDLE_SECONDS = 0.5  # for a worker thread to end after a failure
EXIT_SECONDS = 3.0  # for a rank to confirm that it exits, and for a last call to end
BLAME_SECONDS = 0.5  # after SIGTERM from torchrun: for news of the rank that failed
ENDED_SECONDS = 1.0  # for monitors to read that the run has ended, if this process has the store
POLL_SECONDS = 0.05
LINGER_SECONDS = 1.0  # other ranks exit later: torchrun reports the first to exit as the cause


class Cluster:
    def __init__(
        self,
        device_map: str,
        device: str = "auto",
        *,
        config: ModelConfig | None = None,
        roles: Sequence[str] = ("train", "generate"),
        role_configs: Mapping[str, ModelConfig] | None = None,
        options: Any = None,
        deadline: float = DEADLINE,
    ):
        """`device_map` is the text of a map.

        With a `config`, the map is checked for the `roles` that the recipe uses; `role_configs`
        are the configs of roles with a model of their own. `options` is the recipe's dataclass,
        which must be equal on all ranks; the weights of models that it has from the Hugging Face
        Hub are downloaded in `with`. `deadline` is the number of seconds that a rank may spend
        in one role call, in one piece of an object's `work`, or in one collective.

        Nothing starts before `with`, and no device is touched before `device` is read.
        """
        if not deadline > 0:
            raise UserError(f"deadline={deadline} must be above 0 seconds")
        if device not in DEVICES:
            raise UserError(f"device={device!r} is not known; use {listing(DEVICES, 'or')}")
        self.deadline = deadline
        self._launch = read_launch()
        self._device_option = device
        self.device_map = parse_device_map(device_map, self.world_size)
        if config is not None:
            self.device_map.check(config, required=roles, role_configs=role_configs)
        self._options = flatten(options) if options else {}
        self.free_bytes: int | None = None
        """The least memory that a rank's GPU had free when the ranks met; None on CPUs."""
        self._monitor: RankMonitor | None = None
        self._worker: Worker
        self._all_roles: DeviceMap
        self._controller: Controller | LocalController
        self._watchdog: Watchdog
        self._interface_variables: Sequence[str]
        # If the controller dies, the lifeline fails too and ends this rank.
        self._reports = Mailbox(0, "report", on_lost=lambda: None)
        self._exits: SimpleQueue[Exit] = SimpleQueue()

    @property
    def world_size(self) -> int:
        return self._launch.world_size

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self._device_option, self._launch)

    def role(self, name: str, cls: type, **kwargs: Any) -> RoleHandle:
        """Make a worker object `cls(**kwargs)` on each rank of the role; waits until all are made.

        If `__init__` has a parameter `place`, it gets the object's `Place`; `places` gets those of
        all roles of the rank, and `siblings` their worker objects.
        """
        role = self._all_roles[name]
        Method(self._controller, role, BUILD, self.deadline)(cls, **kwargs)
        if role.tp > 1 and hasattr(cls, "pause_for_call"):
            self._controller.run_in_lockstep(role)
        if self.world_size > 1 and name == ("sync" if "sync" in self._all_roles else "generate"):
            # Only now: making roles needs all ranks.
            self._controller.spare = self._session.monitored
        return RoleHandle(self._controller, role, cls, self.deadline)

    def __enter__(self) -> "Cluster":
        end_with_launcher()  # for programs without roll_lite.command, which has done it already
        if folders := snapshots(self._options):  # not before: the device map might be wrong
            first_of_node(f"weights {folders}", lambda: [*map(download_weights, folders)])
        if needs_monitor(self._launch, self.device_map):  # first: a fork cannot share a GPU
            self._monitor = fork_rank()
            self._launch = replace(self._launch, has_monitor=self._monitor is not None)
        device_map = self.device_map
        needs_sync = "train" in device_map and "generate" in device_map
        self._all_roles = device_map.with_sync() if needs_sync else device_map
        self._worker = Worker(self._launch.rank, self.device)
        if self._launch.rank == 0:
            print(device_map, flush=True)
        if self.world_size == 1:
            self._start_alone()
            return self
        # Python's own Ctrl-C handler would not run while C++ code waits for other ranks.
        handlers = _set_signals({signal.SIGINT: signal.SIG_DFL})
        if self._launch.rank > 0:
            progress.turn_off()
            self._serve()
        self._start_controller()
        _set_signals(handlers | {signal.SIGTERM: self._on_sigterm})
        return self

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        if self.world_size == 1:
            dist.destroy_process_group()
            for name in self._interface_variables:  # the next program may have several nodes
                del os.environ[name]
            return
        code = 1 if error is None else exit_code_of(error)
        try:
            is_exit = isinstance(error, SystemExit) and not error.code
            if error is None or is_exit or isinstance(error, Stopped):
                self._controller.wait_for_all()
                code = 0
        except RoleError as failure:
            code = exit_code_of(failure)
            raise
        finally:
            self._stop_controller(code)

    def _start_alone(self) -> None:
        self._interface_variables = choose_interface(self._launch)
        self._controller = LocalController(self._worker)
        self.free_bytes = free_bytes(self.device)
        self._make_places(dist.HashStore(), self.deadline)

    def _start_controller(self) -> None:
        session = self._session = self._rendezvous()
        self.free_bytes = session.free_bytes
        controller = Controller(self._worker, self._all_roles, session.processes)
        self._controller = controller
        self._watchdog = Watchdog(controller, self._worker, session.processes, self.deadline)
        self._worker.on_fault = controller.on_fault
        handlers = {
            "heartbeat": self._watchdog.on_heartbeat,
            "lifeline": wire.hold_lifeline,
            "report": controller.on_reports,
            "fault": controller.on_fault,
            "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
        }
        self._watchdog.start()  # now: a rank that is stopped would keep this one waiting
        wire.connect(session.store, 0, self.world_size, handlers)
        try:
            self._watchdog.hold_lifelines()
            self._form_groups(session.store)
            self._watchdog.groups_have_formed()
        except Exception:
            self._stop_controller(1)  # or the other ranks would wait
            raise

    def _serve(self) -> NoReturn:
        """The life of a rank other than 0: serve calls until the controller ends, then exit."""
        session = self._rendezvous()
        controller = session.processes[0]
        heartbeat = Heartbeat(self._worker, controller, self._on_lost, self._monitor)
        self._worker.on_fault = partial(wire.send, 0, "fault")
        handlers = {
            "call": self._on_call,
            "post": self._worker.post,
            "stack": self._worker.stack,
            "lifeline": wire.hold_lifeline,
            "exit": self._on_exit,
        }
        heartbeat.start()
        wire.connect(session.store, self._launch.rank, self.world_size, handlers)
        heartbeat.hold_lifeline()
        self._form_groups(session.store)
        if self._monitor:
            self._monitor.allow_failure(self._launch, session.name)
        # Ctrl-C reaches all ranks, SIGTERM perhaps only those of one machine: the controller
        # handles them, with the help of all ranks, and then ends these.
        _set_signals({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: _forward_sigterm})
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup sets
            _set_signals({signal.SIGHUP: _forward_sigterm})
        request = self._exits.get()  # only the first counts
        heartbeat.stop()
        self._exit_rank(request)

    def _rendezvous(self) -> Session:
        description = describe(self.device_map.text, self._options)
        return rendezvous(self._launch, description, free_bytes(self.device))

    def _form_groups(self, store: dist.Store) -> None:
        # The collectives' own timeout comes after the watchdog's, whose error says more.
        self._make_places(store, self.deadline + GROUP_MARGIN)
        self._worker.start()

    def _make_places(self, store: dist.Store, seconds: float) -> None:
        start_group(self.device, self._launch, store, seconds=seconds)
        rank = self._launch.rank
        regroup = partial(form_group_again, self.device, rank, store, seconds)
        self._worker.places = make_places(
            self._all_roles, rank, self.device, self._report, self._worker.lost, regroup
        )

    def _report(self, role: str, replica: int, *args: Any) -> None:
        """Send a report of a worker object on this rank to the controller."""
        if self._launch.rank == 0:
            self._controller.on_reports([Post(role, replica, args)])
        else:
            self._reports.put(Post(role, replica, wire.encode(args)))

    def _on_call(self, call: RankCall) -> Future:
        """Queue a call; the worker thread answers it."""
        answer = Future()
        self._worker.put(call, answer.set_result)
        return answer

    def _on_exit(self, request: Exit) -> None:
        if request.code == USER_ERROR:  # rank 0 says what is wrong, and ends the connections next
            wire.silence()
        self._exits.put(request)

    def _on_lost(self, reason: str) -> None:
        """The controller or torchrun is gone."""
        self._exits.put(Exit(1, reason))

    def _exit_rank(self, request: Exit) -> NoReturn:
        is_idle = self._worker.stop(0 if request.code else EXIT_SECONDS, finish=not request.code)
        if self._monitor:
            self._monitor.wake()
            if not request.is_lost:
                self._monitor.forbid_failure()
        if request.reason:
            print(f"rank {self._launch.rank} exits: {request.reason}", file=sys.stderr)
        if request.code == USER_ERROR:
            end_torchrun(USER_ERROR)
        if request.code or not is_idle:
            time.sleep(LINGER_SECONDS)
            _exit_now(request.code or 1)
        if not request.are_all_there:
            _exit_now(0)
        self._disconnect()
        raise SystemExit(0)

    def stop_request(self) -> StopRequest:
        """A context in which Ctrl-C and SIGTERM ask the recipe to stop; see stopping.py."""
        return StopRequest(self._raise_failure)

    def _raise_failure(self, signum: int) -> None:
        """torchrun sends SIGTERM to all ranks when one fails: report that rank."""
        if self.world_size == 1 or signum != signal.SIGTERM:
            return
        end = time.monotonic() + BLAME_SECONDS
        while not self._controller.failure and time.monotonic() < end:
            time.sleep(0.01)
        if self._controller.failure:
            raise self._controller.failure

    def _on_sigterm(self, *_: Any) -> None:
        _set_signals(dict.fromkeys(ENDING_SIGNALS, signal.SIG_IGN))
        self._raise_failure(signal.SIGTERM)
        print("rank 0 exits: SIGTERM, and no rank was lost", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)

    def _stop_controller(self, code: int) -> None:
        """End all ranks, with this exit code. It takes seconds at most, so signals are ignored
        meanwhile."""
        failed = code != 0
        handlers = _set_signals(dict.fromkeys(ENDING_SIGNALS, signal.SIG_IGN))
        self._watchdog.stop()
        is_idle = self._worker.stop(IDLE_SECONDS if failed else EXIT_SECONDS, finish=not failed)
        failed = failed or not is_idle
        code = code or int(failed)
        has_lost = bool(self._controller.lost)
        if self._session.monitored and not failed:
            self._session.store.set(ENDED, "")
        self._end_ranks(Exit(code, are_all_there=not has_lost))
        if failed:
            wire.disconnect(graceful=False, is_quiet=code == USER_ERROR)
        elif has_lost:
            self._worker.forget_objects()
            wire.disconnect(graceful=False)
            time.sleep(ENDED_SECONDS)
        else:
            self._disconnect()
        if not failed:
            _set_signals(handlers)
        if not failed and not has_lost:
            self._await_exits()
        if not is_idle:  # it may hang in a collective, whose destructor would hang too
            atexit.register(_exit_now, code)

    def _disconnect(self) -> None:
        self._worker.forget_objects()
        dist.destroy_process_group()
        wire.disconnect(graceful=True)

    def _await_exits(self) -> None:
        """Until the other ranks of this host have ended; torchrun would wait for a stopped one."""
        processes = self._session.processes
        stopped = StoppedProcesses(launcher_pid())
        while running := [process for process in processes[1:] if process.is_running]:
            for process, seconds in stopped.look(running).items():
                if seconds > STOPPED_SECONDS:
                    who = f"rank {processes.index(process)} ({process})"
                    print(f"{who} {STOPPED}, as all others end", file=sys.stderr, flush=True)
                    process.kill()
            time.sleep(POLL_SECONDS)

    def _end_ranks(self, request: Exit) -> None:
        """Tell all other ranks to exit."""
        if not request.code:  # or some ranks of a replica may wait for others that have left
            self._controller.wait_for_posts(EXIT_SECONDS)
        answers = []
        for rank in set(range(1, self.world_size)) - self._controller.lost:
            with suppress(RuntimeError):  # already dead
                answers.append(wire.send(rank, "exit", request, timeout=EXIT_SECONDS))
        for answer in answers:
            with suppress(RuntimeError):  # dead, or stopped: then torchrun kills it
                answer.wait()


def _set_signals(handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Returns the previous handlers."""
    return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}


def _forward_sigterm(*_: Any) -> None:
    with suppress(RuntimeError):  # the controller is dead; then the lifeline ends this rank
        wire.send(0, "sigterm")


def _exit_now(code: int) -> None:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
