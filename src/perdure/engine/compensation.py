"""Undoing what a cancelled run did, when its cancel asks for it (R-5.6, R-9.4).

A run that nobody holds and whose closing is due is taken by the worker that finds it. One call at
a time, the last one first: `started` is durable before the tool's `compensate` runs, and what came
of it afterwards. The commit that starts one also moves the run's closing timer behind the time
that the try may take: until then no other worker looks at the run, afterwards any may take it
over. The commit compares the run's last seq, so of two workers one begins. It names the worker,
which knows a try for its own by that when the store's answer is lost.

A try whose end is not recorded was cut off: its outcome is not known, as that of a call (R-5.7).
It is run again, with the same key, when the tool says that this has no second effect; otherwise it
is recorded as `unknown`, never run twice in silence. What fails is tried again a few times when
that may help; the others are undone all the same, and the end of the run tells what remains.
"""

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

import anyio
import anyio.abc
from pydantic import JsonValue

from perdure.engine.closing import CANCELLED, look_up_open, settle_known
from perdure.engine.committer import announce
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.kin import Kin
from perdure.engine.load import Damaged, load_view
from perdure.engine.ports import Place, ToolInvocation, ToolOutcome, ToolRunner
from perdure.engine.standing import may_be_undone
from perdure.engine.tree import close_unheld
from perdure.engine.undoing import Undo, performed, read_undoing
from perdure.engine.undone import asks_to_compensate
from perdure.engine.values import keep, short
from perdure.engine.view import RunView
from perdure.protocol.errors import PerdureError, StoreFull, Unavailable
from perdure.protocol.events import CompensationEvent, CompensationStatus
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import TERMINAL, ParkedOn, ToolCallStatus
from perdure.protocol.tools import ToolResult, ToolSpec
from perdure.store.commits import Committed
from perdure.store.requests import TimerKind

_Ended = Literal["succeeded", "failed", "unknown"]

log = logging.getLogger(__name__)

RUNS_MAX = 16
TRIES_MAX = 3
LOOKUP_TIMEOUT_S = 10.0
RETRY_S = 0.5
WAIT_S_MAX = 8.0
WRITES_MAX = 60
"""So often the end of a try is sent: for longer than a store leaves a paused writer its rows."""
PAUSE_S = 0.01
PAUSE_S_MAX = 0.5
BUSY_PAUSE_S = 0.2


@dataclass(slots=True)
class Compensator:
    """Undoes runs in the background of a worker, a few at once."""

    core: Core
    tools: ToolRunner
    worker_id: str
    _busy: set[str] = field(default_factory=set[str])
    _group: anyio.abc.TaskGroup | None = None
    _draining: bool = False
    _freed: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Work on what is offered, until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            await anyio.sleep_forever()

    def offer(self, run_id: str) -> None:
        """Take a run whose closing is due; a sweep offers again what is not taken now."""
        if self._group is None or self._draining:
            return
        if run_id not in self._busy and len(self._busy) < RUNS_MAX:
            self._busy.add(run_id)
            self._group.start_soon(self._take, run_id)

    async def drain_within(self, seconds: float) -> None:
        """Begin nothing more, and wait so long for what is under way."""
        self._draining = True
        with anyio.move_on_after(seconds):
            while self._busy:
                self._freed = anyio.Event()
                await self._freed.wait()

    async def _take(self, run_id: str) -> None:
        done_at: dict[tuple[str, int], datetime] = {}
        whose = self.core, self.tools, self.worker_id
        try:
            while not self._draining and await _Turn(*whose, run_id, done_at).take():
                pass
        except (PerdureError, Damaged, Incompatible) as error:
            log.warning("run %s: undoing what it did waits for a sweep: %s", run_id, error)
        except Exception:  # one run's trouble must not end the others
            log.exception("run %s: what it did cannot be undone now", run_id)
        finally:
            self._busy.discard(run_id)
            self._freed.set()


def is_undoing(row: RunRow) -> bool:
    """Tell whether a run is closing, and its cancel asks that what it did is undone."""
    hot = row.hot
    waits = hot.lease_owner is None and hot.parked_on is ParkedOn.CLOSING
    return waits and hot.state not in TERMINAL and asks_to_compensate(hot.cancel_options)


