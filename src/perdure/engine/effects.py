"""Running the tool calls of a step: durable before, recorded after, never twice in silence.

A call's execution row is written in the commit before it is handed to its tool; whatever has
finished is recorded in one commit; calls that this made runnable get their rows in the same
commit. Within a step, tools that allow it run side by side; one that does not runs alone.
"""

from dataclasses import dataclass, field

import anyio

from perdure.engine.asking import ask_again, is_stale
from perdure.engine.breakpoints import is_held
from perdure.engine.closing import invocation_of
from perdure.engine.draft import Draft
from perdure.engine.held import Finished, HeldRun
from perdure.engine.invoking import clarify, fetch_args, looked_up, time_limit_s
from perdure.engine.journal import STEP_TOOLS
from perdure.engine.ports import LocalStep, Place, PlannerFailure, ToolOutcome
from perdure.engine.results import (
    add_no_tool,
    add_pending,
    add_result,
    add_retry,
    ask_outcome,
    did_not_happen,
    end_execution,
    runtime_result,
)
from perdure.engine.snapshot import OpenCall
from perdure.engine.spawning import draft_call_child
from perdure.engine.steps import settle
from perdure.engine.view import RunView
from perdure.protocol.events import TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.plain import no_entries, no_items
from perdure.protocol.states import ToolCallStatus
from perdure.protocol.tools import ToolSpec
from perdure.store.commits import CallUpdate, NewExecution

NO_CALLBACKS = runtime_result(
    ToolCallStatus.FAILED,
    FailureCode.TOOL_RESULT_INVALID,
    "a step of code cannot answer by callback",
)


