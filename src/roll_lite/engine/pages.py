"""The pages of the KV cache, with prefix caching.

A full page is found again by its tokens and all tokens before them, and shared: a prompt of many
samples, or a conversation that continues, is computed once. A released page keeps its content until
it is allocated again, the least recently used page first.
"""

from collections import OrderedDict
from itertools import count

_START = 0


class PagePool:
    """Pages 1 to num_pages; page 0 is scratch space without an owner."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages + 1))
        self._ref_counts = [0] * (num_pages + 1)
        # Content: (id of the prefix, tokens of the page) -> page. A page with known content gets an
        # id that is never used again, which names the prefix that ends with it: matches are exact.
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._content_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._prefix_id_of: dict[int, int] = {}
        self._new_prefix_id = count(_START + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        assert num_pages <= len(self._free), f"asked for {num_pages}, {len(self._free)} are free"
        pages = [self._free.popitem(last=False)[0] for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        self.forget(pages)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more sequence."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._free[page]
            self._ref_counts[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Free pages keep their content; a sequence's first pages are reallocated last."""
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0, f"page {page} was released twice"
            if self._ref_counts[page] == 0:
                self._free[page] = None
        pages.clear()

    def find(self, token_ids: list[int], max_pages: int) -> list[int]:
        """Pages that already hold a prefix of these tokens; not yet shared."""
        pages = []
        prefix_id = _START
        for i in range(min(max_pages, len(token_ids) // self.page_size)):
            page = self._page_of.get((prefix_id, self._tokens(token_ids, i)))
            if page is None:
                break
            pages.append(page)
            prefix_id = self._prefix_id_of[page]
        return pages

    def remember(self, token_ids: list[int], pages: list[int], num_tokens: int) -> None:
        """Record the content of the full pages among the first `num_tokens`."""
        prefix_id = _START
        for i in range(num_tokens // self.page_size):
            if pages[i] in self._prefix_id_of:  # recorded before: a prompt that samples share
                prefix_id = self._prefix_id_of[pages[i]]
                continue
            content = (prefix_id, self._tokens(token_ids, i))
            known = self._page_of.get(content)
            if known is None:
                known = pages[i]
                self._page_of[content] = known
                self._content_of[known] = content
                self._prefix_id_of[known] = next(self._new_prefix_id)
            prefix_id = self._prefix_id_of[known]

    def forget(self, pages: list[int]) -> None:
        """Stop these pages from being found by their content."""
        for page in pages:
            content = self._content_of.pop(page, None)
            if content is not None:
                del self._page_of[content]
                del self._prefix_id_of[page]

    def forget_all(self) -> None:
        """No page's content may be reused: the weights have changed."""
        self._page_of.clear()
        self._content_of.clear()
        self._prefix_id_of.clear()

    def _tokens(self, token_ids: list[int], page_index: int) -> tuple[int, ...]:
        start = page_index * self.page_size
        return tuple(token_ids[start : start + self.page_size])
