"""Profiles of a run: torch's profiler on some ranks for some steps and, on CUDA, their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError, parse_range
from roll_lite.options import Argument

MEMORY_EVENTS = 100_000
"""The newest allocations and frees that a snapshot keeps."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Profiles for performance work."""

    profile_steps: str = ""
    """Steps to profile, as 5 or 5-6: traces of torch's profiler and, on CUDA, a snapshot of the
    memory go to profile/ of the run folder."""
    profile_ranks: Argument[str] = "0"
    """Ranks to profile, as 0 or 0-3."""

    def __post_init__(self):
        parse_range("profile_steps", self.profile_steps)
        if parse_range("profile_ranks", self.profile_ranks) is None:
            raise UserError("profile_ranks is empty; name a rank, as 0")


class Profiler:
    """The controller's part: begins before the first of the steps and ends after the last."""

    def __init__(self, options: ProfileOptions, run_dir: str | Path, roles: Sequence[Any]):
        """`roles` are the handles of roles whose ranks may be profiled: of `Profiled` objects."""
        self._steps = parse_range("profile_steps", options.profile_steps) or range(0)
        self._ranks = list(parse_range("profile_ranks", options.profile_ranks))
        self._folder = f"{run_dir}/profile/steps_{options.profile_steps}"
        self._roles = roles
        self._is_running = False

    def at(self, step: int) -> None:
        """A step is about to begin."""
        if step in self._steps and not self._is_running:
            self._is_running = True
            for role in self._roles:
                role.start_profile.options(collect="all")(self._ranks)
        elif step not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the profile, if one is running."""
        if self._is_running:
            self._is_running = False
            for role in self._roles:
                role.stop_profile.options(collect="all")(self._folder)
            print(f"wrote {self._folder}", flush=True)


class Profiled:
    """A worker object that can profile its rank. Objects of one rank share one profile."""

    _running: Any = None  # a torch.profiler.profile

    def start_profile(self, ranks: list[int]) -> None:
        """Begin on this rank, if it is among `ranks` and has not begun."""
        import torch  # not above: options are read without it

        if torch.distributed.get_rank() not in ranks or Profiled._running:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        Profiled._running = torch.profiler.profile(activities=activities)
        Profiled._running.start()

    def stop_profile(self, folder: str) -> None:
        """Write the profile of this rank, if there is one."""
        import torch

        if Profiled._running is None:
            return
        running, Profiled._running = Profiled._running, None
        running.stop()
        name = Path(folder) / f"rank_{torch.distributed.get_rank()}"
        name.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(f"{name}.json.gz")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{name}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
