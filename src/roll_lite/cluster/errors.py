"""What went wrong on which rank, in words."""

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.cluster.device_map import listing


class RoleError(RuntimeError):
    """A role call failed: where, why, and what the ranks were doing."""

    def __init__(self, message: str, *, role: str, method: str, rank: int):
        super().__init__(message)
        self.role = role
        self.method = method
        self.rank = rank
        """The first that failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one rank, as it travels."""

    rank: int
    summary: str
    """Type and message in one line."""
    text: str
    """The traceback, from the role's own code on."""
    pickled: bytes | None
    """The exception itself, if it can be pickled."""


def describe_exception(rank: int, error: BaseException, own_frames: int) -> Failure:
    """`own_frames` of the cluster's own stand before the role's code."""
    frames = error.__traceback__
    for _ in range(own_frames):
        frames = frames.tb_next if frames and frames.tb_next else frames
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(rank, summarise(error), text, _pickle(error))


def summarise(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def role_error(
    role: str, method: str, failures: Sequence[Failure], unfinished: Sequence[int] = ()
) -> RoleError:
    """One error for the failures of a call, of which the first came first."""
    first, *others = failures
    lines = [f"{role}.{method} failed on rank {first.rank}: {first.summary}"]
    lines += [f"  then on rank {other.rank}: {other.summary}" for other in others]
    if unfinished:
        lines.append(f"  still running on {name_ranks(unfinished)}")
    if first.text:
        lines += [f"--- traceback of rank {first.rank} ---", first.text.rstrip()]
    error = RoleError("\n".join(lines), role=role, method=method, rank=first.rank)
    error.__cause__ = _unpickle(first.pickled)
    return error


def name_ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {listing(sorted(ranks), 'and')}"


def _pickle(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # whatever a user's class may raise; the text travels in any case
        return None


def _unpickle(data: bytes | None) -> BaseException | None:
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # its class may want other arguments, or not exist here
        return None
    return error if isinstance(error, BaseException) else None
