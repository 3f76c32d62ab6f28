"""Errors of role calls: what failed, on which rank, and the traceback of that rank."""

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.device_map import listing


class RoleError(RuntimeError):
    """A role call failed, or a rank was lost."""

    def __init__(self, message: str, *, role: str, method: str, rank: int):
        super().__init__(message)
        self.role = role
        self.method = method
        self.rank = rank
        """The rank that failed first."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception that one rank raised, in a form that can be sent."""

    rank: int
    summary: str
    """Type and message in one line."""
    text: str
    """The traceback, starting at the role's own code."""
    pickled: bytes | None
    """The exception, if it can be pickled."""


def describe_exception(rank: int, error: BaseException) -> RankFailure:
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RankFailure(rank, summarise(error), text, _pickle(error))


def summarise(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def role_error(
    role: str, method: str, failures: Sequence[RankFailure], unfinished: Sequence[int] = ()
) -> RoleError:
    """One error for all failures of a call, in the order in which they arrived."""
    first, *later = failures
    lines = [f"{role}.{method} failed on rank {first.rank}: {first.summary}"]
    lines += [f"  then on rank {failure.rank}: {failure.summary}" for failure in later]
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
    except Exception:  # a user's class may raise anything; the text is sent in any case
        return None


def _unpickle(data: bytes | None) -> BaseException | None:
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # its __init__ may want other arguments, or its class not exist here
        return None
    return error if isinstance(error, BaseException) else None