@dataclass(slots=True)
class _Turn:
    """The next thing to be done for a run: one try of one call, or its end."""

    core: Core
    tools: ToolRunner
    worker_id: str
    run_id: str
    done_at: dict[tuple[str, int], datetime]
    view: RunView = field(init=False)

    async def take(self) -> bool:
        """Do it; False when nothing more is to be done by this worker now."""
        row = await self._load()
        if row is None or self.view.snapshot.open_children:
            return False
        known = await look_up_open(self.view, self.tools, LOOKUP_TIMEOUT_S)
        if known:
            draft = self._draft()
            settle_known(draft, CANCELLED, known)
            return await self._write(draft)
        undoing = await read_undoing(self.core, row, self.done_at)
        now, deadline_s = await self.core.reader.now(), self.core.settings.compensation_deadline_s
        owed = undoing.owed(now, deadline_s)
        first = next((item for item in owed if not item.must_wait), None)
        if first is not None and first.is_elsewhere and not first.is_under_way:
            return False  # a sweep offers it again
        if first is not None:
            return await self._undo(first, now, is_late=undoing.is_late(now, deadline_s))
        if owed:
            return False  # a sweep offers it again, until the runs that cannot be read are repaired
        await close_unheld(self.core, self.run_id, TimerKind.CLOSE, self.tools, undone=True)
        return False

    async def _undo(self, item: Undo, now: datetime, *, is_late: bool) -> bool:
        """Take one call a try further; False when this is not for this worker now.

        A place is kept before `started` is written: what only waits uses up no try.
        """
        number = 1 if item.last is None else item.last.number + 1
        if item.is_under_way:
            begun_s = (now - item.tries[-1][0]).total_seconds()
            if begun_s < self._window_s(item):
                return False  # whoever began it may still be at it
            is_last = is_late or item.tries_used >= TRIES_MAX
            if is_last or item.facts is None or not item.spec.compensate_idempotent:
                cut_off = _failed("the try was cut off: whether it took effect is not known")
                return await self._end(item, number - 1, "unknown", cut_off)
        spec = self.tools.find(item.call.tool, item.call.version)
        if spec is None or not spec.has_compensate:
            return False  # for a worker that serves the tool
        try:
            args = await performed(self.core, item)
        except LookupError as error:
            return await self._end(item, number, "failed", _failed(str(error)))
        place = self.tools.reserve(spec, self._timeout_s(item))
        if place is None:
            return False  # a sweep, of any worker, offers it again
        try:
            return await self._try(item, spec, args, number, place)
        finally:
            place.give_back()

    async def _try(
        self, item: Undo, spec: ToolSpec, args: dict[str, JsonValue], number: int, place: Place
    ) -> bool:
        """Begin a try and see it to its end; False when the next one is not to be begun here."""
        sent = self.core.clock.monotonic()
        if not await self._begin(item, number):
            await anyio.sleep(BUSY_PAUSE_S)
            return True
        kept = await self._kept_from(item)
        if kept is not None:
            return await self._end(item, number, "failed", kept, begun=False)
        if self.core.clock.monotonic() - sent > self.core.settings.lease_margin_s:
            stood_still = _failed("it was not begun: the worker had stood still", retryable=True)
            return await self._end(item, number, "failed", stood_still, begun=False)
        outcome: ToolOutcome | None = None
        with anyio.move_on_after(2 * self._timeout_s(item)):  # for its slot, and for itself
            outcome = await self.tools.compensate(
                replace(self._invocation(item, spec, args, number), place=place)
            )
        place.give_back()  # what follows takes time, and runs no tool
        if outcome is None:
            return await self._end(item, number, "unknown", _failed("it did not end in time"))
        result = outcome.result
        status: _Ended = _STATUS.get(result.status, "unknown")
        return await self._end(item, number, status, result.error, result, begun=outcome.begun)

    async def _begin(self, item: Undo, number: int) -> bool:
        """Write that a try begins, and tell whether it is this worker's: also when the store's answer
        is lost, or says of the same commit, sent again, that somebody was first.
        """
        started = _event(item, number, "started", self.run_id)
        started = started.model_copy(update={"detail": {"worker": self.worker_id}})
        draft = self._draft(self._window_s(item))
        seq = draft.add(started)
        for failed in range(WRITES_MAX):
            await anyio.sleep(min(PAUSE_S * failed, PAUSE_S_MAX))
            try:
                if not failed and await self._write(draft):
                    return True
                found = await self.core.reader.events_after(self.run_id, seq - 1, limit=1)
                return bool(found) and found[0].data == started
            except (Unavailable, StoreFull) as outage:
                log.info("run %s: whether undoing has begun waits: %s", self.run_id, outage)
        return False

    async def _end(
        self,
        item: Undo,
        number: int,
        status: _Ended,
        error: Failure | None,
        result: ToolResult | None = None,
        *,
        begun: bool = True,
    ) -> bool:
        """Record what a try came to, and wait before the next one of the same call.

        One that did not begin uses up no try. The next one is waited for by nobody: whichever
        worker finds it due, later each time, may begin it.

        Somebody else may write to the run meanwhile: a second cancel, a late result; or may have
        its row locked. What came of the try is recorded all the same, unless another worker has
        taken the run over.
        """
        is_counted = item.last is not None and item.last.number == number
        used = item.tries_used if is_counted else item.tries_used + 1
        again = not begun or (
            used < TRIES_MAX
            and (
                (status == "failed" and error is not None and error.retryable)
                or (status == "unknown" and item.spec.compensate_idempotent)
            )
        )
        delay_s = RETRY_S * used if again else 0.0
        if not begun:
            delay_s = min(RETRY_S * 2**item.not_begun_since, WAIT_S_MAX)
        told = _event(item, number, status, self.run_id).model_copy(
            update={
                "detail": _detail(result),
                "external_ref": None if result is None else result.external_ref,
                "error": error,
                "again": again,
                "begun": begun,
            }
        )
        for failed in range(WRITES_MAX):
            await anyio.sleep(min(PAUSE_S * failed, PAUSE_S_MAX))
            try:
                if failed and not await self._is_mine(item, number):
                    log.warning("run %s: undoing %s was taken over", self.run_id, item.call.tool)
                    return False
                draft = self._draft(delay_s)
                draft.add(told)
                if await self._write(draft):
                    break
            except (Unavailable, StoreFull) as outage:
                log.info("run %s: what came of undoing waits: %s", self.run_id, outage)
        else:
            log.error("run %s: what came of undoing %s is lost", self.run_id, item.call.tool)
            return False
        if begun:
            await anyio.sleep(delay_s)
        return begun

    async def _is_mine(self, item: Undo, number: int) -> bool:
        """Load the run anew, and tell whether a try is the one whose end is awaited, or that no try
        was begun of it.
        """
        row = await self._load()
        if row is None:
            return False
        now = await read_undoing(self.core, row, self.done_at)
        found = [one.last for one in now.items if one.call.tool_call_id == item.call.tool_call_id]
        last = found[0] if found else None
        return last == item.last or (
            last is not None and (last.status, last.number) == ("started", number)
        )

    async def _kept_from(self, item: Undo) -> Failure | None:
        """Return why a try is not to act whose `started` is durable: it is looked again who stands
        on the effect.
        """
        kin, tenant, unread = Kin(self.core), item.tenant_id, ""
        try:
            run = await kin.find(item.call.run_id, tenant)
            undoer = await kin.find(self.run_id, tenant)
            if run is None or undoer is None:
                unread = ": it cannot be read"
            elif await may_be_undone(kin, run, undoer, item.call.effect_key):
                return None
        except PerdureError as error:
            unread = f": {error}"
        return _failed(
            f"it was not begun: another run stands on the effect, or may{unread}", retryable=True
        )

    async def _load(self) -> RunRow | None:
        """Load the run anew; None when it is not one to be undone any more."""
        row = await self.core.reader.find_run(None, self.run_id)
        if row is None or not is_undoing(row):
            return None
        self.view = await load_view(self.core, row, with_messages=False)
        return row

    def _draft(self, close_in_s: float = 0.0) -> Draft:
        """Return a commit that leaves the run where it is; its closing is due after a time."""
        draft = Draft(view=self.view, ids=self.core.ids, token=None)
        draft.with_checkpoint = False
        draft.parked_on = ParkedOn.CLOSING
        draft.close_in_s = close_in_s
        return draft

    async def _write(self, draft: Draft) -> bool:
        commit = draft.build()
        (result,) = await self.core.store.commit([commit])
        if isinstance(result, Committed):
            announce(self.core, commit)
        return isinstance(result, Committed)

    def _timeout_s(self, item: Undo) -> float:
        return item.spec.timeout_s or self.core.settings.tool_timeout_s

    def _window_s(self, item: Undo) -> float:
        """Return the time after which a try without an end was certainly given up."""
        settings = self.core.settings
        return 2 * self._timeout_s(item) + settings.cancel_grace_s + 2 * settings.lease_margin_s

    def _invocation(
        self, item: Undo, spec: ToolSpec, args: dict[str, JsonValue], number: int
    ) -> ToolInvocation:
        facts = item.facts
        assert facts is not None, "no try begins while its run cannot be read"
        return ToolInvocation(
            spec=spec,
            args=args,
            effect_key=item.key,
            tool_call_id=item.call.tool_call_id,
            run_id=facts.run_id,
            thread_id=facts.thread_id,
            step_index=item.call.step_index,
            execution=number,
            context=facts.context,
            caller=facts.caller,
            timeout_s=self._timeout_s(item),
        )


