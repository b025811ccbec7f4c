"""What a thread says: its own messages, and before them those of the threads it is based on (R-7.5).

A thread that was forked, or has adopted a branch, refers to another thread up to a position;
nothing is copied. Positions rise all along, so that one number is a place in all of it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from perdure.protocol.records import BaseKind, MessageRow, ThreadBase
from perdure.store.reader import Reader

POSITION_MAX = 2**31 - 1
BASES_MAX = 10_000
"""Threads that one thread goes back to; more are taken for a damaged database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The messages of one thread behind `after` and up to `until`."""

    thread_id: str
    after: int
    until: int


async def segments_back(reader: Reader, thread_id: str, until: int) -> AsyncIterator[Segment]:
    """Yield what a thread says up to a position, the last segment first."""
    for _ in range(BASES_MAX):
        bases = await reader.thread_bases(thread_id)
        base = base_at(bases, until)
        after = 0 if base is None else base.from_position
        if until > after:
            yield Segment(thread_id=thread_id, after=after, until=until)
        if base is None:
            return
        thread_id, until = base.base_thread_id, min(until, base.base_position)


def base_at(bases: Sequence[ThreadBase], until: int) -> ThreadBase | None:
    """Return what a thread is based on for readers of positions up to `until`.

    That is the last base before it; a thread that was forked has none but its base before that.
    """
    held = [base for base in bases if base.from_position <= until or base.kind is BaseKind.FORK]
    return held[-1] if held else None


async def messages_after(
    reader: Reader, thread_id: str, *, after: int, limit: int
) -> list[MessageRow]:
    """Return what a thread says behind a position, in order."""
    parts = list[Segment]()
    async for part in segments_back(reader, thread_id, POSITION_MAX):
        parts.append(part)
        if part.after <= after:
            break
    found: list[MessageRow] = []
    for part in reversed(parts):
        if part.until > after and len(found) < limit:
            found += await reader.list_messages(
                part.thread_id,
                after=max(after, part.after),
                limit=limit - len(found),
                until=part.until,
            )
    return found


async def messages_before(
    reader: Reader, thread_id: str, *, until: int, limit: int
) -> list[MessageRow]:
    """Return the last messages that a thread says up to a position, in order.

    A thread without a base has no gap in its positions: it is read at once.
    """
    after = max(0, until - limit)
    rows = await reader.list_messages(thread_id, after=after, limit=limit, until=until)
    if len(rows) == until - after:
        return rows
    found: list[MessageRow] = []
    async for part in segments_back(reader, thread_id, until):
        left = limit - len(found)
        rows = await reader.list_messages(
            part.thread_id, after=max(part.after, part.until - left), limit=left, until=part.until
        )
        found = [*rows, *found]
        if len(found) >= limit:
            break
    return found
