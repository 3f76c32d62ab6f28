"""Environments, which samples interact with. No torch here."""
