"""Python's garbage collector, while samples come and go by the thousand a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 20, 50)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage less often, and not among what is there already: a quarter more samples."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
