"""What must not stand for long, given the time: only of a database that is being worked on."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.store.requests import TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A record at a time. `grace` is what a sweep may take: lease and interval."""

    record: RunRecord
    now: datetime
    grace: timedelta


@rule("L1", "No lease is expired for longer than a lease and a sweep take.", scope="live")
def leases_are_swept(moment: Moment) -> Found:
    expires_at = moment.record.hot.lease_expires_at
    if expires_at is not None and expires_at + moment.grace < moment.now:
        yield "run", f"the lease of {moment.record.hot.lease_owner} expired at {expires_at}"


@rule("L4", "No interrupt is pending for long after its expiry.", scope="live")
def expiries_are_swept(moment: Moment) -> Found:
    if moment.record.hot.lease_owner is not None:
        return
    for row in moment.record.pending:
        if row.expires_at is not None and row.expires_at + moment.grace < moment.now:
            yield row.interrupt_id, f"it is pending and expired at {row.expires_at}"


@rule(
    "L3",
    "No run that is to end (it was cancelled, its parent ended) goes on for long after its "
    "deadline for that.",
    scope="live",
)
def endings_are_swept(moment: Moment) -> Found:
    if moment.record.hot.lease_owner is not None:
        return
    for timer in moment.record.timers:
        if timer.kind is TimerKind.CLOSE and timer.due_at + moment.grace < moment.now:
            yield "run", f"it was to be closed at {timer.due_at}"


RULES = (leases_are_swept, expiries_are_swept, endings_are_swept)
