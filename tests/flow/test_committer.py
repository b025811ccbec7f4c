"""How commits travel to the store: in groups, without timers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
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
    """A store that notes how many commits came together, and has something done meanwhile."""

    def __init__(self, meanwhile: Callable[[], None], *, aside: bool = False) -> None:
        self.seen = list[int]()
        self.writes_aside = aside
        self._meanwhile = meanwhile

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """Answer that all are durable."""
        self.seen.append(len(commits))
        self._meanwhile()
        await checkpoint()
        await checkpoint()
        return [Committed(seq=1, at=from_micros(0))] * len(commits)


async def test_those_who_were_answered_together_travel_together_again(
    url: str, zoo: ToolZoo
) -> None:
    """One that lined up while they were written does not go alone before them."""
    meanwhile = anyio.Event()
    sizes = Sizes(meanwhile.set)
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


@pytest.mark.parametrize("aside", [True, False])
async def test_while_another_process_writes_for_one_half_the_other_works(
    url: str, zoo: ToolZoo, *, aside: bool
) -> None:
    """And who is answered later is answered even if nobody commits any more."""
    answered = list[int]()
    at_start = list[int]()
    sizes = Sizes(lambda: at_start.append(len(answered)), aside=aside)
    async with flow(url, [scripted("ends", lambda _: Finish(answer=1))], zoo) as engine:
        row = await engine.wait_terminal(await engine.submit("ends"))
        store: Any = sizes
        committer = Committer(replace(engine.core, store=store))

        async def work() -> None:
            for turn in range(2):
                await committer.commit(replace(commit_of(row), run_id=new_id(ids.RUN)))
                answered.append(turn)

        async with anyio.create_task_group() as group:
            group.start_soon(committer.run)
            async with anyio.create_task_group() as workers:
                for _ in range(16):
                    workers.start_soon(work)
            group.cancel_scope.cancel()
    assert sizes.seen == ([16, 8, 8] if aside else [16, 16])
    assert at_start == ([0, 8, 16 + 4] if aside else [0, 16])


async def test_what_is_written_is_answered_when_the_worker_goes_down(
    url: str, zoo: ToolZoo
) -> None:
    """Those who would have been answered a little later, too."""
    async with flow(url, [scripted("ends", lambda _: Finish(answer=1))], zoo) as engine:
        row = await engine.wait_terminal(await engine.submit("ends"))
        going = anyio.CancelScope()
        store: Any = Sizes(going.cancel, aside=True)
        store.commit = _shielded(store.commit)
        committer = Committer(replace(engine.core, store=store))
        answers = list[CommitResult]()

        async def run() -> None:
            with going:
                await committer.run()

        async def work() -> None:
            commit = replace(commit_of(row), run_id=new_id(ids.RUN))
            answers.append(await committer.commit(commit))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            for _ in range(16):
                group.start_soon(work)
    assert [type(answer) for answer in answers] == [Committed] * 16


def _shielded(commit: Callable[..., Any]) -> Callable[..., Any]:
    async def shielded(commits: Sequence[Commit]) -> object:
        with anyio.CancelScope(shield=True):
            return await commit(commits)

    return shielded
