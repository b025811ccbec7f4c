"""What may be said once in a whole database: looked for in bounded memory.

The digests of what was seen are kept in a set. When it grows too large it keeps only one partition of
them, by the digest's value, and the other partitions are looked at in further passes.
"""

import hashlib
from collections import Counter

MARKS_MAX = 500_000


class Marks:
    """What was seen of one partition out of `partitions`; the first pass may split it further."""

    def __init__(self, marks_max: int = MARKS_MAX) -> None:
        self.partitions = 1
        self._marks_max = marks_max
        self._partition = 0
        self._seen: set[int] = set()
        self._told: Counter[int] = Counter()
        """How often the first pass told of a mark, which may be left to a later one by a split."""

    def is_again(self, *parts: str) -> bool:
        """Tell whether this was seen before, as far as it belongs to the partition; note it.

        Over all passes, each time but the first that something is shown is told once.
        """
        mark = int.from_bytes(hashlib.sha256("\x1f".join(parts).encode()).digest()[:16], "big")
        if mark % self.partitions != self._partition:
            return False
        if mark in self._seen:
            return self._is_news(mark)
        self._seen.add(mark)
        while self._partition == 0 and len(self._seen) > self._marks_max:
            self.partitions *= 2
            self._seen = {seen for seen in self._seen if seen % self.partitions == 0}
        return False

    def next_partition(self) -> bool:
        """Begin another pass; False when every partition was looked at."""
        self._partition += 1
        self._seen.clear()
        return self._partition < self.partitions

    def _is_news(self, mark: int) -> bool:
        """Tell whether the first pass has not told of it yet."""
        if self._partition == 0:
            self._told[mark] += 1
            return True
        if mark not in self._told:
            return True
        self._told[mark] -= 1
        if not self._told[mark]:
            del self._told[mark]
        return False
