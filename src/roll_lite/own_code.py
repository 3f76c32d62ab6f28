"""The user's own code in an error: which frames are theirs, and whether a restart would meet it.

Theirs are files that were imported by their path, the script that was started unless it is one of
the package, and modules beside these.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.checks import UserError
from roll_lite.own_files import imported_files

PACKAGE = os.path.dirname(os.path.realpath(__file__))
RECIPES = os.path.realpath(os.path.join(PACKAGE, "recipes"))
"""Their code/ has files that users copy and edit."""
MAX_FRAMES = 5
MAX_CALLED = 8
MAX_LINES = 15
MAX_CHARACTERS = 1500
"""Longest message, which may hold a tensor."""
SYSTEM_TYPES = {"OSError", "MemoryError", "OutOfMemoryError", "AcceleratorError", "DistError"}
SYSTEM_WORDS = ("CUDA error", "NCCL", "gloo")
"""Errors that a restart may not meet again; those of torch by name, so that it is not needed."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """How an error went through the user's code, as data that a rank can send."""

    error: str
    """Type and message."""
    frames: tuple[str, ...]
    """The user's frames with their lines, innermost first."""
    called: tuple[str, ...]
    """What the first of these called, innermost last."""
    is_direct: bool
    """No code of the library stands between the user's and where it was raised."""
    is_lasting: bool
    """A restart would meet it again: neither the library nor the system raised it."""

    def __str__(self) -> str:
        called = ["which called", *self.called] if self.called else []
        return "\n".join([self.error, *self.frames, *called])


def is_own(file: str) -> bool:
    """Whether code in a file is the user's; that of no file has a name like <string>."""
    if not os.path.isabs(file) or _is_ours(file):
        return False
    started = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [*imported_files().values(), *([started] if started else [])]
    folders = {os.path.dirname(os.path.realpath(each)) for each in own}
    return os.path.dirname(os.path.realpath(file)) in folders


def find_own_code(error: BaseException) -> OwnCode | None:
    """None if the error did not go through any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if is_own(frame.filename)]
    if not own:
        return None
    called = frames[own[-1] + 1 :]
    is_direct = not any(map(_is_library, called))
    message = _message(error)
    return OwnCode(
        error=message,
        frames=_describe([frames[number] for number in reversed(own)][:MAX_FRAMES]),
        called=_describe(called[-MAX_CALLED:]),
        is_direct=is_direct,
        is_lasting=is_direct and not _is_of_system(error, message),
    )


def _is_library(frame: traceback.FrameSummary) -> bool:
    """Not what looks up a name or a key of the user's that does not exist."""
    return _is_ours(frame.filename) and frame.name not in ("__getattr__", "__getitem__")


def _is_ours(file: str) -> bool:
    path = os.path.realpath(file)
    is_code_of_recipes = path.startswith(f"{RECIPES}{os.sep}") and os.path.dirname(path) != RECIPES
    in_package = path.startswith((f"{PACKAGE}{os.sep}", f"{RECIPES}{os.sep}"))
    return os.path.isabs(file) and in_package and not is_code_of_recipes


def _describe(frames: Sequence[traceback.FrameSummary]) -> tuple[str, ...]:
    return tuple(
        f"  {_short(frame.filename)} line {frame.lineno}, in {frame.name}\n    {frame.line}"
        for frame in frames
    )


def _short(file: str) -> str:
    """Relative to the working directory, if it is below that."""
    try:
        path = os.path.relpath(file)
    except OSError:  # the working directory was removed
        return file
    return file if path.startswith(os.pardir) else path


def _message(error: BaseException) -> str:
    """Also of an exception that cannot say what it is."""
    lines = traceback.format_exception_only(error)
    text = str(error) if isinstance(error, UserError) else "".join(lines).rstrip()
    return "\n".join(text[:MAX_CHARACTERS].splitlines()[:MAX_LINES])


def _is_of_system(error: BaseException, message: str) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(SYSTEM_TYPES) or any(word in message for word in SYSTEM_WORDS)
