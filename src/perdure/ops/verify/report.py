"""What a verification came to, in numbers."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """Counts. `moving` runs changed at every look and were left out, `unreadable` cannot be read.

    Both leave the rest unproven, so `is_clean` is about what was read.
    """

    runs: int = 0
    events: int = 0
    threads: int = 0
    moving: int = 0
    unreadable: int = 0
    by_check: Counter[str] = field(default_factory=Counter[str])

    @property
    def findings(self) -> int:
        """Return how many findings there were."""
        return self.by_check.total()

    @property
    def is_clean(self) -> bool:
        """Tell whether nothing was found."""
        return not self.by_check

    @property
    def read_all(self) -> bool:
        """Tell whether no run was left out."""
        return self.moving == 0 and self.unreadable == 0
