"""The pages of a cache on the host: which are free, and how many rows share each."""

from collections.abc import Sequence


class Pages:
    """The pages 1 … count - 1; page 0 is nobody's.

    Attributes:
        size: tokens of a page.
    """

    def __init__(self, count: int, size: int):
        """All are free.

        Args:
            count: pages, with page 0.
            size: tokens of a page.
        """
        self.size = size
        self._free = list(range(count - 1, 0, -1))
        self._users = [0] * count

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the pages that some row has, and of all pages but nobody's."""
        count = len(self._users) - 1
        return (count - self.free) * self.size, count * self.size

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """How many so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Free pages, of which there must be enough."""
        assert count <= len(self._free), "the caller asked for room"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more row has them."""
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """A row has them no more; those that no row has are free."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
