"""Runs as evidence: computed again, compared, and tested like code."""
