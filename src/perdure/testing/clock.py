"""Clocks that a test moves: one that stands still meanwhile, and one that goes on."""

import time
from datetime import UTC, datetime, timedelta

from perdure.protocol.base import from_micros

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


class ShiftingClock:
    """The system's clock for a store; `advance` moves it, so that what is due in time is due now."""

    def __init__(self) -> None:
        self._shift = timedelta()

    def __call__(self) -> datetime:
        """Return the time."""
        return from_micros(time.time_ns() // 1000) + self._shift

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._shift += timedelta(seconds=seconds)
