"""Reward functions in killable worker processes. No torch here."""
