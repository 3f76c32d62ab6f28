"""Untrusted Python programs, each run once in a process that can reach nothing. No torch here."""
