"""Idempotency keys over all runs, in bounded memory (I27)."""

from collections.abc import Callable

from perdure.ops.verify.checks import Check, Finding
from perdure.ops.verify.marks import MARKS_MAX, Marks
from perdure.protocol.runs import RunRow

I27 = Check(
    id="I27",
    statement="An idempotency key of a tenant and agent leads to one run.",
    scope="store",
)


class Keys:
    """The keys of one partition; every pass sees all runs."""

    def __init__(self, on_finding: Callable[[Finding], None], keys_max: int = MARKS_MAX) -> None:
        self._on_finding = on_finding
        self._marks = Marks(keys_max)

    @property
    def partitions(self) -> int:
        """Return into how many parts the keys are split."""
        return self._marks.partitions

    def see(self, row: RunRow) -> None:
        """Take a run's key; report it when another run had the same."""
        key, facts = row.facts.options.idempotency_key, row.facts
        if key is not None and self._marks.is_again(facts.tenant_id, facts.agent_id, key):
            text = f"another run of {facts.tenant_id} and {facts.agent_id} has this key"
            self._on_finding(Finding(check=I27.id, run_id=facts.run_id, subject=key, text=text))

    def next_partition(self) -> bool:
        """Begin another pass over all runs; False when every partition was looked at."""
        return self._marks.next_partition()
