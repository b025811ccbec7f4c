"""What a campaign saw: figures, and findings, which make it fail."""

import time
from collections import Counter
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(slots=True)
class Record:
    """Figures and findings of a campaign. Counters are by name, times in seconds."""

    store: str
    seed: int
    began: float = field(default_factory=time.monotonic)
    findings: list[Finding] = field(default_factory=list[Finding])
    counts: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    progress_s: dict[str, float] = field(default_factory=dict[str, float])
    """The longest that a new run took after a fault, by fault."""

    longest_gap_s: float = 0.0
    """The longest time in which a client saw no run end while the load was on."""

    slow: list[str] = field(default_factory=list[str])
    """New runs that took long after a fault, with what happened to them when."""

    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Faults that this machine does not allow, each with its reason."""

    _last_end: float | None = None

    def found(self, check: str, text: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(check, text))

    def count(self, group: str, name: str, number: int = 1) -> None:
        """Add to a figure."""
        self.counts.setdefault(group, Counter())[name] += number

    def took(self, fault: str, seconds: float) -> None:
        """Note how long a new run took after a fault."""
        self.progress_s[fault] = max(self.progress_s.get(fault, 0.0), round(seconds, 2))

    def saw_end(self) -> None:
        """Note that a run has ended just now."""
        now = time.monotonic()
        if self._last_end is not None:
            self.longest_gap_s = max(self.longest_gap_s, round(now - self._last_end, 2))
        self._last_end = now

    def elapsed_s(self) -> float:
        """Return the time since the beginning."""
        return round(time.monotonic() - self.began, 1)

    def as_json(self) -> dict[str, JsonValue]:
        """Return all of it as one document."""
        groups: dict[str, JsonValue] = {
            name: dict(sorted(counter.items())) for name, counter in sorted(self.counts.items())
        }
        return {
            "store": self.store,
            "seed": self.seed,
            "seconds": self.elapsed_s(),
            "ok": not self.findings,
            "findings": [str(finding) for finding in self.findings],
            "longest_without_an_end_s": self.longest_gap_s,
            "progress_after_s": dict(sorted(self.progress_s.items())),
            "slow": list(self.slow),
            "left_out": dict(sorted(self.left_out.items())),
            **groups,
        }

    def as_text(self) -> str:
        """Return all of it for people."""
        lines = [f"{self.store}, seed {self.seed}, {self.elapsed_s()} s"]
        for name, counter in sorted(self.counts.items()):
            lines.append(f"{name}:")
            lines += [f"  {count:8} {what}" for what, count in sorted(counter.items())]
        lines.append("longest until a new run had ended after a fault, in seconds:")
        lines += [f"  {took:8.2f} {fault}" for fault, took in sorted(self.progress_s.items())]
        lines.append(f"longest time in which no run ended: {self.longest_gap_s:.1f} s")
        lines += [f"slow: {story}" for story in self.slow]
        lines += [f"left out: {fault}: {why}" for fault, why in sorted(self.left_out.items())]
        lines += [f"FOUND {finding}" for finding in self.findings]
        lines.append(f"{len(self.findings)} findings")
        return "\n".join(lines)
