"""Rewards in processes of their own, which may hang and crash. No torch here."""
