"""Reward functions: (prompt, reply) -> score. No torch here."""
