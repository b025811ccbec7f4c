"""The commit: fenced, set-oriented, one statement where it can be (decisions 1 and 4 to 9).

A batch goes out on one held connection. Commits that hold only hot parts are written by
`commit_batch` alone, in autocommit: that is the whole transaction in one round trip. The others
share a transaction in which the same statement comes first and the rare parts follow.

What was not accepted is read and judged. A commit that nothing speaks against met a busy row, of
its run or of what its rare parts touch; the latter leads to a batch that is sent one by one. Once
others of its batch are answered it is handed back as Busy, to travel with the next batch; alone it
is tried again for a moment first. A batch with data that cannot be stored is sent again one by one, and only
the culprit is refused; so is one that the server cannot do though it is there, and the culprit waits.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from perdure.protocol.errors import Unavailable, Unreadable
from perdure.protocol.ids import hex_of
from perdure.protocol.states import IllegalTransition
from perdure.store.commits import (
    Behind,
    Busy,
    Commit,
    CommitResult,
    Committed,
    LeaseLost,
    Refused,
)
from perdure.store.postgres import state_values
from perdure.store.postgres.batch import build, holds_only_hot_parts
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.errors import DataRefused, StillBusy, is_outage
from perdure.store.postgres.lanes import Lane, pause
from perdure.store.postgres.optional import call
from perdure.store.postgres.parts import Accepted, write_parts
from perdure.store.postgres.rows import hot_of
from perdure.store.postgres.statements import SQL
from perdure.store.rules import check_batch, check_path, judge

log = logging.getLogger(__name__)

BUSY_PATIENCE_S = 0.1
"""How long the rows of a whole batch may be busy before it is handed back."""

Results = dict[str, CommitResult]

_MOVED = "the thread or its state has moved"


class _Moved(DataRefused):
    """The thread of a lone commit says more than it allows, or holds other state than it expects."""


class Committer:
    """Writes batches on one lane, one after the other."""

    def __init__(self, lane: Lane, clock: Callable[[], datetime] | None) -> None:
        self._lane = lane
        self._clock = clock

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult | Busy]:
        """See `Store.commit`."""
        check_batch(commits)
        results: Results = {}
        pending = sorted(commits, key=lambda commit: commit.run_id)
        started, tries = time.monotonic(), 0
        while pending:
            if tries:
                await pause(tries - 1)
            await self._try(pending, results, queue_allowed=tries > 0, is_lone=len(commits) == 1)
            pending = [commit for commit in pending if commit.run_id not in results]
            tries += 1
            waited_s = time.monotonic() - started
            if pending and tries > 1 and (results or waited_s > BUSY_PATIENCE_S):
                break
        return [results.get(commit.run_id, Busy()) for commit in commits]

    async def _try(
        self, commits: Sequence[Commit], results: Results, *, queue_allowed: bool, is_lone: bool
    ) -> None:
        """Write what can be written and judge the rest; busy runs get no result.

        `is_lone`: no other commit was handed in, so that this one's trouble may be raised.
        """
        sent = [commit for commit in commits if _is_legal(commit)]
        hot = [commit for commit in sent if not queue_allowed and holds_only_hot_parts(commit)]
        rare = [commit for commit in sent if queue_allowed or not holds_only_hot_parts(commit)]
        guarded = [[commit] for commit in rare if _is_guarded(commit)]
        rare = [commit for commit in rare if not _is_guarded(commit)]
        refusals: dict[str, str] = {}
        for group, whole in ((hot, False), (rare, True), *((one, True) for one in guarded)):
            if group:
                await self._write_or_split(group, results, refusals, whole=whole, is_lone=is_lone)
        rest = [commit for commit in commits if commit.run_id not in results]
        if rest:
            await self._judge(rest, results, refusals)

    async def _write_or_split(
        self,
        commits: list[Commit],
        results: Results,
        refusals: dict[str, str],
        *,
        whole: bool,
        is_lone: bool,
    ) -> None:
        try:
            results |= await self._write(commits, whole=whole)
        except DataRefused as error:
            if len(commits) == 1:
                refusals[commits[0].run_id] = str(error)
                return
        except StillBusy:
            if len(commits) == 1:
                return
        except Unavailable as error:
            if is_outage(error) or is_lone:
                raise
            if len(commits) == 1:
                log.warning("a commit of %s has to wait: %s", commits[0].run_id, error)
                return
        else:
            return
        for commit in commits:
            await self._write_or_split([commit], results, refusals, whole=whole, is_lone=False)

    async def _write(self, commits: Sequence[Commit], *, whole: bool) -> Results:
        """Write a batch; return the results of the accepted ones."""
        clock = None if self._clock is None else self._clock()
        batch = build(commits)
        statement, arguments = call(
            "commit_batch", batch.present(commits), batch.arguments(clock, queue_allowed=whole)
        )

        async def alone(connection: Connection) -> Results:
            rows = await connection.fetch(statement, *arguments)
            return _results(_accepted(commits, rows))

        async def with_parts(connection: Connection) -> Results:
            async with connection.transaction():
                if commits[0].unmoved_since is not None:
                    await _check_unmoved(connection, commits[0])
                if commits[0].state_values and await state_values.have_moved(
                    connection, commits[0]
                ):
                    raise _Moved(_MOVED)
                rows = await connection.fetch(statement, *arguments)
                accepted = _accepted(commits, rows)
                await write_parts(connection, accepted, clock)
                for one in accepted:
                    if one.commit.state_values:
                        await _keep_state_values(connection, one)
            return _results(accepted)

        return await self._lane.run(with_parts if whole else alone)

    async def _judge(
        self, commits: Sequence[Commit], results: Results, refusals: dict[str, str]
    ) -> None:
        run_ids = [hex_of(commit.run_id) for commit in commits]
        rows = await self._lane.run(lambda c: c.fetch(SQL["load_hot"], run_ids))
        found = {row["run_id"].hex: row for row in rows}
        for commit in commits:
            verdict = _verdict(commit, found.get(hex_of(commit.run_id)), refusals)
            if verdict is not None:
                results[commit.run_id] = verdict


def _is_guarded(commit: Commit) -> bool:
    """Tell whether a commit may find that more than its run has moved: it is written by itself."""
    return commit.unmoved_since is not None or bool(commit.state_values)


async def _keep_state_values(connection: Connection, one: Accepted) -> None:
    """Write what fields hold that outlive the run, as the last rows that are locked."""
    if not await state_values.keep(connection, one.commit, one.at):
        raise _Moved(_MOVED)


async def _check_unmoved(connection: Connection, commit: Commit) -> None:
    """Lock the run's thread, before its row, which is never waited for; raise _Moved."""
    run = hex_of(commit.run_id)
    locked = await connection.fetch(SQL["lock_thread_of"], run)
    if not locked:
        return
    (row,) = await connection.fetch(
        SQL["moved_at"], locked[0]["thread_id"], commit.unmoved_since, run
    )
    if row["place"] is not None:
        raise _Moved(_MOVED)


def _verdict(commit: Commit, row: Row | None, refusals: dict[str, str]) -> CommitResult | None:
    """Return the answer for a commit that was not written; None when its row was only busy."""
    if row is None:
        return LeaseLost()
    try:
        hot = hot_of(row)
    except Unreadable as error:
        return Refused(reason=error.message)
    verdict = judge(commit, hot)
    if verdict is None and refusals.get(commit.run_id) == _MOVED:
        return Behind(seq=hot.last_seq)
    if verdict is None and commit.run_id in refusals:
        return Refused(reason=refusals[commit.run_id])
    return verdict


def _is_legal(commit: Commit) -> bool:
    try:
        check_path(commit)
    except IllegalTransition:
        return False
    return True


def _accepted(commits: Sequence[Commit], rows: Iterable[Row]) -> list[Accepted]:
    return [
        Accepted(
            commit=commits[int(row["i"]) - 1],
            at=row["at"],
            is_held=row["held"],
            queue_of=row["queue_of"],
        )
        for row in rows
    ]


def _results(accepted: Iterable[Accepted]) -> Results:
    return {
        one.commit.run_id: Committed(
            seq=one.commit.guard.expected_seq + len(one.commit.events), at=one.at
        )
        for one in accepted
    }
