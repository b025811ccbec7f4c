"""The rules of branches: what a thread says before its own messages, and who may change that.

A thread that was forked, or has adopted a branch, says first what another thread says up to a
position. Nothing is copied: the base names the place, and positions go on from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from pydantic import JsonValue

from perdure.protocol.codec import digest
from perdure.protocol.errors import Conflict, ThreadBusy
from perdure.protocol.records import BaseKind, ThreadBase, ThreadRow
from perdure.store.requests import NewRun


def branched(new: NewRun, active: str) -> NewRun:
    """Return a run that found its thread busy as the first one of a branch of that thread."""
    assert new.branch_thread_id is not None, "a run that may fork names the thread to make"
    return replace(new, thread_id=new.branch_thread_id, creates_thread=True, branches_from=active)


def branch_base(new: NewRun, thread_id: str, input_position: int, now: datetime) -> ThreadBase:
    """Return the base of a run's new thread; the place is that of the run that it branches from."""
    return ThreadBase(
        thread_id=new.thread_id,
        from_position=input_position - 1,
        base_thread_id=thread_id,
        base_position=input_position - 1,
        kind=BaseKind.FORK,
        author=new.caller.principal,
        run_id=new.branches_from,
        created_at=now,
    )


def adopted_base(thread: ThreadRow, branch: ThreadRow, author: str, now: datetime) -> ThreadBase:
    """Return the base of a thread that adopts a branch, which takes a position of the thread.

    Positions of the branch and those to come on the thread stay apart (see `ThreadBase`).
    """
    return ThreadBase(
        thread_id=thread.thread_id,
        from_position=max(thread.last_position, branch.last_position) + 1,
        base_thread_id=branch.thread_id,
        base_position=branch.last_position,
        kind=BaseKind.ADOPT,
        author=author,
        created_at=now,
    )


def check_adoption(
    thread: ThreadRow,
    branch: ThreadRow,
    bases: Sequence[ThreadBase],
    of_branch: Sequence[ThreadBase],
) -> ThreadBase | None:
    """Return the adoption that stands already, None when it can be made.

    `bases` are those of the thread. Raises Conflict for what is no branch of it, ThreadBusy while
    one of the two has an active run.
    """
    last = bases[-1] if bases else None
    if last is not None and last.kind is BaseKind.ADOPT:
        same = (last.base_thread_id, last.base_position)
        if same == (branch.thread_id, branch.last_position):
            return last
    if not any(
        base.kind is BaseKind.FORK and base.base_thread_id == thread.thread_id for base in of_branch
    ):
        raise Conflict("only a branch of the thread can be adopted by it")
    for busy in (thread, branch):
        if busy.active_run_id is not None:
            raise ThreadBusy(
                f"{busy.thread_id} has an active run", details={"run_id": busy.active_run_id}
            )
    return None


TAGS_MAX = 5
"""How many pairs of metadata threads are found by at once."""


def tags_of(metadata: Mapping[str, JsonValue]) -> frozenset[str]:
    """Return a digest for each pair of a thread's metadata: what it is found by."""
    return frozenset(digest([name, value]) for name, value in metadata.items())
