"""Runs untrusted Python programs, each once, in an isolated process. No torch here."""
