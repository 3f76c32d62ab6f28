"""Options of environments and of their worker processes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roll_lite.checks import above, at_least
from roll_lite.envs.env import Player
from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.envs.registry import EnvMaker, make_env, read_envs


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Environments: a file of your own, worker processes."""

    envs: str | None = None
    """Python file with ENVS = {name: class or coroutine}, which come before those of the recipe."""
    env_workers: int = 4
    """Processes that play episodes, many in each; 0 plays them inline, for a debugger."""
    env_seconds: float = 10.0
    """Time limit of one step of an environment; an episode that takes longer has failed."""
    env_memory_gib: float = 2.0
    """Memory of a worker beyond its imports, for all its episodes."""
    env_error_share: float = 0.2
    """Stop the run when more than this share of the last 200 episodes failed."""

    def __post_init__(self):
        at_least(0, self, "env_workers")
        above(0, self, "env_seconds", "env_memory_gib")
        if not 0 <= self.env_error_share <= 1:
            raise ValueError(f"env_error_share={self.env_error_share} must be from 0 to 1 (never)")

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of EnvWorkers."""
        return {
            "num_workers": self.env_workers,
            "seconds": self.env_seconds,
            "memory_gib": self.env_memory_gib,
            "max_error_share": self.env_error_share,
        }

    def players(
        self, specs: Iterable[str], known: Mapping[str, EnvMaker], episodes: EpisodeOptions
    ) -> dict[str, Player]:
        """What plays the episodes of each environment."""
        makers = self.makers(known)
        return {spec: player(make_env(spec, makers), spec, episodes) for spec in specs}

    def knows(self, spec: str, known: Mapping[str, EnvMaker]) -> bool:
        """Whether a spec names an environment."""
        return spec.partition(":")[0] in self.makers(known)

    def makers(self, known: Mapping[str, EnvMaker]) -> dict[str, EnvMaker]:
        """Known environments by name, with those of the file."""
        return {**known, **(read_envs(self.envs) if self.envs else {})}
