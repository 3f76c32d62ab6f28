"""The ranks of a program as one: rank 0 runs the recipe, all ranks run the roles.

    with Cluster("train=0-3 generate=4-7") as cluster:      # every rank comes here
        trainer = cluster.role("train", Trainer, lr=1e-4)   # only rank 0 goes on
        trainer.step(batch)

Other ranks serve calls inside `__enter__` and leave the process from there. In a world of one there
are no threads and no RPC: calls are plain calls.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.futures import Future

from roll_lite.cluster import rpc
from roll_lite.cluster.call import Request
from roll_lite.cluster.codec import encode
from roll_lite.cluster.controller import Controller, Direct
from roll_lite.cluster.device_map import DeviceMap, auto_device_map, parse_device_map
from roll_lite.cluster.groups import make_places
from roll_lite.cluster.letters import Letter, Outbox
from roll_lite.cluster.meeting import meet
from roll_lite.cluster.network import choose_interface
from roll_lite.cluster.role import RoleHandle
from roll_lite.cluster.watch import Pulse, Watch
from roll_lite.cluster.worker import BUILD, Order, Worker
from roll_lite.cluster.world import choose_device, device_bytes, read_launch, start_group
from roll_lite.models.config import ModelConfig

DEADLINE = 1800.0
GROUP_MARGIN = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
IDLE_SECONDS = 0.5  # for a worker thread without a call to end
LEAVE_SECONDS = 3.0  # for ranks to hear that the program ends, and for a last call to end
CULPRIT_SECONDS = 0.5  # for news of a lost rank, when torchrun asks the controller to end
BLAME_SECONDS = 1.0  # others stay so much longer: torchrun blames whoever ends first


class Cluster:
    def __init__(
        self,
        device_map: DeviceMap | str = "auto",
        device: str = "auto",
        *,
        config: ModelConfig | None = None,
        roles: Sequence[str] = ("train", "generate"),
        role_configs: Mapping[str, ModelConfig] | None = None,
        deadline: float = DEADLINE,
    ):
        """`device_map` is a map, its text, or auto, which needs the model's `config`.

        With a `config`, the map is checked for the `roles` that the recipe uses; `role_configs` are
        of those that have another model. `deadline` is the number of seconds that a rank may spend
        in one role call, or in one collective.
        """
        if not deadline > 0:
            raise ValueError(f"deadline={deadline} must be above 0 seconds")
        self.deadline = deadline
        self._launch = read_launch()
        self.device = choose_device(device, self._launch)
        self.device_map, self._reasons = self._read_map(device_map, config, roles, role_configs)
        needs_sync = "train" in self.device_map and "generate" in self.device_map
        self._all_roles = self.device_map.with_sync() if needs_sync else self.device_map
        self._worker = Worker(self._launch.rank, self.device)
        self._issuer: Controller | Direct
        self._watch: Watch | None = None
        # A dead controller ends the lifeline as well, and with it this rank.
        self._reports = Outbox(0, "report", on_lost=lambda: None)
        self._leaving = threading.Event()
        self._exit_code, self._last_words = 0, ""

    @property
    def world_size(self) -> int:
        return self._launch.world_size

    def role(self, name: str, cls: type, **kwargs: Any) -> RoleHandle:
        """Make a worker object `cls(**kwargs)` on each rank of the role; returns when all are made.

        A class whose `__init__` has a parameter `place` is told its `Place`; one with `places` or
        `siblings`, those of all roles of its rank, or their worker objects.
        """
        role = self._all_roles[name]
        contents = [((cls,), kwargs)] * role.num_replicas
        self._issuer.issue(Request(role, BUILD, contents, "first", self.deadline)).result()
        if role.tp > 1 and hasattr(cls, "pause_for_call"):
            self._issuer.bind(role)
        return RoleHandle(self._issuer, role, cls, self.deadline, self.world_size == 1)

    def __enter__(self) -> "Cluster":
        if self._launch.rank == 0:
            print("\n".join([str(self.device_map), *self._reasons]), flush=True)
        if self.world_size == 1:
            self._start_alone()
            return self
        # Python's own handler of Ctrl-C would not run while C++ code waits for other ranks.
        handlers = self._set_signals({signal.SIGINT: signal.SIG_DFL})
        if self._launch.rank > 0:
            self._serve()
        self._start_controller()
        self._set_signals(handlers | {signal.SIGTERM: self._on_sigterm})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if self.world_size == 1:
            dist.destroy_process_group()
            return
        failed = True
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self._issuer.wait_for_all()
                failed = False
        finally:
            self._stop_controller(failed)

    def _read_map(
        self,
        device_map: DeviceMap | str,
        config: ModelConfig | None,
        roles: Sequence[str],
        role_configs: Mapping[str, ModelConfig] | None,
    ) -> tuple[DeviceMap, list[str]]:
        world_size = self._launch.world_size
        if device_map == "auto":
            if config is None:
                raise ValueError("device_map='auto' needs config=, the model's configuration")
            size, node = device_bytes(self.device), self._launch.local_world_size
            return auto_device_map(world_size, config, size, roles, ranks_per_node=node)
        if isinstance(device_map, str):
            device_map = parse_device_map(device_map, world_size)
        if device_map.world_size != world_size:
            raise ValueError(
                f"the device map is for {device_map.world_size} ranks, the program has "
                f"{world_size}; start it with torchrun --nproc-per-node {device_map.world_size}"
            )
        if config is not None:
            device_map.check(config, required=roles, role_configs=role_configs)
        return device_map, []

    def _start_alone(self) -> None:
        start_group(self.device, self._launch, dist.HashStore(), seconds=self.deadline)
        self._issuer = Direct(self._worker)
        self._worker.places = make_places(self._all_roles, 0, self.device, self._report)

    def _start_controller(self) -> None:
        choose_interface(self._launch)
        store, members = meet(self._launch)
        self._issuer = Controller(self._worker, self._all_roles, members)
        self._watch = Watch(self._issuer, self._worker, members)
        self._worker.on_fault = self._issuer.on_fault
        handlers = {"beat": self._watch.on_beat, "lifeline": rpc.hold_lifeline}
        handlers |= {"report": self._issuer.take_reports, "fault": self._issuer.on_fault}
        rpc.start(store, 0, self.world_size, handlers)
        try:
            self._watch.start()
            self._form_groups(store)
            self._watch.groups_have_formed()
        except Exception:
            self._stop_controller(failed=True)  # or the others would wait
            raise

    def _serve(self) -> NoReturn:
        """What every other rank does, until the controller is done."""
        choose_interface(self._launch)
        store, members = meet(self._launch)
        pulse = Pulse(self._worker, members, self._leave)
        handlers = {"call": self._take, "leave": self._leave, "lifeline": rpc.hold_lifeline}
        handlers["post"] = self._worker.post
        self._worker.on_fault = partial(rpc.send, 0, "fault")
        rpc.start(store, self._launch.rank, self.world_size, handlers | pulse.handlers())
        pulse.start()
        self._form_groups(store)
        # Ctrl-C is for the controller, which then tells the others.
        self._set_signals(
            {
                signal.SIGINT: signal.SIG_IGN,
                signal.SIGTERM: lambda *_: self._leave(128 + signal.SIGTERM),
            }
        )
        self._leaving.wait()
        pulse.stop()
        self._depart(is_neighbour=members[0].realm == members[self._launch.rank].realm)

    def _depart(self, is_neighbour: bool) -> NoReturn:
        """Leave the process, from a serving rank on the controller's host or on another."""
        is_idle = self._worker.stop(LEAVE_SECONDS if self._exit_code == 0 else 0)
        if self._last_words:
            print(f"rank {self._launch.rank} leaves: {self._last_words}", file=sys.stderr)
        if self._exit_code or not is_idle:
            if is_neighbour:
                time.sleep(BLAME_SECONDS)
            _exit_now(self._exit_code or 1)
        self._disconnect()
        raise SystemExit(0)

    def _form_groups(self, store: dist.Store) -> None:
        # The groups' own timeout comes later than the watch, whose error says more.
        start_group(self.device, self._launch, store, seconds=self.deadline + GROUP_MARGIN)
        rank = self._launch.rank
        self._worker.places = make_places(self._all_roles, rank, self.device, self._report)
        self._worker.start()

    def _report(self, role: str, replica: int, *args: Any) -> None:
        """What an object of this rank has to say to the controller."""
        if self._launch.rank == 0:
            self._issuer.take_reports([Letter(role, replica, args)])
        else:
            self._reports.put(Letter(role, replica, encode(args)))

    def _take(self, order: Order) -> Future:
        """Handler of a call: queues it; the worker thread answers."""
        answer = Future()
        self._worker.put(order, answer.set_result)
        return answer

    def _leave(self, exit_code: int, last_words: str = "") -> None:
        if not self._leaving.is_set():
            self._exit_code, self._last_words = exit_code, last_words
            self._leaving.set()

    def _on_sigterm(self, *_: Any) -> None:
        """torchrun ends all ranks when one fails; say which before going."""
        self._set_signals(dict.fromkeys(ENDING_SIGNALS, signal.SIG_IGN))
        end = time.monotonic() + CULPRIT_SECONDS
        while not self._issuer.failure and time.monotonic() < end:
            time.sleep(0.01)
        if self._issuer.failure:
            raise self._issuer.failure
        print("rank 0 leaves: SIGTERM, and no rank was lost", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)

    def _stop_controller(self, failed: bool) -> None:
        """Takes seconds at most, so signals that would cut it short are not heard."""
        handlers = self._set_signals(dict.fromkeys(ENDING_SIGNALS, signal.SIG_IGN))
        self._watch.stop()
        is_idle = self._worker.stop(IDLE_SECONDS if failed else LEAVE_SECONDS)
        failed = failed or not is_idle
        self._send_away(exit_code=int(failed))
        if failed:
            rpc.stop(clean=False)
        else:
            self._disconnect()
            self._set_signals(handlers)
        if not is_idle:  # it hangs, perhaps in a collective, whose destructor would hang too
            atexit.register(_exit_now, 1)

    def _send_away(self, exit_code: int) -> None:
        """Tell all other ranks to leave; whoever cannot hear it because it is stopped is killed."""
        answers = {}
        for rank in range(1, self.world_size):
            with suppress(RuntimeError):  # it is dead, as is well known by now
                answers[rank] = rpc.send(rank, "leave", exit_code, timeout=LEAVE_SECONDS)
        for rank, answer in answers.items():
            try:
                answer.wait()
            except RuntimeError:  # dead, gone before its answer was, or stopped
                self._watch.kill_if_stopped(rank)

    def _disconnect(self) -> None:
        dist.destroy_process_group()
        rpc.stop(clean=True)

    def _set_signals(self, handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
        """Returns the handlers of before. Only the main thread may set any."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}


def _exit_now(code: int) -> None:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
