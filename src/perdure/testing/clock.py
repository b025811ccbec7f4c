"""A clock that stands still until a test moves it."""

from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


class FakeClock:
    """Call it for the time (aware, UTC, whole microseconds); `advance` moves it, also back."""

    def __init__(self, start: datetime = START) -> None:
        self._now = start

    def __call__(self) -> datetime:
        """Return the time."""
        return self._now

    def advance(self, seconds: float) -> datetime:
        """Move the clock by some seconds and return the new time."""
        self._now += timedelta(seconds=seconds)
        return self._now
