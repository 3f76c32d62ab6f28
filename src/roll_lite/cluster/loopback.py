"""A rendezvous for torchrun on one node whose store only this machine can reach. torchrun's own
stores listen on all interfaces, and do not ask who connects:

torchrun --rdzv-backend loopback --nproc-per-node 8 recipes/rlvr.py ...
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from roll_lite.checks import UserError

HOST = "127.0.0.1"
SECONDS = 600


class LoopbackRendezvous(StaticTCPRendezvous):
    def __init__(self, params: RendezvousParameters):
        if params.max_nodes > 1:
            raise UserError(
                f"--rdzv-backend loopback is for one node, but --nnodes is {params.max_nodes}; "
                "use c10d"
            )
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        super().__init__(HOST, port, 0, 1, params.run_id, SECONDS)
        seconds = timedelta(seconds=SECONDS)
        self._store = TCPStore(HOST, port, 1, True, seconds, master_listen_fd=listener.detach())

    def get_backend(self) -> str:
        return "loopback"


def handler() -> type[LoopbackRendezvous]:
    """For torchrun, which finds this by the entry point in setup.cfg."""
    return LoopbackRendezvous
