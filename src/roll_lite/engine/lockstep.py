"""How the ranks of a tensor-parallel engine agree when to work and when to run a call.

The first rank leads. The others follow it while letters or calls may have left something to do, and
come back when it has nothing, or when a call is next. Letters and calls reach each rank in its own
time, so each counts them, and two things never happen: a rank that follows a leader who has nothing
to do, and could not be called; and a rank that runs a call while the leader still works, or follows
again before it has run the call that the leader announced.
"""

from roll_lite.engine.ranks import Pause, RanksEngine


class Lockstep:
    def __init__(self, engine: RanksEngine):
        self._engine = engine
        self._num_events = 0
        """Letters and calls so far: each may leave something to do."""
        self._num_settled = 0
        """Of them, those that left nothing, as the leader says."""
        self._next_ticket: int | None = None
        """Of a call that the leader has announced, and this rank has not run."""

    @property
    def may_have_work(self) -> bool:
        return self._next_ticket is None and self._num_events > self._num_settled

    def count_letter(self) -> None:
        self._num_events += 1

    def settle(self) -> None:
        """The leader has nothing left to do, until the next letter or call."""
        if self.may_have_work:
            self._num_settled = self._num_events
            self._engine.pause(Pause(num_settled=self._num_settled))

    def follow(self) -> None:
        """Work with the leader until it pauses."""
        pause = self._engine.follow()
        self._next_ticket = pause.ticket
        if pause.ticket is None:
            self._num_settled = pause.num_settled

    def pause_for_call(self, ticket: int) -> None:
        """Returns when all ranks have stopped working, to run this call."""
        if self._engine.is_first:
            self._engine.pause(Pause(ticket=ticket))
        else:
            while self._next_ticket != ticket:
                self.follow()
            self._next_ticket = None
        self._num_events += 1
