"""A code agent's function while it lives: on the user loop, for the length of an attempt.

`drive` lets the function run until every branch of it waits for an operation that has no result,
and returns what it waits for. Operations that the journal holds are answered from it at once; one
that differs from what is recorded at its position stops everything: the function has diverged,
and nothing of its journal is handed to it any more (R-4.6).

All of this runs on one loop; only what `drive` returns is read by the engine. Raw asyncio, for the
reasons in `tools.bridge`.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import JsonValue

from perdure.agents.code.errors import Diverged
from perdure.agents.code.positions import Branch, Order, at, is_past
from perdure.engine.context import Entry, OperationKind
from perdure.engine.journal import PATCHED, SLEEP
from perdure.engine.ports import LocalStep
from perdure.protocol.codec import clean, digest
from perdure.protocol.decisions import Ask, ChildRequest, Note, Record, ToolRequest
from perdure.tools.caught import Caught
from perdure.tools.jobs import copied

RECORDS_MAX = 1000
"""How many values a function may report before it waits for something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An entry of the journal with its value whole."""

    entry: Entry
    value: JsonValue = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWish:
    """A model request as the function made it. `tools` are names of granted tools."""

    messages: tuple[dict[str, JsonValue], ...]
    tools: tuple[str, ...] = ()
    temperature: float | None = None
    max_output_tokens: int | None = None
    timeout_s: float | None = None


Wish = ToolRequest | Ask | ModelWish | ChildRequest | datetime
"""What a waiting operation wants; a time is that of a sleep's end."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """An operation that has no result yet."""

    position: str
    kind: OperationKind
    name: str
    wish: Wish
    branch: Branch
    future: "asyncio.Future[Recorded]"
    step: LocalStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a function left its journal."""

    position: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a function stands once nothing of it moves: what it waits for, or how it ended."""

    waiting: tuple[Waiting, ...] = ()
    records: tuple[Record, ...] = ()
    end: Literal["returned", "raised"] | None = None
    value: JsonValue = None
    error: BaseException | None = None
    difference: Difference | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveFunction:
    """One running instance of the function. `start` makes its coroutine; `journal` is a copy."""

    start: Callable[[], Awaitable[object]]
    run_id: str
    journal: dict[str, Recorded]
    now: datetime
    home: asyncio.AbstractEventLoop | None = None
    difference: Difference | None = None
    keys: set[str] = field(default_factory=set[str])
    _order: Order = field(init=False)
    _tasks: "set[asyncio.Task[Any]]" = field(default_factory=set[Any])
    _running: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])
    _records: dict[str, Record] = field(default_factory=dict[str, Record])
    _end: Stand | None = None
    _stopping: bool = False
    _patches: dict[str, bool] = field(default_factory=dict[str, bool])
    _shares: bool = field(init=False)
    """A part of the journal is another run's."""

    def __post_init__(self) -> None:
        self._order = Order.of(self.journal)
        self._shares = any(recorded.entry.run_id for recorded in self.journal.values())
        self.keys.update(
            item.entry.name for item in self.journal.values() if item.entry.kind == "interrupt"
        )

    # ---------------------------------------------------------------- what the session asks

    async def drive(self, news: Mapping[str, Recorded], written: set[str], now: datetime) -> Stand:
        """Go on with new results until nothing moves; `written` are positions now recorded."""
        self.now = now
        for position in written:
            self._records.pop(position, None)
        try:
            self._go_on(news)
            await self._quiet.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        return self._stand()

    def is_executing(self) -> bool:
        """Tell whether the loop is inside this function right now. From any thread."""
        if self.home is None:
            return False
        return asyncio.current_task(self.home) in self._tasks

    async def stop(self) -> None:
        """Cancel the function until it has ended; a part of it that swallows this is waited for."""
        self._stopping = True
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pending)

    def cancel_from_afar(self) -> None:
        """Ask the function to stop when its loop comes back from whatever blocks it."""
        if self.home is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.home.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    def _go_on(self, news: Mapping[str, Recorded]) -> None:
        if self.home is None:
            self.home = asyncio.get_running_loop()
            self._running = 1
            self._begin(self._root(), Branch())
            return
        for position, recorded in news.items():
            self._settle(position, recorded)
        for waiting in list(self._waiting.values()):
            if isinstance(waiting.wish, datetime) and waiting.wish <= self.now:
                slept = Entry(position=waiting.position, kind="value", name=SLEEP, digest="")
                self._settle(waiting.position, Recorded(entry=slept))

    def _settle(self, position: str, recorded: Recorded) -> None:
        waiting = self._waiting.pop(position, None)
        if waiting is None or waiting.future.done():
            return
        waiting.branch.is_waiting = False
        waiting.future.set_result(recorded)
        self._moves(1)

    def _moves(self, change: int) -> None:
        self._running += change
        if self._running > 0 and self.difference is None and self._end is None:
            self._quiet.clear()
        else:
            self._quiet.set()

    def _stand(self) -> Stand:
        records = tuple(self._records.values())
        if self.difference is not None:
            return Stand(records=records, difference=self.difference)
        if self._end is not None:
            end = self._end
            return Stand(records=records, end=end.end, value=end.value, error=end.error)
        return Stand(records=records, waiting=tuple(self._waiting.values()))

    # ---------------------------------------------------------------- branches

    def _begin(self, body: Coroutine[Any, Any, None], branch: Branch) -> None:
        context = contextvars.copy_context()
        context.run(current.set, (self, branch))
        assert self.home is not None
        task = self.home.create_task(body, context=context)
        self._tasks.add(task)

    async def _root(self) -> None:
        value: JsonValue = None
        with Caught() as caught:
            value = clean(await self.start())
        self._check_end()
        if self.difference is None:
            error = caught.error
            self._end = self._end or Stand(
                end="returned" if error is None else "raised", value=value, error=error
            )
        self._moves(-self._running)

    def branch(self) -> Branch:
        """Return the branch that runs at the moment; raise RuntimeError outside of the function."""
        live, branch = current.get() or (None, None)
        if live is not self or branch is None:
            raise RuntimeError("operations belong into the agent's own function, on its own loop")
        if self.difference is not None:
            raise Diverged(self.difference.position)
        if branch.is_waiting:
            raise RuntimeError(
                "this branch waits for another operation already: use ctx.gather for several at once"
            )
        return branch

    def _check_end(self) -> None:
        """A branch that ends before an operation it asked for once is not the same code."""
        _, branch = current.get() or (None, Branch())
        if self.difference is None and self._order.last(branch.path) >= branch.count:
            position = at(branch.path, branch.count)
            with Caught():  # the branch has ended: nobody is left to stop
                self._diverge(position, self._told_at(position), "the end of the branch")

    async def gather(self, bodies: tuple[Awaitable[Any], ...]) -> list[object | BaseException]:
        """Run a branch for each body, side by side; return what each returned or raised."""
        outer = self.branch()
        position = outer.take()
        if position in self.journal:
            self._differ(position, f"gather of {len(bodies)}")
        if not bodies:
            return []
        outer.is_waiting = True
        results: list[object | BaseException] = [None] * len(bodies)
        assert self.home is not None
        all_ended = self.home.create_future()
        left = len(bodies)

        async def body_of(index: int, body: Awaitable[Any]) -> None:
            nonlocal left
            with Caught() as caught:
                results[index] = await body
            if caught.error is not None:
                results[index] = caught.error
            self._check_end()
            left -= 1
            if left == 0 and not all_ended.done():
                outer.is_waiting = False
                all_ended.set_result(None)
            else:
                self._moves(-1)

        self._moves(len(bodies) - 1)
        for index, body in enumerate(bodies):
            self._begin(body_of(index, body), Branch(path=at(position, index)))
        await all_ended
        last = self._order.last_branch(position)
        if self.difference is None and last >= len(bodies):
            self._differ(at(at(position, last), 0), f"gather of {len(bodies)}")
        return results

    # ---------------------------------------------------------------- operations

    def known(self, position: str, kind: OperationKind, name: str, digest: str) -> Recorded | None:
        """Return what is recorded of an operation, or None for a new one at the journal's end.

        Raises Diverged when something else is recorded there, or something after it.
        """
        recorded = self.journal.get(position)
        got = _told(kind, name, digest)
        if recorded is not None:
            entry = recorded.entry
            if (entry.kind, entry.name, entry.digest) != (kind, name, digest):
                self._differ(position, got)
            return recorded
        if self._order.has_branches(position):
            self._differ(position, got)
        after = self._order.passed(position)
        if after is not None:
            self._diverge(position, f"nothing; the journal goes on at {after}", got)
        return None

    def derived(self, name: str) -> str:
        """Return the position of a value that is derived from it, and is not recorded."""
        position = self.branch().take()
        if position in self.journal or self._order.has_branches(position):
            self._differ(position, name)
        return position

    def first_past(self, position: str) -> str:
        """Return the run that first came past a position: this one, or one whose history it shares.

        What is derived there is derived from that run, so that a retry or a fork gets the same.
        """
        if not self._shares:
            return self.run_id  # most runs; a long journal takes long to go through at each draw
        for recorded in self.journal.values():
            if is_past(recorded.entry.position, position):
                return recorded.entry.run_id or self.run_id
        return self.run_id

    def record(self, record: Record) -> None:
        """Keep a value for the commit of the next decision."""
        if len(self._records) >= RECORDS_MAX:
            raise RuntimeError(f"at most {RECORDS_MAX} values are reported between two waits")
        assert record.position is not None, "what code records has its position"
        self._records[record.position] = record

    def patched(self, name: str) -> bool:
        """Tell whether this branch was recorded by the code with this change, or is new."""
        branch = self.branch()
        position = branch.marker(name)
        known = self._patches.get(position)
        if known is None:
            known = position in self.journal
            if not known and self._order.last(branch.path) < branch.count:
                ahead = at(branch.path, branch.count)
                known = self._order.passed(ahead) is None
                if known:
                    self.record(Note(position=position, name=PATCHED, value=name))
            self._patches[position] = known
        return known

    async def wait(
        self,
        branch: Branch,
        position: str,
        kind: OperationKind,
        name: str,
        wish: Wish,
        step: LocalStep | None = None,
    ) -> Recorded:
        """Let the branch wait until the operation at a position has its result."""
        assert self.home is not None
        future: asyncio.Future[Recorded] = self.home.create_future()
        waiting = Waiting(
            position=position,
            kind=kind,
            name=name,
            wish=wish,
            branch=branch,
            future=future,
            step=step,
        )
        self._waiting[position] = waiting
        branch.is_waiting = True
        self._moves(-1)
        try:
            return await future
        finally:
            if branch.is_waiting:
                branch.is_waiting = False
                self._waiting.pop(position, None)
                self._given_up(position)

    def _given_up(self, position: str) -> None:
        """An operation cannot be cancelled: when it runs again, the function would go elsewhere."""
        if not self._stopping and self._end is None:
            error = RuntimeError(
                f"the function gave up waiting at {position}: an operation is durable and cannot "
                "be cancelled; give a step, tool or question a time limit of its own"
            )
            self._end = Stand(end="raised", error=error)
            self._quiet.set()

    def _differ(self, position: str, got: str) -> None:
        self._diverge(position, self._told_at(position), got)

    def _diverge(self, position: str, expected: str, got: str) -> None:
        if self.difference is None:
            self.difference = Difference(position=position, expected=expected, got=got)
        self._quiet.set()
        raise Diverged(position)

    def _told_at(self, position: str) -> str:
        recorded = self.journal.get(position)
        if recorded is not None:
            entry = recorded.entry
            return _told(entry.kind, entry.name, entry.digest)
        return "gather" if self._order.has_branches(position) else "a later operation"


current: "contextvars.ContextVar[tuple[LiveFunction, Branch] | None]" = contextvars.ContextVar(
    "perdure_branch", default=None
)


def whole(recorded: Recorded) -> JsonValue:
    """Return a copy of a recorded value: whoever changes it changes nothing recorded (RES-11)."""
    return copied(recorded.value)


def request_digest(wish: ModelWish) -> str:
    """Return the digest by which a model request is known again."""
    return digest(
        [
            list(wish.messages),
            list(wish.tools),
            wish.temperature,
            wish.max_output_tokens,
        ]
    )


def later_by(now: datetime, seconds: float) -> datetime:
    """Return the time so many seconds from now, in whole microseconds."""
    return now + timedelta(seconds=seconds)


def _told(kind: str, name: str, digest: str) -> str:
    """Return an operation in words: kind, name, and the start of its arguments' digest."""
    named = f"{kind} {name}" if name else kind
    return f"{named} ({digest[:12]})" if digest else named