@dataclass(slots=True, kw_only=True)
class Effects:
    """The calls of an attempt that run or have run."""

    attempt: HeldRun
    unrecorded: list[Finished] = field(default_factory=no_items)
    is_over: bool = False
    in_flight: dict[str, ToolSpec] = field(default_factory=no_entries)
    starved: ToolSpec | None = None
    """The tool of a call that could run at once but for a place."""
    _places: dict[str, Place] = field(default_factory=no_entries)
    _bell: anyio.Event = field(default_factory=anyio.Event)

    @property
    def _view(self) -> RunView:
        return self.attempt.view

    async def without_step(self) -> Failure | None:
        """Return why a step of code cannot run, after the function was brought to where it stood.

        Only a recovered attempt has to: else the function waits at the step already.
        """
        session, view = self.attempt.session, self._view
        if session is None:
            return None
        steps = [call for call in view.snapshot.open_calls.values() if call.tool in STEP_TOOLS]
        try:
            for call in steps:
                if session.step_at(call.position or "") is None:
                    granted = self.attempt.judge.granted()
                    await session.prepare(view.context(granted, for_code=True))
        except PlannerFailure as error:
            if error.failure.retryable:
                raise
            return error.failure
        return None

    def _spec_of(self, call: OpenCall) -> ToolSpec | None:
        """Return the declaration of a call's tool; a step says itself how it may be tried again."""
        spec = self.attempt.around.tools.find(call.tool, call.version)
        if spec is None or call.tool not in STEP_TOOLS:
            return spec
        step = self._step_of(call)
        if step is None:
            return spec
        return spec.model_copy(
            update={"retry": step.retry, "timeout_s": step.timeout_s or spec.timeout_s}
        )

    def _step_of(self, call: OpenCall) -> LocalStep | None:
        session = self.attempt.session
        if session is None or call.position is None or call.tool not in STEP_TOOLS:
            return None
        return session.step_at(call.position)

    async def act(self) -> None:
        """Take an executing run one commit further."""
        if self.unrecorded:
            await self.work(await self._record())
            return
        lost = [
            call for call in self._view.running_calls() if call.tool_call_id not in self.in_flight
        ]
        lost += [call for call in self._view.snapshot.open_calls.values() if call.overdue]
        if lost:
            for call in lost:
                self.unrecorded.append(await clarify(self.attempt, call))
            return
        if self._view.snapshot.open_calls:
            await self.attempt.judge.learn_open(self.attempt.around.core.directory, self._view)
        draft = self.attempt.draft()
        dispatched = self.dispatch(draft)
        if self.starved is not None and not (dispatched or draft.events):
            wait_s = self.attempt.around.core.settings.poll_interval_s
            await self.attempt.around.tools.wait_for_place(self.starved, wait_s)
            await self.attempt.look_for_answers()
            return
        self.settle_idle(draft, dispatched)
        if await self.attempt.commit(draft):
            await self.work(dispatched)

    def settle_idle(self, draft: Draft, dispatched: list[OpenCall]) -> None:
        """Draft what follows when no call runs; one that only lacks a place is waited for."""
        if not dispatched and not self.in_flight and self.starved is None:
            settle(draft, retry_in_s=self.retry_in_s(draft))

    def give_back(self) -> None:
        """Give the places back that are kept for calls which do not run."""
        if self._places:
            for call_id in [one for one in self._places if one not in self.in_flight]:
                self._places.pop(call_id).give_back()

    def dispatch(self, draft: Draft) -> list[OpenCall]:
        """Draft the execution rows of the calls that can run at once; return these calls.

        A place is kept for each before. Those of a draft that was not written are given back.
        """
        self.give_back()
        chosen = self._choose(draft)
        if not chosen:
            return chosen
        created = {row.tool_call_id: row for row in draft.new_calls}
        for call in chosen:
            executions = draft.view.executions_of(call.tool_call_id)
            retried = executions.count > 0 or call.outcome_retry_id is not None
            spent = call.outcome_retry_id if retried else call.approval_id
            executions.count += 1
            executions.running = True
            draft.new_executions.append(
                NewExecution(
                    tool_call_id=call.tool_call_id,
                    number=executions.count,
                    args_digest=call.args_digest,
                    approval_id=spent,
                )
            )
            if call.tool_call_id not in created:
                draft.call_updates.append(
                    CallUpdate(tool_call_id=call.tool_call_id, status=ToolCallStatus.RUNNING)
                )
            else:
                created[call.tool_call_id].status = ToolCallStatus.RUNNING
        return chosen

    def _choose(self, draft: Draft) -> list[OpenCall]:
        view, tools = draft.view, self.attempt.around.tools
        self.starved = None
        if not view.snapshot.open_calls or self._is_closed(draft):
            return []
        if self.attempt.judge.cards:
            self._start_children(draft)
        alone = any(not spec.parallel for spec in self.in_flight.values())
        now = self.attempt.around.core.clock.monotonic()
        chosen: list[OpenCall] = []
        for call in view.runnable_calls():
            if alone:
                break
            if view.retry_at.get(call.tool_call_id, 0) > now or is_held(view, call):
                continue
            spec = self._spec_to_run(draft, call)
            if spec is None:
                continue
            if not spec.parallel and (chosen or self.in_flight):
                break
            place = tools.reserve(spec, time_limit_s(self.attempt, spec))
            if place is None:
                self.starved = spec
                continue
            self._places[call.tool_call_id] = place
            chosen.append(call)
            alone = not spec.parallel
        return chosen

    def _spec_to_run(self, draft: Draft, call: OpenCall) -> ToolSpec | None:
        """Return the declaration of a tool that may run now; else draft what comes instead."""
        spec = self._spec_of(call)
        if spec is None:
            add_no_tool(draft, call)
        elif is_stale(call, spec):
            ask_again(draft, call, spec, self.attempt.judge)
        elif spec.agent is None:  # else its agent is looked up with the next turn
            return spec
        return None

    def _start_children(self, draft: Draft) -> None:
        """Draft the children that carry out calls of agents; they take no slot."""
        judge = self.attempt.judge
        ready: list[tuple[OpenCall, ToolSpec]] = []
        for call in draft.view.runnable_calls():
            spec = self.attempt.around.tools.find(call.tool, call.version)
            if spec is None or spec.agent is None or (spec.agent, None) not in judge.cards:
                continue
            if is_stale(call, spec):
                ask_again(draft, call, spec, judge)
            else:
                ready.append((call, spec))
        for place, (call, spec) in enumerate(ready):
            draft_call_child(
                draft, call, spec, judge.cards, judge.settings, among=len(ready) - place
            )

    def _is_closed(self, draft: Draft) -> bool:
        """Tell whether no further call may start: the run ends, is given back, or was rejected."""
        snapshot = draft.view.snapshot
        return (
            snapshot.cancel_epoch > 0
            or snapshot.rejected is not None
            or draft.attempt_end is not None
            or self.attempt.lease.draining
        )

    async def work(self, calls: list[OpenCall]) -> None:
        """Run calls, and what they make runnable, until none is in flight."""
        while calls:
            if len(calls) == 1 and not self._others_may_move():
                await self._run(calls[0])
                calls = await self._record()
            else:
                await self._run_side_by_side(calls)
                calls = []

    async def _run_side_by_side(self, calls: list[OpenCall]) -> None:
        async with anyio.create_task_group() as group:
            for call in calls:
                self._begin(call)
                group.start_soon(self._run, call)
            while self.in_flight or self.unrecorded:
                if not self.unrecorded:
                    self._bell = anyio.Event()
                    await self._wait_for_news()
                for call in await self._record():
                    self._begin(call)
                    group.start_soon(self._run, call)

    def _others_may_move(self) -> bool:
        """Tell whether more than the end of a call can bring the step on: an answer, a back-off, a
        place that becomes free.
        """
        asks = bool(self._view.snapshot.open_interrupts)
        return asks or self.starved is not None or self._next_due_s() is not None

    def _next_due_s(self) -> float | None:
        """Return how long until a back-off is over; those that are over wait for a slot only."""
        view = self._view
        if not view.retry_at:
            return None
        now = self.attempt.around.core.clock.monotonic()
        calls = [call for call in view.runnable_calls() if not is_held(view, call)]
        due = [view.retry_at.get(call.tool_call_id, 0) - now for call in calls]
        return min((left for left in due if left > 0), default=None)

    async def _wait_for_news(self) -> None:
        """Wait for a call to end or a back-off to be over; while questions are open, look for
        answers now and then.
        """
        asks, due_s = bool(self._view.snapshot.open_interrupts), self._next_due_s()
        polls = asks or self.starved is not None
        poll_s = self.attempt.around.core.settings.poll_interval_s if polls else None
        limits = [limit for limit in (poll_s, due_s) if limit is not None]
        if not limits:
            await self._bell.wait()
            return
        with anyio.move_on_after(min(limits)):
            await self._bell.wait()
            return
        if asks:
            await self.attempt.look_for_answers()

    def _begin(self, call: OpenCall) -> None:
        spec = self._spec_of(call)
        assert spec is not None
        self.in_flight[call.tool_call_id] = spec

    async def _run(self, call: OpenCall) -> None:
        """Run one call to its outcome and note it."""
        self._begin(call)
        around = self.attempt.around
        number = self._view.executions_of(call.tool_call_id).count
        try:
            await fetch_args(self.attempt, call)
            spec = self.in_flight[call.tool_call_id]
            invocation = invocation_of(
                self._view,
                call,
                spec,
                timeout_s=time_limit_s(self.attempt, spec),
                on_late=lambda late: self._came_late(call, number, late),
                body=self._step_of(call),
                place=self._places.get(call.tool_call_id),
            )
            self.attempt.check_lease()
            outcome = await around.tools.invoke(invocation)
            self.unrecorded.append(Finished(call=call, execution=number, outcome=outcome))
        finally:
            self.in_flight.pop(call.tool_call_id, None)
            place = self._places.pop(call.tool_call_id, None)
            if place is not None:
                place.give_back()
            self._bell.set()

    def _came_late(self, call: OpenCall, execution: int, outcome: ToolOutcome) -> None:
        """Take the result of an execution that was given up: evidence, or a closing's result."""
        finished = Finished(call=call, execution=execution, outcome=outcome)
        open_still = call.tool_call_id in self._view.snapshot.open_calls
        is_stopped = self.attempt.lease.scope.cancel_called  # `stopped` names a deadline later
        may_be_recorded = not (self.attempt.released or self.is_over)
        if is_stopped and open_still and may_be_recorded:
            self.unrecorded.append(finished)
        else:
            self.attempt.around.on_late(finished, self._view, self.attempt.lease)

    async def _record(self) -> list[OpenCall]:
        """Commit what has finished; return the calls that were dispatched by the same commit."""
        batch = [await looked_up(self.attempt, item) for item in self.unrecorded]
        self.unrecorded = [*batch]  # its own list: calls end while the commit is being written
        draft = self.attempt.draft()
        surpassed: list[Finished] = []  # their result came by callback, before they ended
        for item in batch:
            if item.call.tool_call_id in draft.view.snapshot.open_calls:
                self._draft_finished(draft, item)
            elif item.source == "tool" and item.outcome.result.status is not ToolCallStatus.PENDING:
                surpassed.append(item)
        dispatched = self.dispatch(draft)
        self.settle_idle(draft, dispatched)
        if self.in_flight and not (dispatched or batch or draft.events):
            return []
        if not await self.attempt.commit(draft):
            return []
        for item in surpassed:
            self.attempt.around.on_late(item, self._view, self.attempt.lease)
        self.settle(batch)
        return dispatched

    def settle(self, recorded: list[Finished]) -> None:
        """Forget what a commit has written; what came while it was written is not in it."""
        done = {id(item) for item in recorded}
        self.unrecorded = [item for item in self.unrecorded if id(item) not in done]

    def end(self) -> list[Finished]:
        """Return what no commit of this attempt writes any more; what comes from now on is late."""
        self.is_over = True
        left, self.unrecorded = self.unrecorded, []
        return left

    def _draft_finished(self, draft: Draft, item: Finished) -> None:
        """Draft a result, another try, or the question what happened."""
        call = draft.view.snapshot.open_calls[item.call.tool_call_id]
        result = item.outcome.result
        spec = self._spec_of(call)
        if result.status is ToolCallStatus.PENDING:
            self._draft_pending(draft, call, item.outcome)
            return
        if result.status is ToolCallStatus.TIMED_OUT and spec is not None:
            draft.add(
                TimeoutEvent(
                    subject="tool",
                    limit_ms=round(time_limit_s(self.attempt, spec) * 1000),
                    tool_call_id=call.tool_call_id,
                )
            )
        if result.status is ToolCallStatus.UNKNOWN:
            self._draft_unknown(draft, call, item, spec)
            return
        may_run = item.source == "lookup" and did_not_happen(result)
        if may_run and self._may_repeat(draft.view, call):
            add_retry(draft, call, item.outcome, 0)
            return
        delay_s = self._retry_delay_s(call, item.outcome, spec)
        if delay_s is not None:
            add_retry(draft, call, item.outcome, delay_s)
            now = self.attempt.around.core.clock.monotonic()
            draft.view.retry_at[call.tool_call_id] = now + delay_s
            return
        add_result(draft, call, item.outcome, by="lookup" if item.source == "lookup" else "tool")

    def _draft_pending(self, draft: Draft, call: OpenCall, outcome: ToolOutcome) -> None:
        if call.tool in STEP_TOOLS:
            add_result(draft, call, NO_CALLBACKS, by="runtime")
            return
        given_s = outcome.result.expires_in_s
        default_s = self.attempt.around.core.settings.callback_timeout_s
        add_pending(draft, call, outcome, default_s if given_s is None else given_s)

    def _draft_unknown(
        self, draft: Draft, call: OpenCall, item: Finished, spec: ToolSpec | None
    ) -> None:
        error = item.outcome.result.error
        reason = error.reason if error is not None else "the outcome is not known"
        if call.repeatable and spec is not None and self._may_repeat(draft.view, call):
            if call.overdue:
                add_retry(draft, call, item.outcome, 0)
            else:
                end_execution(draft, call, ToolCallStatus.UNKNOWN)
            return
        if spec is not None and spec.unknown_outcome == "tell_planner":
            add_result(draft, call, item.outcome, by="runtime")
            return
        ask_outcome(draft, call, reason)

    def _may_repeat(self, view: RunView, call: OpenCall) -> bool:
        limit = view.facts.options.max_attempts * 2 + 2
        return view.executions_of(call.tool_call_id).count < limit

    def _retry_delay_s(
        self, call: OpenCall, outcome: ToolOutcome, spec: ToolSpec | None
    ) -> float | None:
        """Return the wait before another try, or None when the outcome is final (R-10.1)."""
        result = outcome.result
        failed = {ToolCallStatus.FAILED, ToolCallStatus.TIMED_OUT}
        if spec is None or result.status not in failed or not call.repeatable:
            return None
        retryable = result.error is not None and result.error.retryable
        if not retryable or call.failed_executions + 1 >= spec.retry.attempts_max:
            return None
        return spec.retry.delay_s(
            call.failed_executions + 1, self.attempt.around.core.chance.random()
        )

    def retry_in_s(self, draft: Draft) -> float | None:
        """Return when the first of the calls that may run is to be tried; None: there is none."""
        calls = [call for call in draft.view.runnable_calls() if not is_held(draft.view, call)]
        now = self.attempt.around.core.clock.monotonic()
        due = [draft.view.retry_at.get(call.tool_call_id, now) - now for call in calls]
        return max(0.0, min(due)) if due else None
