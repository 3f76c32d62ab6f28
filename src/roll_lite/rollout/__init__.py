"""Rollouts: every sample is a coroutine with a recorded life."""
