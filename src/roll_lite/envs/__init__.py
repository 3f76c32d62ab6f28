"""Environments: what a sample talks to. No torch here."""
