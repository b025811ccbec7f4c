"""Group commit without timers: while one batch is being written the next gathers.

One lane: batches go to the store one after another, at most one commit of a run in each. Those who
were answered together are likely to commit again: they have their turns before the next batch goes.
Where the store writes in another process, only half of a large batch is answered at once, and the
rest when the next batch is on its way: neither process waits for the other.
A commit's answer is its own; the batch is only how it travels. One whose row was locked by somebody
else travels again a little later, and keeps no other waiting.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint

from perdure.engine.core import Core
from perdure.engine.lease import LeaseGone
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.states import TERMINAL
from perdure.signals.ports import QUEUE_TOPIC, end_topic, run_topic, thread_topic
from perdure.store.commits import Busy, Commit, CommitResult, Committed

log = logging.getLogger(__name__)

QUIET_TURNS = 3
"""So many turns of the loop may pass between an answer and the next commit of its run."""
HALVE_FROM = 8
"""A batch of so many is answered in two parts where the store writes in another process."""
BUSY_PAUSE_S = 0.01
BUSY_PAUSE_MAX_S = 0.25
BUSY_MAX_S = 10.0
"""A row that stays locked so long is taken for an unavailable store."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A commit on its way. A bare future: an event for each costs several times as much."""

    commit: Commit
    answer: "asyncio.Future[CommitResult]"
    result: CommitResult | None = None
    error: Exception | None = None
    busy: int = 0
    """How often its row was locked by another writer."""
    since: float = 0.0

    def resolve(self, result: CommitResult) -> None:
        """Hand the store's answer to whoever waits."""
        self.result = result
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that there is no answer, unless there is one."""
        if self.result is not None:
            return
        self.error = error
        if not self.answer.done():
            self.answer.set_exception(error)

    def answer_again(self) -> "asyncio.Future[CommitResult]":
        """Return a future for whoever was cancelled, with the answer if it came in that moment."""
        if self.answer.cancelled():
            self.answer = self.answer.get_loop().create_future()
            if self.error is not None:
                self.answer.set_exception(self.error)
            elif self.result is not None:
                self.answer.set_result(self.result)
        return self.answer


class Committer:
    """The one way of a worker to the store's commit. `run` must be running meanwhile."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._queue: deque[_Waiting] = deque()
        self._busy: set[_Waiting] = set()
        self._rest: list[tuple[_Waiting, CommitResult]] = []
        """What is written and not answered yet."""
        self._bell = anyio.Event()
        self._stopped = False

    async def commit(self, commit: Commit) -> CommitResult:
        """Return the store's answer. Raises Unavailable or StoreFull when it gave none; whatever
        else the store raises on this commit is raised here, and concerns no other commit.

        After Unavailable the outcome is unknown: send the same commit again. Raises LeaseGone
        when `run` was cancelled: the worker is going down and nobody would answer.

        A caller that is cancelled meanwhile gets the answer all the same, and its cancellation at
        its next checkpoint: nothing of it is on its way any more when this ends.
        """
        if self._stopped:
            raise LeaseGone
        waiting = _Waiting(commit, asyncio.get_running_loop().create_future())
        sent_s = self._core.clock.monotonic()
        self._queue.append(waiting)
        self._bell.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                return await waiting.answer_again()  # noqa: ASYNC104  # delivered again later
            raise
        finally:
            took_s = self._core.clock.monotonic() - sent_s
            self._core.metrics.engine.commit_seconds.observe(took_s)

    async def run(self) -> None:
        """Write batches until cancelled; whoever still waits then is told so."""
        batch: list[_Waiting] = []
        try:
            async with anyio.create_task_group() as again:
                while True:
                    if not self._queue and not self._rest:
                        self._bell = anyio.Event()
                        await self._bell.wait()
                    if len(batch) > 1:
                        await self._let_gather()
                    if not self._queue:  # nobody of those who were answered goes on at once
                        self._answer_rest()
                        continue
                    batch = self._take()
                    asyncio.get_running_loop().call_soon(self._answer_rest)  # when it was sent
                    await self._write(batch, again)
        finally:
            self._stopped = True
            self._answer_rest()
            for waiting in [*batch, *self._queue, *self._busy]:
                waiting.fail(LeaseGone())

    async def _let_gather(self) -> None:
        """Let turns of the loop pass until a few have added no commit to those that wait."""
        seen = quiet = 0
        while quiet < QUIET_TURNS and len(self._queue) < self._core.settings.commit_batch_max:
            quiet = quiet + 1 if seen == len(self._queue) else 0
            seen = len(self._queue)
            await checkpoint()

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        runs: set[str] = set()
        later: list[_Waiting] = []
        while self._queue and len(batch) < self._core.settings.commit_batch_max:
            waiting = self._queue.popleft()
            if waiting.commit.run_id in runs:
                later.append(waiting)
            else:
                runs.add(waiting.commit.run_id)
                batch.append(waiting)
        self._queue.extendleft(reversed(later))
        return batch

    async def _send_later(self, waiting: _Waiting) -> None:
        """Put a commit whose row was busy into a later batch; give up after a while."""
        now = self._core.clock.monotonic()
        waiting.since = waiting.since or now
        waiting.busy += 1
        if now - waiting.since > BUSY_MAX_S:
            waiting.fail(Unavailable("the run's row stayed locked by another writer"))
            return
        self._busy.add(waiting)
        await anyio.sleep(min(BUSY_PAUSE_MAX_S, BUSY_PAUSE_S * 2**waiting.busy))
        self._busy.discard(waiting)
        self._queue.append(waiting)
        self._bell.set()

    async def _write(self, batch: list[_Waiting], again: anyio.abc.TaskGroup) -> None:
        try:
            results = await self._core.store.commit([waiting.commit for waiting in batch])
        except PerdureError as error:
            for waiting in batch:
                waiting.fail(error)
            return
        except Exception as error:
            if len(batch) > 1:  # one of them is at fault: the others are written
                for waiting in batch:
                    await self._write([waiting], again)
                return
            log.exception("a commit of %s brought the store down", batch[0].commit.run_id)
            batch[0].fail(error)
            return
        self._core.metrics.engine.commit_batch.observe(len(batch))
        self._answer(batch, results, again)
        committed = 0
        for waiting, result in zip(batch, results, strict=True):
            if isinstance(result, Committed):
                committed += 1
                announce(self._core, waiting.commit)
            else:
                self._count(type(result).__name__, 1)
        self._count(Committed.__name__, committed)

    def _answer(
        self,
        batch: Sequence[_Waiting],
        results: Sequence[CommitResult | Busy],
        again: anyio.abc.TaskGroup,
    ) -> None:
        halves = len(batch) >= HALVE_FROM and self._core.store.writes_aside
        at_once = (len(batch) + 1) // 2 if halves else len(batch)
        for place, (waiting, result) in enumerate(zip(batch, results, strict=True)):
            if isinstance(result, Busy):
                again.start_soon(self._send_later, waiting)
            elif place < at_once:
                waiting.resolve(result)
            else:
                self._rest.append((waiting, result))

    def _answer_rest(self) -> None:
        rest, self._rest = self._rest, []
        for waiting, result in rest:
            waiting.resolve(result)

    def _count(self, answer: str, commits: int) -> None:
        self._core.metrics.engine.commits.labels(answer).inc(commits)


def announce(core: Core, commit: Commit) -> None:
    """Wake those who follow the run, and workers when something became claimable."""
    core.signals.publish(run_topic(commit.run_id))
    if commit.hot.state in TERMINAL:
        core.signals.publish(end_topic(commit.run_id))
        core.signals.publish(QUEUE_TOPIC)
    elif commit.ready_in_s == 0 or commit.new_children:
        core.signals.publish(QUEUE_TOPIC)
    for new in commit.new_children:
        if not new.creates_thread:
            core.signals.publish(thread_topic(new.thread_id))
