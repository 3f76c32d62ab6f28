"""An engine role that the coroutines of a coordinator ask, beside the one that generates."""

import asyncio
from collections.abc import Callable

from roll_lite.cluster.role import RoleHandle
from roll_lite.engine.request import Request
from roll_lite.rollout.loops import LoopThread, PumpedLoop
from roll_lite.rollout.options import RolloutOptions
from roll_lite.rollout.replicas import Replicas
from roll_lite.types import Turn


class Asking:
    def __init__(self, engines: RoleHandle):
        self.engines = engines
        self._replicas: Replicas | None = None

    def join(
        self, loop: LoopThread | PumpedLoop, on_fault: Callable[[BaseException], None]
    ) -> None:
        """Hear what the engines report, in the loop in which they are asked."""
        self._replicas = Replicas(self.engines, RolloutOptions(), on_fault)
        self._replicas.listen(loop)

    async def ask(self, request: Request) -> Turn:
        if self._replicas is None:
            raise RuntimeError(
                f"role {self.engines.role.name} is asked by nobody who listens; name this object "
                "in the coordinator's `asked`"
            )
        future = asyncio.get_running_loop().create_future()
        self._replicas.ask(request, [future])
        return await future
