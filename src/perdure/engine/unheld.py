"""Writing to a run without holding it: read, draft, compare and swap on the last seq, try again.

Answers, cancels, timers and closings go this way (decision 2). The draft is built from a view
of the run as of some seq; when somebody wrote in between, the view is loaded again.
"""

from collections.abc import Callable

import anyio

from perdure.engine.aside import put_aside_unless_over
from perdure.engine.committer import announce
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.draft import Draft
from perdure.engine.load import Damaged, load_view
from perdure.engine.view import RunView
from perdure.protocol.errors import Conflict
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import ParkedOn
from perdure.store.commits import Committed, Refused

TRIES_MAX = 50
PAUSE_S = 0.01


class NotCarriedOn(Conflict):
    """The run was written in a form that this release cannot carry on."""


def unheld_draft(core: Core, view: RunView, row: RunRow) -> Draft:
    """Return an empty commit for a run as it stands; beside a holder when there is one."""
    return Draft(
        view=view,
        ids=core.ids,
        token=None,
        any_holder=row.hot.lease_owner is not None,
    )


async def intervene(
    core: Core, run_id: str, draft_change: Callable[[RunRow, Draft], bool]
) -> RunRow | None:
    """Write a change to a run, whoever holds it; return the row it was built on.

    `draft_change` fills the draft and returns False when there is nothing to write; it is called
    again on a fresh view whenever somebody else wrote first, and may raise to refuse. Returns
    None when the run does not exist, has lost its history, or nothing was to be written.

    Raises Conflict when the run moved on at every try, or is put aside for repair: one that is
    damaged is put aside by this.
    """
    for attempt in range(TRIES_MAX):
        row = await core.reader.find_run(None, run_id)
        if row is None:
            return None
        if row.hot.parked_on is ParkedOn.REPAIR:
            raise Conflict("the run is put aside for repair")
        view = await _view_of(core, row)
        if view is None:
            return None
        draft = unheld_draft(core, view, row)
        if row.hot.waiting_since is not None or row.hot.wake_at is not None:
            draft.now = await core.reader.now()
        if not draft_change(row, draft):
            return None
        commit = draft.build()
        (result,) = await core.store.commit([commit])
        if isinstance(result, Committed):
            announce(core, commit)
            count_draft(core, draft)
            return row
        if isinstance(result, Refused):
            raise Conflict(f"the change cannot be stored: {result.reason}")
        await anyio.sleep(PAUSE_S * attempt * core.chance.random())
    raise Conflict("the run is moving too fast; try again")


async def _view_of(core: Core, row: RunRow) -> RunView | None:
    """Return a run's view; a damaged run is put aside.

    None when the run is over or deleted by now: it was read while its history was dropped.
    """
    run_id = row.facts.run_id
    try:
        return await load_view(core, row, with_messages=False)
    except Incompatible as error:
        raise NotCarriedOn(f"this release cannot carry the run on: {error}") from error
    except Damaged as error:
        damaged = error
    await put_aside_unless_over(core, run_id, damaged, seq=row.hot.last_seq)
    return None
