"""The end of a run that was written in a form this release cannot carry on (R-20.1)."""

import anyio

from perdure.engine.closing import CANCELLED, close_run, end_transition, finished_effects
from perdure.engine.committer import announce
from perdure.engine.continuing import carry_on, stop_continuing
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.draft import Draft
from perdure.engine.lease import Lease, LeaseGone
from perdure.engine.rowview import view_from_rows
from perdure.engine.values import short
from perdure.protocol.agents import AgentCard
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.schema import Incompatible
from perdure.store.commits import Behind, Busy, CancelRequested, Committed

PAUSE_S = 0.05


class VersionGone(Incompatible):
    """The run's agent version is gone, and another one says that it took its place.

    `continues_as`: its card, when the run is to go on as a new one of that version.
    """

    def __init__(self, reason: str, continues_as: AgentCard | None = None) -> None:
        super().__init__(reason)
        self.continues_as = continues_as


async def end_incompatible(core: Core, lease: Lease, error: Incompatible) -> None:
    """End a held run CHECKPOINT_INCOMPATIBLE, or as cancelled; raise LeaseGone when it is lost.

    Every open call gets its result and every question its end, from the rows alone; what was
    begun and is not known to have ended is `unknown`. When it is to go on as a new run, that run is
    there before this one ends, and is named in the failure's details.
    """
    newer = error.continues_as if isinstance(error, VersionGone) else None
    continued_by: str | None = None
    while True:
        row = await core.reader.find_run(None, lease.run_id)
        if row is None or row.hot.lease_token != lease.token:
            raise LeaseGone
        view = await view_from_rows(core, row)
        failure, effects = CANCELLED, None
        if row.hot.cancel_epoch > 0:
            effects = await finished_effects(core, view)
        else:
            if newer is not None and continued_by is None:
                continued_by = await carry_on(core, row, newer, str(error))
            failure = Failure(
                code=FailureCode.CHECKPOINT_INCOMPATIBLE,
                reason=short(str(error)),
                stage=Stage.RECOVERY,
                details={} if continued_by is None else {"continued_by": continued_by},
            )
        draft = Draft(view=view, ids=core.ids, token=lease.token, with_checkpoint=False)
        why = end_transition(row.hot.state, failure)
        close_run(draft, why, failure, effects=effects)
        draft.with_checkpoint = False
        commit = draft.build()
        (result,) = await core.store.commit([commit])
        match result:
            case Committed():
                announce(core, commit)
                count_draft(core, draft)
                if row.hot.cancel_epoch > 0 and continued_by is not None:
                    await stop_continuing(core, row, continued_by)
                return
            case Behind() | CancelRequested() | Busy():
                await anyio.sleep(PAUSE_S * (1 + core.chance.random()))
            case _:
                raise LeaseGone
