"""Processes and devices. Only this package reads RANK, WORLD_SIZE and the like."""
