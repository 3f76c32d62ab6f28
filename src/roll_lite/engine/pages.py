"""The pages of the key/value cache: which are free, who holds the others, what they contain.

A full page whose tokens, and all tokens before them, come again is found by its content and shared:
a prompt that many samples start from, or a conversation that goes on, is computed once. A page that
nobody holds keeps its content until it is needed for something else, the longest unused first.
"""

from collections import OrderedDict
from itertools import count

_START = 0


class PagePool:
    """Pages 1 to num_pages; page 0 is scratch paper that nobody owns."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages + 1))
        self._holders = [0] * (num_pages + 1)
        # Content: (what stands before, the page's tokens) -> page. What stands before is a number
        # given to the page of that content once and never again, so a match is exact.
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._content_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._name_of: dict[int, int] = {}
        self._new_name = count(_START + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        assert num_pages <= len(self._free), f"asked for {num_pages}, {len(self._free)} are free"
        pages = [self._free.popitem(last=False)[0] for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = 1
            self._forget(page)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more holder."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Pages free again keep their content; the first of a sequence longest."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free[page] = None
        pages.clear()

    def find(self, token_ids: list[int], max_pages: int) -> list[int]:
        """Pages that hold the beginning of these tokens already; not yet shared."""
        pages, before = [], _START
        for i in range(min(max_pages, len(token_ids) // self.page_size)):
            page = self._page_of.get((before, self._tokens(token_ids, i)))
            if page is None:
                break
            pages.append(page)
            before = self._name_of[page]
        return pages

    def remember(self, token_ids: list[int], pages: list[int], num_tokens: int) -> None:
        """Note the content of the full pages among the first tokens."""
        before = _START
        for i in range(num_tokens // self.page_size):
            content = (before, self._tokens(token_ids, i))
            known = self._page_of.get(content)
            if known is None:
                known = pages[i]
                self._forget(known)
                self._page_of[content] = known
                self._content_of[known] = content
                self._name_of[known] = next(self._new_name)
            before = self._name_of[known]

    def is_free(self, page: int) -> bool:
        return self._holders[page] == 0

    def forget(self, pages: list[int]) -> None:
        """Let nobody find these by their content again."""
        for page in pages:
            self._forget(page)

    def forget_all(self) -> None:
        """No page's content may be used again: the weights have changed."""
        self._page_of.clear()
        self._content_of.clear()
        self._name_of.clear()

    def _forget(self, page: int) -> None:
        content = self._content_of.pop(page, None)
        if content is not None:
            del self._page_of[content]
            del self._name_of[page]

    def _tokens(self, token_ids: list[int], page_index: int) -> tuple[int, ...]:
        start = page_index * self.page_size
        return tuple(token_ids[start : start + self.page_size])
