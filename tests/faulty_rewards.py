"""Rewards that fail for some replies, always the same ones."""

import os
import time
import zlib


def _percent(prompt, reply):
    return zlib.crc32(f"{prompt.id} {reply}".encode()) % 100


def sometimes_bad(prompt, reply):
    """One in a hundred hangs, another one crashes."""
    percent = _percent(prompt, reply)
    if percent == 0:
        time.sleep(1000)
    if percent == 1:
        os.abort()
    return float(len(reply))


def often_bad(prompt, reply):
    if _percent(prompt, reply) < 50:
        raise KeyError("no such word")
    return float(len(reply))
