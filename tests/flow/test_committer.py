"""How commits travel to the store: in groups, without timers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from perdure.engine.committer import Committer
from perdure.protocol import ids
from perdure.protocol.base import from_micros
from perdure.protocol.decisions import Finish
from perdure.store.commits import Commit, CommitResult, Committed
from perdure.testing.builders import commit_of, new_id
from perdure.testing.embedded import scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import flow


class Sizes:
    """A store that notes how many commits came together, and has one more sent meanwhile."""

    def __init__(self, meanwhile: anyio.Event) -> None:
        self.seen = list[int]()
        self._meanwhile = meanwhile

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """Answer that all are durable."""
        self.seen.append(len(commits))
        self._meanwhile.set()
        await checkpoint()
        await checkpoint()
        return [Committed(seq=1, at=from_micros(0))] * len(commits)


async def test_those_who_were_answered_together_travel_together_again(
    url: str, zoo: ToolZoo
) -> None:
    """One that lined up while they were written does not go alone before them."""
    meanwhile = anyio.Event()
    sizes = Sizes(meanwhile)
    async with flow(url, [scripted("ends", lambda _: Finish(answer=1))], zoo) as engine:
        row = await engine.wait_terminal(await engine.submit("ends"))
        store: Any = sizes
        committer = Committer(replace(engine.core, store=store))

        async def work() -> None:
            """Commit, have a turn or two of the loop, and commit again, as a run does."""
            for _ in range(2):
                await committer.commit(replace(commit_of(row), run_id=new_id(ids.RUN)))
                await checkpoint()

        async def come_later() -> None:
            await meanwhile.wait()
            await committer.commit(replace(commit_of(row), run_id=new_id(ids.RUN)))

        async with anyio.create_task_group() as group:
            group.start_soon(committer.run)
            async with anyio.create_task_group() as workers:
                workers.start_soon(come_later)
                for _ in range(8):
                    workers.start_soon(work)
            group.cancel_scope.cancel()
    assert sizes.seen == [8, 9]
