"""How a cancel reaches a run and all below it in the memory store."""

from datetime import datetime

from perdure.protocol.states import TERMINAL
from perdure.store import rules
from perdure.store.memory.tables import Run, Tables
from perdure.store.requests import CancelWish


def cancel(tables: Tables, run: Run, wish: CancelWish, now: datetime) -> None:
    """Cancel an unfinished run and all below it; one that has a cancel as strong keeps it."""
    if rules.accepts_cancel(run.hot, wish):
        run.hot = rules.cancel(run.hot, wish, now)
        tables.append_one(run, rules.cancel_event(run.hot, wish))
        if run.hot.lease_owner is None:
            tables.begin_closing(run, now)
    for child in list(tables.runs.values()):
        facts = child.facts
        mine = facts.parent_run_id == run.facts.run_id and not facts.detached
        if mine and child.hot.state not in TERMINAL:
            cancel(tables, child, rules.cascaded(wish), now)
