"""How a call of a reward can fail. A reward's own exceptions come as they are, with a note."""


class RewardTimeout(RuntimeError):
    """The reward took longer than it may; its process was killed."""


class RewardCrash(RuntimeError):
    """The reward's process died, or was killed because it broke a limit."""


class RewardError(RuntimeError):
    """The reward raised what cannot travel between processes; the text says what it was."""


class RewardsBroken(RuntimeError):
    """So many calls failed that something is wrong with the rewards themselves."""
