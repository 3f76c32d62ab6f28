"""The records of a run: its folder and its console lines."""
