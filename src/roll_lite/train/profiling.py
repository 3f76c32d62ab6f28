"""Which steps and ranks of a run are profiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_lite.checks import parse_range, read_only_if
from roll_lite.cluster.role import RoleHandle


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Profiles for performance work."""

    profile_steps: str = ""
    """Steps to profile, as 5 or 5-6: traces of torch's profiler and, on CUDA, a snapshot of the
    memory go to profile/ of the run folder."""
    profile_ranks: str = "0"
    """Ranks to profile, as 0 or 0-3."""

    def __post_init__(self):
        parse_range("profile_steps", self.profile_steps)
        if parse_range("profile_ranks", self.profile_ranks) is None:
            raise ValueError("profile_ranks is empty; name a rank, as 0")
        read_only_if(bool(self.profile_steps), "profile_steps", self, "profile_ranks")


class Profiler:
    """Begins before the first of the steps and ends after the last."""

    def __init__(self, options: ProfileOptions, run_dir: str | Path, roles: Sequence[RoleHandle]):
        """`roles` are those whose ranks may be profiled; their objects are `Profiled`."""
        self._steps = parse_range("profile_steps", options.profile_steps) or range(0)
        self._ranks = list(parse_range("profile_ranks", options.profile_ranks))
        self._folder, self._roles = f"{run_dir}/profile/steps_{options.profile_steps}", roles
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
