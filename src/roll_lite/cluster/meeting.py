"""How the ranks find each other, also after torchrun has started them again.

torchrun's store outlives the ranks: after a restart it still holds the addresses of dead ones, and
nodes may count restarts differently. So rank 0 opens a new session, whose keys are its own, and
lets in whoever asks. A rank asks under a name it has just made up: an answer to that name cannot
come from the past.
"""

import json
import time
import uuid
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from roll_lite.cluster.errors import name_ranks
from roll_lite.cluster.members import Member, this_member
from roll_lite.cluster.world import MEETING_SECONDS, Launch

POLL_SECONDS = 0.02


def meet(launch: Launch) -> tuple[dist.Store, list[Member]]:
    """The store of this session, and the processes of all ranks."""
    torchruns = dist.TCPStore(
        launch.master,
        launch.port,
        launch.world_size,
        is_master=launch.rank == 0 and not launch.store_is_agents,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )
    store = dist.PrefixStore("roll_lite", torchruns)
    if launch.rank == 0:
        session, members = _open_session(store, launch.world_size)
        store.set(f"{session}/members", json.dumps([asdict(member) for member in members]))
    else:
        session = _join_session(store, launch.rank)
        members = [Member(**fields) for fields in json.loads(store.get(f"{session}/members"))]
    return dist.PrefixStore(session, store), members


def _join_session(store: dist.Store, rank: int) -> str:
    name = uuid.uuid4().hex
    store.set(f"asks/{rank}", json.dumps([name, asdict(this_member())]))
    session = store.get(f"welcome/{name}").decode()
    store.set(f"{session}/came/{rank}", "")
    return session


def _open_session(store: dist.Store, world_size: int) -> tuple[str, list[Member]]:
    """Answer every rank until all have come. What a dead rank once asked is answered in vain."""
    session = uuid.uuid4().hex
    others = range(1, world_size)
    asked: dict[int, list] = {}
    end = time.monotonic() + MEETING_SECONDS
    while not store.check([f"{session}/came/{rank}" for rank in others]):
        for rank in others:
            if not store.check([f"asks/{rank}"]):
                continue
            question = json.loads(store.get(f"asks/{rank}"))
            if question != asked.get(rank):
                asked[rank] = question
                store.set(f"welcome/{question[0]}", session)
        if time.monotonic() > end:
            missing = [r for r in others if not store.check([f"{session}/came/{r}"])]
            raise TimeoutError(f"{name_ranks(missing)} did not come within {MEETING_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return session, [this_member(), *(Member(**asked[rank][1]) for rank in others)]
