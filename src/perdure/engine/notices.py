"""Telling approvers that they are asked, and asking others in time (R-8.3).

An approval that is to be told of, or passed on, has a timer of kind `notice`. Whoever finds it due
tells the approvers, and records that afterwards: a crash in between tells them twice, never not at
all. What fails is tried again, ever more slowly, and recorded each time; the run waits for its
answer meanwhile and nothing of this holds it up.
"""

import logging
from dataclasses import dataclass, field

import anyio
import anyio.abc

from perdure.engine.approvals import flag_undecidable, leave_as_it_is, note
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.load import Damaged, load_view
from perdure.engine.ports import ApprovalNotice, Notifier
from perdure.engine.snapshot import OpenInterrupt
from perdure.engine.unheld import intervene
from perdure.engine.values import describe
from perdure.engine.view import RunView
from perdure.protocol.errors import PerdureError
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import Incompatible
from perdure.store.commits import NoticeDue

log = logging.getLogger(__name__)

AT_ONCE_MAX = 16
TRIES_MAX = 8
NOTIFY_TIMEOUT_S = 30.0
RETRY_MAX_S = 600.0


@dataclass(slots=True)
class Notices:
    """Tells and escalates in the background of a worker, a few at once."""

    core: Core
    notifier: Notifier | None
    _busy: set[str] = field(default_factory=set[str])
    _group: anyio.abc.TaskGroup | None = None

    async def run(self) -> None:
        """Work on what is offered, until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            await anyio.sleep_forever()

    def offer(self, run_id: str, interrupt_id: str) -> None:
        """Take an approval whose notice is due; a sweep offers again what is not taken now."""
        if self._group is None or interrupt_id in self._busy or len(self._busy) >= AT_ONCE_MAX:
            return
        self._busy.add(interrupt_id)
        self._group.start_soon(self._take, run_id, interrupt_id)

    async def _take(self, run_id: str, interrupt_id: str) -> None:
        try:
            await self._act(run_id, interrupt_id)
        except (PerdureError, Damaged, Incompatible) as error:
            log.info("the notice of %s waits for a sweep: %s", interrupt_id, error)
        except Exception:  # one approval's trouble must not end the others
            log.exception("the notice of %s could not be given", interrupt_id)
        finally:
            self._busy.discard(interrupt_id)

    async def _act(self, run_id: str, interrupt_id: str) -> None:
        row = await self.core.reader.find_run(None, run_id)
        asked = await self.core.reader.find_interrupt(None, interrupt_id)
        if row is None or asked is None or row.hot.cancel_epoch > 0:
            return
        view = await load_view(self.core, row, with_messages=False)
        question = view.snapshot.open_interrupts.get(interrupt_id)
        if question is None:
            return
        left_s = await self._left_s(asked, question)
        tells = question.notifies and not question.told and question.not_told < TRIES_MAX
        if left_s is not None and left_s <= 0:
            await self._escalate(run_id, interrupt_id)
        elif self.notifier is not None and tells:
            await self._tell(self.notifier, view, asked, question, left_s)

    async def _left_s(self, asked: InterruptRow, question: OpenInterrupt) -> float | None:
        """Return the time until others are asked; None when that is not to be."""
        if question.escalate_after_s is None:
            return None
        open_s = (await self.core.reader.now() - asked.created_at).total_seconds()
        return question.escalate_after_s - open_s

    async def _escalate(self, run_id: str, interrupt_id: str) -> None:
        """Record that others may decide now, and have them told."""

        def change(row: RunRow, draft: Draft) -> bool:
            question = draft.view.snapshot.open_interrupts.get(interrupt_id)
            ends = row.hot.cancel_epoch > 0 or draft.view.snapshot.ending is not None
            if question is None or question.escalate_after_s is None or ends:
                return False
            others = list(question.escalate_to)
            note(draft, interrupt_id, "escalated", by="runtime", approvers=[*others])
            flag_undecidable(draft, question, self.core.settings.principals)
            self._leave(row, draft, interrupt_id, 0 if question.notifies else None)
            return True

        await intervene(self.core, run_id, change)

    async def _tell(
        self,
        notifier: Notifier,
        view: RunView,
        asked: InterruptRow,
        question: OpenInterrupt,
        left_s: float | None,
    ) -> None:
        number = question.not_told + 1
        error = await self._notify(notifier, _notice(view, asked, question, number))
        told = question.approvers

        def change(row: RunRow, draft: Draft) -> bool:
            now = draft.view.snapshot.open_interrupts.get(asked.interrupt_id)
            ends = row.hot.cancel_epoch > 0 or draft.view.snapshot.ending is not None
            if now is None or ends or now.approvers != told or now.told:
                return False  # answered meanwhile, or others are to be told now
            due_in_s = left_s
            if error is None:
                note(draft, asked.interrupt_id, "notified", approvers=list(told), number=number)
            else:
                note(
                    draft,
                    asked.interrupt_id,
                    "not_notified",
                    approvers=list(told),
                    number=number,
                    error=error,
                )
                if number < TRIES_MAX:
                    first_s = self.core.settings.notice_retry_s
                    wait_s = min(first_s * 2 ** (number - 1), RETRY_MAX_S)
                    due_in_s = wait_s if left_s is None else min(wait_s, left_s)
            self._leave(row, draft, asked.interrupt_id, due_in_s)
            return True

        await intervene(self.core, asked.run_id, change)

    async def _notify(self, notifier: Notifier, notice: ApprovalNotice) -> str | None:
        """Tell the approvers; return what went wrong."""
        try:
            with anyio.fail_after(NOTIFY_TIMEOUT_S):
                await notifier.notify(notice)
        except TimeoutError:
            return f"it did not end within {NOTIFY_TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001  # a user's code may raise anything
            return describe(error)
        return None

    def _leave(self, row: RunRow, draft: Draft, interrupt_id: str, due_in_s: float | None) -> None:
        """Draft when the next look is due, and leave the run as it is."""
        draft.notices.append(NoticeDue(interrupt_id=interrupt_id, due_in_s=due_in_s))
        leave_as_it_is(row, draft)


def _notice(
    view: RunView, asked: InterruptRow, question: OpenInterrupt, number: int
) -> ApprovalNotice:
    call = view.snapshot.open_calls.get(question.tool_call_id or "")
    facts = view.facts
    return ApprovalNotice(
        interrupt_id=asked.interrupt_id,
        run_id=facts.run_id,
        thread_id=facts.thread_id,
        tenant_id=facts.tenant_id,
        agent_id=view.agent_id,
        tool="" if call is None else call.tool,
        approvers=question.approvers,
        expires_at=asked.expires_at,
        escalated=bool(question.escalate_to) and question.escalate_after_s is None,
        number=number,
    )
