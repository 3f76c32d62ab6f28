"""Profiles of a rank: torch's profiler and, on CUDA, the history of its memory."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENTS = 100_000
"""The newest allocations and frees that a snapshot keeps."""


class Profiled:
    """A worker object that can profile its rank. Objects of one rank share one profile."""

    _running: profile | None = None

    def start_profile(self, ranks: list[int]) -> None:
        """Begin on this rank, if it is among `ranks` and has not begun."""
        if dist.get_rank() not in ranks or Profiled._running:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        Profiled._running = profile(activities=activities)
        Profiled._running.start()

    def stop_profile(self, folder: str) -> None:
        """Write the profile of this rank, if there is one."""
        if Profiled._running is None:
            return
        running, Profiled._running = Profiled._running, None
        running.stop()
        name = Path(folder) / f"rank_{dist.get_rank()}"
        name.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(f"{name}.json.gz")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{name}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
