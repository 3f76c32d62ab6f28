"""Where two records of a sample, lines of rollouts/, differ: tokens, logprobs and reward."""

from collections.abc import Iterator, Sequence
from typing import Any

from roll_lite.report.reader import Row
from roll_lite.report.samples import Token, read_tokens
from roll_lite.report.tail import readable
from roll_lite.report.tokens import TokenTexts


class Difference:
    """Between the `row` that was recorded and one of the same sample, generated `again`."""

    def __init__(self, row: Row, again: Row, texts: TokenTexts):
        self._row, self._again = row, again
        self._old, self._new = read_tokens(row), read_tokens(again)
        self._texts = texts.of([{"token_ids": [token.id for token in (*self._old, *self._new)]}])
        self.token = _first([t.id for t in self._old], [t.id for t in self._new])
        """Place of the first token that differs, among all that were read and sampled."""
        self._num_same = len(self._old) if self.token is None else self.token
        same = slice(self._num_same)
        self.logprob = _first(
            [t.logprob for t in self._old[same]], [t.logprob for t in self._new[same]]
        )
        """Place of the first logprob that differs, before the first token that does."""

    @property
    def is_equal(self) -> bool:
        scores = [(row["reward"], row["parts"]) for row in (self._row, self._again)]
        return self.token is None and self.logprob is None and scores[0] == scores[1]

    def lines(self) -> Iterator[str]:
        is_same = self.token is None
        yield f"tokens: {f'all {len(self._old)} are equal' if is_same else self._at(self.token)}"
        if self.logprob is None:
            yield f"logprobs: bit for bit equal in the first {self._num_same} tokens"
        else:
            yield f"logprobs: {self._at(self.logprob)}; largest difference {self._largest():.3g}"
        yield from self._scores()
        if error := self._again["error"]:
            yield f"it failed now:\n{error}"
        if (before := self._row["reply"]) != (now := self._again["reply"]):
            yield f"reply recorded: {readable(before)}\nreply now: {readable(now)}"

    def _scores(self) -> Iterator[str]:
        row, again = self._row, self._again
        yield f"reward: recorded {row['reward']}, now {again['reward']}"
        for name in sorted(row["parts"].keys() | again["parts"].keys()):
            yield f"  {name}: recorded {row['parts'].get(name)}, now {again['parts'].get(name)}"
        for name in ("reason", "end"):
            if row.get(name) or again[name]:
                yield f"{name}: recorded {row.get(name)!r}, now {again[name]!r}"

    def _at(self, place: int) -> str:
        where = (self._old[place : place + 1] or self._new[place : place + 1])[0]
        kind = "read" if where.logprob is None else "sampled"
        both = ", ".join(
            f"{when} {self._token_text(tokens[place]) if place < len(tokens) else 'nothing'}"
            for when, tokens in (("recorded", self._old), ("now", self._new))
        )
        return f"first difference at token {place}, {kind} in turn {where.turn + 1}: {both}"

    def _largest(self) -> float:
        pairs = zip(self._old[: self._num_same], self._new, strict=False)
        return max(abs(o.logprob - n.logprob) for o, n in pairs if o.logprob is not None)

    def _token_text(self, token: Token) -> str:
        logprob = "" if token.logprob is None else f", logprob {token.logprob:.9g}"
        return f"{self._texts.get(token.id, '')!r} (id {token.id}{logprob})"


def _first(old: Sequence[Any], new: Sequence[Any]) -> int | None:
    """The first place where two lists differ; the end of the shorter one counts."""
    pairs = enumerate(zip(old, new, strict=False))
    at = next((place for place, (before, now) in pairs if before != now), None)
    return min(len(old), len(new)) if at is None and len(old) != len(new) else at
