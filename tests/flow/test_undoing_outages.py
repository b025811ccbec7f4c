"""The store does not answer while an effect is undone (R-9.4)."""

from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.protocol.decisions import Ask
from perdure.protocol.errors import StoreFull, Unavailable
from perdure.protocol.events import CompensationEvent
from perdure.store.commits import Commit
from perdure.testing.embedded import call, new_worker
from perdure.testing.tools import ToolZoo
from tests.flow.till import COMPENSATE, Till, effects_of, follows
from tests.flow.world import data_of, flow


class Faulty:
    """A store that once does not answer to a `started`, or to what came of a try, as it is to."""

    def __init__(self, store: Any, fault: str) -> None:
        self._store = store
        self._fault = fault

    async def commit(self, commits: list[Commit]) -> object:
        """Write, with the fault when it is due."""
        events = [event.data for one in commits for event in one.events]
        told = [data.status for data in events if isinstance(data, CompensationEvent)]
        if not told or (told == ["started"]) is (self._fault == "full"):
            return await self._store.commit(commits)
        fault, self._fault = self._fault, ""
        if fault == "full":
            raise StoreFull("no room")
        written = await self._store.commit(commits)
        if fault == "lost":
            raise Unavailable("no answer")
        return await self._store.commit(commits) if fault == "again" else written

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("fault", ["full", "lost", "again"])
async def test_an_answer_that_the_store_does_not_give_leaves_no_try_unknown(
    url: str, zoo: ToolZoo, fault: str
) -> None:
    """R-9.4: a refund that had succeeded was told as `unknown` when the store was full for a moment.
    A try whose start was stored, but not acknowledged, was taken for one that was cut off, also when
    the same commit was sent again: nothing was refunded."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.stop()
        core = replace(engine.core, store=cast("Any", Faulty(engine.core.store, fault)))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        await engine.cancel(run_id, options=COMPENSATE)
        assert await effects_of(engine, run_id) == {"charge": ("succeeded", "succeeded")}
        tries = data_of(await engine.events(run_id), CompensationEvent)
        assert [one.status for one in tries] == ["started", "succeeded"]
        assert till.refunds == till.charges
