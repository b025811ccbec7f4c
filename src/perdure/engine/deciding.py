"""How a held run's planner is asked: once for each decision, aloud when the run streams."""

from dataclasses import dataclass

import anyio

from perdure.engine.context import PlannerContext
from perdure.engine.fields_read import current_values
from perdure.engine.held import HeldRun
from perdure.engine.journal import reserved_name
from perdure.engine.lease import LeaseGone
from perdure.engine.ports import AuthorError, PlannerFailure
from perdure.engine.replies import Replies
from perdure.engine.values import describe
from perdure.protocol.decisions import Decision
from perdure.protocol.errors import PerdureError
from perdure.protocol.values import RESERVED


@dataclass(slots=True, kw_only=True)
class Deciding:
    """What an attempt's planner has decided and said that no commit has made durable yet."""

    attempt: HeldRun
    replies: Replies | None = None
    _decision: tuple[int, Decision] | None = None

    def forget(self) -> None:
        """Drop what was decided and said: it is durable now."""
        self._decision = self.replies = None

    async def decide(self) -> Decision:
        """Ask the planner, or return what it decided before a commit that was not written.

        A session remembers by itself what is not written yet, and may know more by now. Raises
        PlannerFailure, AuthorError for what the planner's code raises, and LeaseGone.
        """
        held = self.attempt
        step = held.view.snapshot.step_index
        if held.session is None and self._decision is not None and self._decision[0] == step:
            return self._decision[1]
        held.check_lease()
        agent = held.judge.agent
        context = held.view.context(held.judge.granted(), for_code=held.session is not None)
        if agent.fields and held.session is None:
            context.fields = await current_values(held.view, agent)
        if held.view.facts.options.stream:
            decision = await self._decide_aloud(context)
        else:
            decision = await self._ask(context)
        self._decision = (step, decision)
        return decision

    async def _decide_aloud(self, context: PlannerContext) -> Decision:
        """Ask the planner and pass on what it says meanwhile (R-6.5)."""
        held = self.attempt
        replies = self.replies = Replies(held.around.core, held.lease, held.view)
        context.open_message = replies.open
        decision: Decision | None = None
        failure: PlannerFailure | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(replies.keep_durable, self._write_replies)
            try:
                decision = await self._ask(context)
            except PlannerFailure as error:
                failure = error  # raised outside of the group, which would wrap it
            finally:
                replies.close()
        if failure is not None:
            raise failure
        assert decision is not None
        return decision

    async def _ask(self, context: PlannerContext) -> Decision:
        """Return the planner's decision; what its code raises is told as the author's.

        Only the session of a code agent notes values under names of the runtime.
        """
        session = self.attempt.session
        planner = session or self.attempt.judge.agent.planner
        try:
            decision = await planner.next_step(context)
        except (PlannerFailure, AuthorError, PerdureError, LeaseGone):
            raise
        except Exception as error:
            raise AuthorError(describe(error)) from error
        name = reserved_name(decision, is_code=session is not None)
        if name is not None:
            raise AuthorError(f"{name}: names that begin with `{RESERVED}` are the runtime's")
        return decision

    async def _write_replies(self, replies: Replies) -> None:
        """Make durable what was said so far. No checkpoint: nothing has moved."""
        draft = self.attempt.draft()
        draft.with_checkpoint = False
        upto = replies.draft_pending(draft)
        if upto and await self.attempt.commit(draft):
            replies.written(upto)
