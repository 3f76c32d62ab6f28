"""Which pages of the key/value cache are free, and how many sequences hold each of the others."""

from collections import deque


class PagePool:
    """Pages 1 to num_pages; page 0 is scratch paper that nobody owns."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(1, num_pages + 1))
        self._holders = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), f"asked for {count} pages, {len(self._free)} are free"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more holder."""
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)
        pages.clear()
