"""The prefix cache against a record of what every page holds."""

import random

from roll_lite.engine.pages import PagePool

PAGE = 4


class Sequences:
    """Random sequences of two different tokens, so that many begin alike."""

    def __init__(self, seed: int):
        self.random, self.pool = random.Random(seed), PagePool(40, PAGE)
        self.held: list[tuple[list[int], list[int]]] = []
        self.prefix_in: dict[int, list[int]] = {}
        """By page: all tokens up to its last, on which its keys and values depend."""
        self.num_reused = 0

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, most))]

    def write(self, tokens: list[int], pages: list[int], start: int) -> None:
        for i in range(start // PAGE, len(tokens) // PAGE):
            self.prefix_in[pages[i]] = tokens[: (i + 1) * PAGE]

    def begin(self) -> None:
        tokens, pool = self.tokens(24), self.pool
        found = pool.find(tokens, (len(tokens) - 1) // PAGE)
        for i, page in enumerate(found):
            assert self.prefix_in[page] == tokens[: (i + 1) * PAGE]
        pages = pool.share(found)
        missing = pool.pages_for(len(tokens)) - len(pages)
        if missing > pool.num_free:
            pool.release(pages)
            return
        pages += pool.allocate(missing)
        self.write(tokens, pages, len(found) * PAGE)
        self.num_reused += len(found)
        if self.random.random() < 0.7:  # as at the end of a prefill
            pool.remember(tokens, pages, len(tokens))
        self.held.append((tokens, pages))

    def extend(self) -> None:
        tokens, pages = self.random.choice(self.held)
        before, more = len(tokens), self.tokens(6)
        missing = self.pool.pages_for(before + len(more)) - len(pages)
        if missing <= self.pool.num_free:
            tokens += more
            pages += self.pool.allocate(missing)
            self.write(tokens, pages, before)

    def end(self) -> None:
        tokens, pages = self.held.pop(self.random.randrange(len(self.held)))
        self.pool.remember(tokens, pages, len(tokens) - 1)
        self.pool.release(pages)

    def suspect(self) -> None:
        self.pool.forget(self.random.choice(self.held)[1])

    def change_weights(self) -> None:
        while self.held:
            self.end()
        self.pool.forget_all()
        assert not self.pool.find(self.tokens(24), 6)


def test_found_pages_hold_what_was_asked_for():
    lives = Sequences(seed=0)
    for step in range(20_000):
        action = lives.random.choices(["begin", "extend", "end", "suspect"], [5, 3, 5, 0.2])[0]
        getattr(lives, action if lives.held else "begin")()
        if step % 2000 == 1999:
            lives.change_weights()
    assert lives.num_reused > 1000 and lives.pool.num_free == lives.pool.num_pages
