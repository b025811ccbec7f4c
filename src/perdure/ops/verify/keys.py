"""Idempotency keys over all runs, in bounded memory (I27).

The digests of keys seen are kept in a set. When it grows too large it keeps only one partition of
them, by the digest's value, and the other partitions are looked at in further passes.
"""

import hashlib
from collections.abc import Callable

from perdure.ops.verify.checks import Check, Finding
from perdure.protocol.runs import RunRow

KEYS_MAX = 500_000

I27 = Check(
    id="I27",
    statement="An idempotency key of a tenant and agent leads to one run.",
    scope="store",
)


class Keys:
    """The keys of one partition out of `partitions`; the first pass may split it further."""

    def __init__(self, on_finding: Callable[[Finding], None], keys_max: int = KEYS_MAX) -> None:
        self.partitions = 1
        self._on_finding = on_finding
        self._keys_max = keys_max
        self._partition = 0
        self._seen: set[int] = set()

    def see(self, row: RunRow) -> None:
        """Take a run's key; report it when another run had the same."""
        key = row.facts.options.idempotency_key
        if key is None:
            return
        mark = _mark(row, key)
        if mark % self.partitions != self._partition:
            return
        if mark in self._seen:
            text = f"another run of {row.facts.tenant_id} and {row.facts.agent_id} has this key"
            self._on_finding(Finding(check=I27.id, run_id=row.facts.run_id, subject=key, text=text))
        self._seen.add(mark)
        while self._partition == 0 and len(self._seen) > self._keys_max:
            self.partitions *= 2
            self._seen = {seen for seen in self._seen if seen % self.partitions == 0}

    def next_partition(self) -> bool:
        """Begin another pass over all runs; False when every partition was looked at."""
        self._partition += 1
        self._seen.clear()
        return self._partition < self.partitions


def _mark(row: RunRow, key: str) -> int:
    text = "\x1f".join((row.facts.tenant_id, row.facts.agent_id, key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
