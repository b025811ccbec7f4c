"""No signals: everybody finds news by looking. For drills, and where nothing can be passed on."""

from perdure.signals.local import LocalSignals


class NoSignals(LocalSignals):
    """Subscribers are never woken; they poll."""

    def publish(self, topic: str) -> None:
        """Wake nobody."""
