"""Python's garbage collector, while samples come and go by the thousand a second."""

import gc

THRESHOLDS = (20_000, 20, 50)


class Garbage:
    """Looks less often, and not at what was there before; a quarter more samples a second."""

    def __init__(self):
        self._thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def restore(self) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
