"""B3: a tree of 201 runs on four worker processes, one of them stopped, is cancelled (R-9.5, F47)."""

import signal
from pathlib import Path

import anyio
import pytest

from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL
from perdure.store.reader import RunFilter
from perdure.testing.scene import BRANCHES, LEAVES, cancel_act, submit_act
from perdure.testing.stopping import stop_between_writes
from tests.crash.stage import Stage, staged

SIZE = 1 + BRANCHES + BRANCHES * LEAVES
LEASE_S = 60.0
DEADLINE_S = LEASE_S / 4
SPARE_S = 45.0
"""What sweeps and a busy machine may take beyond the deadline; less than the lease all in all."""

NEW_WORK = {"action", "model", "artifact", "interrupt", "approval_request"}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database that goes with the test."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'scene.db'}"
    return request.getfixturevalue("postgres_own_dsn")


async def tree(stage: Stage, root: str) -> list[RunRow]:
    """Return the root and all below it."""
    where = RunFilter(root_run_id=root)
    below = await stage.core.reader.list_runs(None, where, after=None, limit=500)
    return [await stage.row(root), *below]


async def until_all_hold(stage: Stage, root: str) -> None:
    """Return once every leaf runs its call."""
    with anyio.fail_after(120):
        while True:
            rows = await tree(stage, root)
            leaves = [row for row in rows if row.facts.depth == 2]
            if len(leaves) == BRANCHES * LEAVES and all(row.hot.open_calls for row in leaves):
                return
            await anyio.sleep(0.2)


@pytest.mark.crash_full
@pytest.mark.timeout(400)
async def test_a_large_tree_is_cancelled_while_a_worker_stands_still(
    url: str, tmp_path: Path
) -> None:
    """All end within the deadline, those of the stopped worker as ORPHANED, the root last; nothing
    new is begun after the accepted cancel, also not when the worker wakes up."""
    async with staged(url, tmp_path, lease_s=LEASE_S) as stage:
        workers = [await stage.worker() for _ in range(4)]
        root = await submit_act(stage.core, "tree", "tree")
        await until_all_hold(stage, root)
        await stop_between_writes(stage.url, workers[0].send)
        await cancel_act(stage.core, root)
        with anyio.fail_after(DEADLINE_S + SPARE_S):
            while (  # noqa: ASYNC110  # other processes ring no bell
                await stage.row(root)
            ).hot.state not in TERMINAL:
                await anyio.sleep(0.2)
        rows = await tree(stage, root)
        assert len(rows) == SIZE
        ends = [row.hot.finished_at for row in rows]
        assert None not in ends
        assert max(end for end in ends if end is not None) == rows[0].hot.finished_at
        codes = {row.hot.code for row in rows}
        assert codes == {FailureCode.RUN_CANCELLED, FailureCode.ORPHANED}
        workers[0].send(signal.SIGCONT)
        await anyio.sleep(3)
        for row in await tree(stage, root):
            log = await stage.log(row.facts.run_id)
            cancelled = next(event.seq for event in log if event.type == "cancel")
            assert not NEW_WORK & {event.type for event in log if event.seq > cancelled}
        assert await stage.findings() == []
        for worker in workers:
            await worker.drained()
