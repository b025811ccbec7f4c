"""One attempt: a worker that holds a run takes it as far as it goes.

The loop looks at the folded state and does what that state asks for; nothing else is remembered
between two turns of it but results that are not committed yet. Each advance is one fenced
commit. An answer of `Behind` throws the draft away and folds what others wrote.

Failure at each point: before a commit, nothing happened; after one, the log says so; when the
answer is lost, the same commit is sent again and the store knows it. An execution that was
begun (its row is durable) and has no result is clarified by R-5.7, never silently run again.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

import anyio
from anyio.lowlevel import checkpoint

from perdure.engine.closing import (
    CANCELLED,
    TIMED_OUT,
    close_run,
    end_transition,
    finished_effects,
    look_up_open,
)
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.deciding import Deciding
from perdure.engine.discarding import note_discarded
from perdure.engine.draft import Draft, KeptField
from perdure.engine.effects import Effects
from perdure.engine.elsewhere import made_elsewhere
from perdure.engine.failing import CannotStore, draft_failed_attempt, is_about_data, told_of
from perdure.engine.fields_kept import fields_to_keep
from perdure.engine.fields_read import news_of_fields
from perdure.engine.fields_written import clash_of_calls
from perdure.engine.held import Surroundings
from perdure.engine.inheriting import taken_over
from perdure.engine.invoking import known_of
from perdure.engine.judging import Judge
from perdure.engine.kin import Kin
from perdure.engine.lease import Lease, LeaseGone, Stop
from perdure.engine.limits import before_planning
from perdure.engine.load import Damaged, catch_up, load_view
from perdure.engine.optimism import conflict_of, guard_end
from perdure.engine.planning import draft_decision, draft_inherited, draft_model_uses, stands
from perdure.engine.ports import HostedAgent, PlannerFailure, PlannerSession
from perdure.engine.sessions import StoreTime, session_of
from perdure.engine.sharing import undone_elsewhere, undone_meanwhile
from perdure.engine.steps import fail, rejection
from perdure.engine.topics import find_subscribers, publishes
from perdure.engine.tree import close_unheld, tell_parent
from perdure.engine.turns import fields_at_end
from perdure.engine.view import RunView
from perdure.protocol.decisions import Decision, Finish, UpdatePlan
from perdure.protocol.durations import WORK_S_MAX
from perdure.protocol.errors import PerdureError, StoreFull, Unavailable
from perdure.protocol.events import RetryEvent, TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.states import (
    TERMINAL,
    AttemptEnd,
    ParkedOn,
    RunState,
    Transition,
)
from perdure.store.commits import Behind, CancelRequested, Commit, Committed, LeaseLost, Refused
from perdure.store.requests import TimerKind

RESEND_S = 0.2
MOVED_PAUSE_S = 0.05
CLOSE_TIMEOUT_S = 10.0
LOOKUPS_TIMEOUT_S = 4.0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The work of one worker on one claimed run."""

    around: Surroundings
    lease: Lease
    view: RunView
    judge: Judge
    claimed_at: datetime
    started_at: float
    deadline_in_s: float | None
    worked_before_s: float
    input_position: int
    pause_s: float | None = None
    """Set: the run is not to begin yet, and is looked at again after this time."""
    released: bool = False
    effects: Effects = field(init=False)
    deciding: Deciding = field(init=False)
    session: PlannerSession | None = field(init=False)

    def __post_init__(self) -> None:
        self.effects = Effects(attempt=self)
        self.deciding = Deciding(attempt=self)
        time = StoreTime(self.core.clock, self.claimed_at, self.started_at)
        self.session = session_of(self.core, self.agent, time)

    @property
    def agent(self) -> HostedAgent:
        """The agent version that carries the run out."""
        return self.judge.agent

    @property
    def core(self) -> Core:
        """The engine's surroundings."""
        return self.around.core

    async def run(self) -> None:
        """Advance until the run ends, waits, or is taken away. Raises LeaseGone."""
        try:
            await self._run()
        finally:
            self.effects.give_back()
            if self.session is not None:
                with anyio.CancelScope(shield=True):  # bounded by the session's grace
                    await self.session.close()

    async def _run(self) -> None:
        if self.deadline_in_s is not None:
            self.lease.scope.deadline = anyio.current_time() + self.deadline_in_s
        with self.lease.scope:
            await self._advance()
        if self.lease.scope.cancelled_caught and self.lease.stopped is None:
            self.lease.stopped = Stop.DEADLINE
        if self.released or self.lease.stopped is None:
            return
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._after_stop(self.lease.stopped)

    async def _advance(self) -> None:
        while not self.released:
            try:
                await self._take_turn()
            except* (Unavailable, StoreFull):
                await self._wait_for_store()

    async def _take_turn(self) -> None:
        """Do what the run's state asks for, up to one commit or the end of its calls."""
        snapshot = self.view.snapshot
        if snapshot.cancel_epoch > 0:
            await self._close(CANCELLED)
        elif self.lease.draining and not self.effects.unrecorded:
            await self._release(AttemptEnd.DRAINED, ready_in_s=0)
        elif snapshot.rejected is not None:
            await self._fail(rejection(snapshot))
        elif snapshot.state is RunState.PENDING and self.pause_s is not None:
            await self._release(AttemptEnd.PARKED, ready_in_s=self.pause_s)
        elif snapshot.state is RunState.PENDING:
            await self._start()
        elif snapshot.state is RunState.PLANNING:
            await self._plan()
        elif snapshot.state is RunState.EXECUTING:
            await self._act()
        elif snapshot.state in TERMINAL:
            raise LeaseGone
        else:
            await self._release(AttemptEnd.PARKED)

    async def _wait_for_store(self) -> None:
        """Wait until the store answers again, and begin anew from what it holds."""
        await anyio.sleep(RESEND_S * (1 + self.core.chance.random()))
        await self._load_again()

    async def _load_again(self) -> None:
        """Load the view again, however long the store is away; raise LeaseGone in the end."""
        while True:
            self.check_lease()
            with suppress(Unavailable):
                self.view = await self._loaded()
                return
            await anyio.sleep(RESEND_S * (1 + self.core.chance.random()))

    async def _start(self) -> None:
        """Begin planning; the planner sees the thread up to the position recorded here."""
        position: int | None = self.input_position
        if self.view.snapshot.history_position is not None:
            position = None  # shared with its origin: the planner goes on seeing what it saw
        elif self.input_position > 1:
            facts = self.view.facts
            thread = await self.core.reader.find_thread(facts.tenant_id, facts.thread_id)
            position = thread.last_position if thread is not None else position
        draft = self.draft()
        draft.move(Transition.START, history_position=position)
        undone = await undone_meanwhile(self.core, self.view.facts)
        if undone is not None:
            fail(draft, undone)
        if await self.commit(draft) and position is not None and position > 1:
            self.view = await self._loaded()

    async def _release(self, end: AttemptEnd, *, ready_in_s: float | None = None) -> None:
        """Give the run back as it stands."""
        draft = self.draft()
        draft.release(end)
        draft.ready_in_s = ready_in_s
        await self.commit(draft)

    async def _plan(self) -> None:
        worked = self.worked_before_s + self.core.clock.monotonic() - self.started_at
        limit = before_planning(self.view, worked_s=worked)
        if limit is not None:
            await self._fail(limit)
            return
        if (self.agent.fields or self.view.snapshot.writes) and not await self._know_fields():
            return
        if self.view.snapshot.inherited:
            await self._take_over()
            return
        try:
            decision = await self.deciding.decide()
        except PlannerFailure as error:
            await self._planner_failed(error)
            return
        shared = fields_at_end(self.view, self.agent, decision)
        if not shared:
            await self._carry_out(decision)
            return
        async with self.around.turns.take(shared):
            await self._carry_out(decision)

    async def _carry_out(self, decision: Decision) -> None:
        """Write what was decided, and begin what it asks for."""
        if isinstance(decision, Finish):
            await note_discarded(self.core, self.view)
        try:
            keeps = await self._looked_around(decision)
        except PlannerFailure as error:
            await self._planner_failed(error)
            return
        if isinstance(keeps, Failure):
            await self._end_in_conflict(decision, keeps)
            return
        await self.judge.learn(self.core.directory, decision)
        if publishes(decision, self.agent):
            self.judge.subscribers[:] = await find_subscribers(
                self.core, self.view.facts, decision, self.agent
            )
        draft = self.draft()
        draft.keeps = keeps
        draft_decision(draft, decision, self.judge, self.deciding.replies)
        guard_end(draft)
        dispatched = self.effects.dispatch(draft)
        if draft.view.snapshot.state is RunState.EXECUTING and draft.attempt_end is None:
            self.effects.settle_idle(draft, dispatched)
        if await self.commit(draft):
            self.deciding.forget()
            await self.effects.work(dispatched)

    async def _looked_around(self, decision: Decision) -> Sequence[KeptField] | Failure:
        """Return what the run leaves in fields that outlive it when it ends as decided, or why it
        cannot end so: others have written what it builds on.
        """
        conflict = await conflict_of(self.core, self.view, decision)
        if conflict is not None:
            return conflict
        if not (self.agent.fields or self.view.snapshot.writes):
            return ()
        if not isinstance(decision, Finish) or not stands(self.view, decision):
            return ()
        try:
            return await fields_to_keep(self.core, self.view, self.agent, decision)
        except PlannerFailure as error:  # a reducer cannot run now: the decision is paid for
            uses = decision.model_uses
            raise PlannerFailure(error.failure, model_uses=uses) from error

    async def _know_fields(self) -> bool:
        """Record what the run sees of fields that outlive it, before its planner is asked; False:
        that was the turn.
        """
        clash = clash_of_calls(self.view) if self.session is None else None
        if clash is not None:
            await self._fail(clash)
            return False
        news = await news_of_fields(self.core, self.view, self.agent)
        if isinstance(news, Failure):
            await self._fail(news)
            return False
        if not news:
            return True
        draft = self.draft()
        draft.with_checkpoint = False
        for event in news:
            draft.add(event)
        return await self.commit(draft)

    async def _end_in_conflict(self, decision: Decision, conflict: Failure) -> None:
        draft = self.draft()
        draft_model_uses(draft, decision, self.deciding.replies)
        fail(draft, conflict)
        await self.commit(draft)

    async def _act(self) -> None:
        """Run what the step asks for; the steps of code need its function where it stood."""
        lost = await self.effects.without_step()
        if lost is not None:
            await self._fail(lost)
        else:
            await self.effects.act()

    async def _take_over(self) -> None:
        """Decide the calls that the run takes over from its origin; the next turn runs them."""
        inherited = list(self.view.snapshot.inherited.values())
        kin = Kin(self.core)
        undone = await undone_elsewhere(kin, self.view.facts)
        elsewhere = await made_elsewhere(kin, self.view.facts, inherited)
        calls = [await taken_over(kin, self.view, call, undone, elsewhere) for call in inherited]
        draft = self.draft()
        draft_inherited(draft, calls, self.judge)
        await self.commit(draft)

    async def _planner_failed(self, error: PlannerFailure) -> None:
        """Retry with back-off while the policy allows, else fail the run (R-10.1)."""
        policy = self.agent.model_retry
        failed = self.view.snapshot.model_failures + 1
        draft = self.draft()
        draft_model_uses(draft, UpdatePlan(model_uses=error.model_uses))
        if error.failure.retryable and failed < policy.attempts_max * self.agent.models:
            in_row = (failed - 1) % policy.attempts_max + 1
            asked_s = min(error.retry_after_s or 0, WORK_S_MAX)
            delay_s = max(policy.delay_s(in_row, self.core.chance.random()), asked_s)
            draft.add(
                RetryEvent(
                    subject="model",
                    failed=failed,
                    failure=error.failure,
                    delay_ms=round(delay_s * 1000),
                )
            )
            draft.release(AttemptEnd.PARKED, ParkedOn.RETRY)
            draft.ready_in_s = delay_s
        else:
            fail(draft, error.failure)
        await self.commit(draft)

    async def _fail(self, failure: Failure) -> None:
        draft = self.draft()
        fail(draft, failure)
        await self.commit(draft)

    async def _close(self, failure: Failure) -> None:
        """Write the closing commit; what came in meanwhile is its result (decision 3)."""
        told = await look_up_open(self.view, self.around.tools, LOOKUPS_TIMEOUT_S)
        effects = await finished_effects(self.core, self.view)
        came = [*self.effects.unrecorded]
        draft = self.draft()
        why = end_transition(self.view.snapshot.state, failure)
        if failure.code is FailureCode.RUN_TIMEOUT:
            limit_s = self.view.facts.options.timeouts.run_s or 0
            draft.add(TimeoutEvent(subject="run", limit_ms=round(limit_s * 1000)))
        close_run(draft, why, failure, known=known_of(came, told), effects=effects)
        if await self.commit(draft):
            self.effects.settle(came)

    async def _after_stop(self, why: Stop) -> None:
        """Do what an attempt still owes after it was stopped from outside."""
        if why is Stop.LEASE_LOST:
            raise LeaseGone
        if why is Stop.DRAIN:
            return
        while not self.released:
            self.view = await self._loaded()  # a draft cut off by the stop may stand in the old one
            if self.view.snapshot.cancel_epoch > 0:
                await self._close(CANCELLED)
            elif why is Stop.DEADLINE:
                await self._close(TIMED_OUT)
            else:
                return

    async def _heed_cancel(self) -> None:
        """After an accepted cancel only the closing commit may follow: stop all else, here."""
        if self.view.snapshot.cancel_epoch > 0:
            self.lease.stop(Stop.CANCEL)
            await checkpoint()  # a commit that is on its way is written all the same

    async def look_for_answers(self) -> None:
        """Fold what others wrote in the meantime; while the store is away, nothing is known."""
        with suppress(Unavailable):
            await self._catch_up()
        await self._heed_cancel()

    async def _catch_up(self) -> None:
        row = await self.core.reader.find_run(None, self.view.facts.run_id)
        if row is None or row.hot.lease_token != self.lease.token:
            raise LeaseGone
        await catch_up(self.core, self.view, row.hot)

    def draft(self) -> Draft:
        """Return an empty commit of this holder."""
        return Draft(
            view=self.view,
            ids=self.core.ids,
            token=self.lease.token,
            fields=self.agent.fields,
        )

    def check_lease(self) -> None:
        """Raise LeaseGone when the lease is no longer trusted (decision 17)."""
        if not self.lease.is_valid(self.core.clock.monotonic()):
            raise LeaseGone

    async def commit(self, draft: Draft) -> bool:
        """Write a draft; True when it is durable, False when the view had to be loaded again.

        Raises LeaseGone, or CannotStore when the store refuses the data.
        """
        result = await self._send(draft)
        match result:
            case Committed():
                self.released = draft.attempt_end is not None
                count_draft(self.core, draft)
                if self.lease.suspected and self.view.faults == 0:
                    self.lease.suspected = False
                    self.around.on_cleared()
                if draft.is_closing or draft.ends_run:
                    await self._after_end(draft)
                return True
            case Behind() | CancelRequested():
                if draft.keeps:  # likely a run of another worker ended on the same field
                    await anyio.sleep(MOVED_PAUSE_S * self.core.chance.random())
                await self._load_again()
                await self._heed_cancel()
                return False
            case LeaseLost():
                raise LeaseGone
            case Refused():
                raise CannotStore(result.reason)

    async def _after_end(self, draft: Draft) -> None:
        """Tell the parent of the end, or see to the children that are to end first.

        Nothing is lost when this fails: timers are left for both, and a sweep acts on them.
        """
        tools = self.around.tools
        if draft.ends_run:
            await tell_parent(self.core, self.view.facts, tools)
            return
        with suppress(PerdureError, Damaged):
            await close_unheld(self.core, self.view.facts.run_id, TimerKind.CLOSE, tools)

    async def _send(
        self, draft: Draft
    ) -> Committed | Behind | CancelRequested | LeaseLost | Refused:
        """Send one commit until the store answers or the lease is over.

        Once sent it may be durable, and may itself have given the lease up: the heartbeat then
        finds it gone. So it is sent again once before that counts; the store's fence decides.
        """
        commit = draft.build()
        self.check_lease()
        try:
            return await self.around.committer.commit(commit)
        except (Unavailable, StoreFull):
            with anyio.CancelScope(shield=True):
                return await self._send_again(commit)
        raise AssertionError("a shielded scope is never cancelled")

    async def _send_again(
        self, commit: Commit
    ) -> Committed | Behind | CancelRequested | LeaseLost | Refused:
        while True:
            await anyio.sleep(RESEND_S * (1 + self.core.chance.random()))
            try:
                return await self.around.committer.commit(commit)
            except (Unavailable, StoreFull):
                self.check_lease()

    async def _loaded(self) -> RunView:
        row = await self.core.reader.find_run(None, self.view.facts.run_id)
        if row is None or row.hot.lease_token != self.lease.token:
            raise LeaseGone
        return await load_view(self.core, row)

    async def fail_attempt(self, error: Exception) -> None:
        """Record that this attempt failed; try the run again later, or end it (R-10.2)."""
        while not self.released:
            self.view = await self._loaded()
            await self._draft_failed_attempt(error)

    async def _draft_failed_attempt(self, error: Exception) -> None:
        self.view.faults += 1
        reason = told_of(self.core, self.view.facts.run_id, error)
        if self.view.snapshot.cancel_epoch > 0:
            await self._close(CANCELLED)
            return
        came = [*self.effects.unrecorded]
        draft = self.draft()
        draft_failed_attempt(draft, error, reason, known_of(came, {}), self.core.chance)
        if await self.commit(draft) and draft.is_closing and not is_about_data(error):
            self.effects.settle(came)
