"""Errors of role calls: what failed, on which rank, and the traceback of that rank."""

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from roll_lite.checks import USER_ERROR, UserError
from roll_lite.device_map import listing
from roll_lite.own_code import OwnCode, find_own_code
from roll_lite.stopping import Ended


class RoleError(RuntimeError):
    """A role call failed, or a rank was lost."""

    def __init__(self, message: str, *, role: str, method: str, rank: int):
        super().__init__(message)
        self.role = role
        self.method = method
        self.rank = rank
        """The rank that failed first."""
        self.own: OwnCode | None = None
        """The user's code that it went through on the first rank where it did."""
        self.ranks: Sequence[int] = (rank,)
        """The ranks that failed with the same message as that."""

    @property
    def place(self) -> str:
        return f"{self.role}.{self.method} on {name_ranks(self.ranks)}"


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
    own: OwnCode | None = None
    """The user's code that it went through."""


def describe_exception(rank: int, error: BaseException) -> RankFailure:
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RankFailure(rank, summarise(error), text, _pickle(error), find_own_code(error))


def summarise(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def role_error(
    role: str, method: str, failures: Sequence[RankFailure], unfinished: Sequence[int] = ()
) -> RoleError:
    """One error for all failures of a call, in the order in which they arrived."""
    first, *later = failures
    lines = [f"{role}.{method} failed on rank {first.rank}: {first.summary}"]
    for summary, alike in groupby(later, lambda failure: failure.summary):
        lines.append(f"  then on {name_ranks([failure.rank for failure in alike])}: {summary}")
    if unfinished:
        lines.append(f"  still running on {name_ranks(unfinished)}")
    if first.text:
        lines += [f"--- traceback of rank {first.rank} ---", first.text.rstrip()]
    error = RoleError("\n".join(lines), role=role, method=method, rank=first.rank)
    error.__cause__ = _unpickle(first.pickled)
    shown = next((failure for failure in failures if failure.own), first)
    error.own = shown.own
    error.ranks = [failure.rank for failure in failures if failure.summary == shown.summary]
    return error


def own_code_of(error: BaseException) -> OwnCode | None:
    """The user's code that it went through, perhaps on another rank."""
    if isinstance(error, Ended) or isinstance(error.__cause__, Ended):
        return None
    return error.own if isinstance(error, RoleError) else find_own_code(error)


def exit_code_of(error: BaseException) -> int:
    """USER_ERROR where the user has to change something: a restart would meet the error again."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    if not isinstance(error, Exception):  # Ctrl-C
        return 1
    own = own_code_of(error)
    is_explained = isinstance(error, UserError) or isinstance(error.__cause__, UserError)
    return USER_ERROR if is_explained or (own and own.is_lasting) else 1


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
