"""Which of the trainers and the engines that share a device has it."""

import time
from collections.abc import Callable
from typing import Any

from roll_lite.cluster.role import RoleHandle
from roll_lite.device_map import DeviceMap
from roll_lite.engine.engine import OnNewWeights


class Colocated:
    """Hands devices that trainers and engines share from one to the other; the controller's part.

    |          | engines (engines_sleep) | trainers (offload)                             |
    |----------|-------------------------|------------------------------------------------|
    | generate | weights and KV cache    | in host memory                                 |
    | train    | nothing                 | on the device                                  |
    | sync     | weights, which are new  | a policy without adapters; others leave before |

    Without the option in brackets that side stays on the device. A policy with adapters is as large
    as the engine, and its frozen weights are on the host anyway: the engine reads them from there.
    """

    def __init__(
        self, device_map: DeviceMap, *, engines_sleep: bool = False, offload: bool = False
    ):
        self._sleeps, self._offloads = engines_sleep, offload
        self._trainers: list[RoleHandle] = []
        self._source: RoleHandle | None = None
        """Stays until the engines have its weights."""
        self.seconds: dict[str, float] = {}
        """Of the parts of the last step."""
        options = {"engines_sleep": engines_sleep, "offload": offload}
        is_shared = not set(device_map["train"].ranks).isdisjoint(device_map["generate"].ranks)
        for name in (name for name, is_on in options.items() if is_on and not is_shared):
            raise ValueError(
                f"{name}=True is for ranks that train and generate in turn, and device_map="
                f"{device_map.text!r} has none; leave it out"
            )

    def add(self, trainer: RoleHandle, *, stays_for_sync: bool = False) -> RoleHandle:
        """A role that only works between generations; it leaves the device for the next role."""
        self._trainers.append(trainer)
        if stays_for_sync:
            self._source = trainer
        if self._offloads:
            trainer.offload()
        return trainer

    def connect(self, engines: RoleHandle, sync: RoleHandle) -> None:
        """The engines, which have the devices until `to_training`."""
        self._engines, self._sync = engines, sync

    def to_training(self) -> None:
        """Generation has ended, for the next update."""
        self.seconds = {}
        if self._sleeps:
            self._timed("sleep", self._engines.sleep)
        if self._offloads:
            self._timed("reload", *(trainer.reload for trainer in self._trainers))

    def to_engines(self, version: int, running: OnNewWeights = "go_on") -> None:
        """New weights to the engines, for the next samples."""
        if self._offloads:
            first = (trainer for trainer in self._trainers if trainer is not self._source)
            self._timed("offload", *(trainer.offload for trainer in first))
        if self._sleeps:
            self._timed("wake", lambda: self._engines.wake("weights"))
        self._timed("sync", lambda: self._sync.sync(version, running))
        if self._offloads and self._source:
            self._timed("offload", self._source.offload)
        if self._sleeps:
            self._timed("wake", self._engines.wake)

    def digest(self) -> str:
        """Of the engines' weights; another text for other weights."""
        return "".join(sorted({*self._sync.digest.options(collect="all")()}))

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds of handing over, where memory changes hands; time/sync and time/prepare include
        them."""
        is_shared = self._sleeps or self._offloads
        return {f"colocated/{k}": v for k, v in self.seconds.items()} if is_shared else {}

    def _timed(self, name: str, *calls: Callable[[], Any]) -> None:
        start = time.perf_counter()
        for call in calls:
            call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
