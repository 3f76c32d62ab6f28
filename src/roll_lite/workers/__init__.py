"""Rewards and environments in killable worker processes. No torch here."""
