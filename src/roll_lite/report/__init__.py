"""What a run leaves behind: its folder and its console lines."""