_STATUS: dict[ToolCallStatus, _Ended] = {
    ToolCallStatus.SUCCEEDED: "succeeded",
    ToolCallStatus.PARTIAL: "failed",
    ToolCallStatus.FAILED: "failed",
    ToolCallStatus.CANCELLED: "failed",
    ToolCallStatus.DENIED: "failed",
}
"""What a try counts as; any other outcome is not known."""


def _event(item: Undo, number: int, status: CompensationStatus, run_id: str) -> CompensationEvent:
    return CompensationEvent(
        tool_call_id=item.call.tool_call_id,
        status=status,
        key=item.key,
        number=number,
        run_id=None if item.call.run_id == run_id else item.call.run_id,
    )


def _failed(reason: str, *, retryable: bool = False) -> Failure:
    return Failure(
        code=FailureCode.TOOL_ERROR, reason=short(reason), stage=Stage.TOOL, retryable=retryable
    )


def _detail(result: ToolResult | None) -> JsonValue:
    """Return what a compensation returned, as far as it is small; what is left when it did a part."""
    if result is None:
        return None
    kept = keep(result.output)
    said: JsonValue = kept.inline if kept.ref is None else kept.ref.preview
    if result.not_done is None:
        return said
    return {"done": result.done, "not_done": result.not_done, "output": said}
