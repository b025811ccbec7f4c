"""The stage of a scene: the installation's database, workers of the drill's own, and what is noted.

Runs are of the tenant `perdure-drill`, of the agent `perdure.drill`, in a queue that is new for each
scene: no worker of the installation takes them, and no list of its tenants shows them.
"""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.abc

from perdure.drill.agents import AGENT, make_catalog
from perdure.drill.outside import Outside
from perdure.drill.own import own_reader, own_store
from perdure.engine.core import Core
from perdure.engine.heartbeat import Holder
from perdure.engine.worker import Worker
from perdure.ops.process import stop_child
from perdure.ops.settings import RetentionSettings, Settings, WorkerSettings
from perdure.ops.verify import Finding, verify
from perdure.protocol.codec import digest
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunOptions, RunRow
from perdure.protocol.states import TERMINAL, Answer, CancelAction, InterruptStatus, RunState
from perdure.runtime import open_core, open_worker
from perdure.service.base import Service
from perdure.service.interrupts import Answered, AnswerRequest, resolve
from perdure.service.principal import Principal
from perdure.service.runs import RunRequest, cancel_run, create_run
from perdure.service.thread_branches import delete_thread
from perdure.signals.ports import run_topic
from perdure.store.reader import InterruptFilter
from perdure.store.requests import AgentRegistration

TENANT = "perdure-drill"
WHO = Principal(tenant_id=TENANT, name="drill")
LOOK_S = 0.2
STOP_S = 10.0
GRACE_S = 0.5
QUESTIONS_MAX = 50


class _Mute:
    """A heartbeat that never beats: its worker is taken for dead while it goes on."""

    async def run(self, holder: Holder) -> None:
        """Renew nothing."""
        del holder
        await anyio.sleep_forever()

    def beat_now(self) -> None:
        """Renew nothing."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """What a scene works with, and what it notes."""

    core: Core
    settings: Settings
    folder: Path
    run_ids: set[str]
    healed: list[str] = field(default_factory=list[str])
    person: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    @property
    def service(self) -> Service:
        """The use cases, as a server has them."""
        return Service(core=self.core)

    @property
    def outside(self) -> Outside:
        """The world outside of the database."""
        return Outside(self.folder)

    def check(self, holds: bool, *, healed: str, problem: str) -> None:
        """Note what healed itself when it holds, and the problem otherwise."""
        if holds:
            self.healed.append(healed)
        else:
            self.problems.append(problem)

    # -- what a caller does

    async def order(self, scene: str, key: str | None = None, **options: object) -> str:
        """Create a run in the scene's queue and return its id."""
        wish = RunOptions.model_validate({**options, "queue": self.settings.worker.queues[0]})
        request = RunRequest(input=scene, options=wish)
        made = await create_run(self.service, WHO, AGENT, request, header_key=key)
        self.run_ids.add(made.run.run_id)
        return made.run.run_id

    async def answer(self, interrupt_id: str, answer: Answer, **fields: object) -> Answered:
        """Answer a question."""
        request = AnswerRequest.model_validate({"answer": answer, **fields})
        return await resolve(self.service, WHO, interrupt_id, request)

    async def cancel(self, run_id: str, *, compensate: bool) -> None:
        """Cancel a run."""
        await cancel_run(
            self.service,
            WHO,
            run_id,
            action=CancelAction.INTERRUPT,
            reason="a recovery drill",
            compensate=compensate,
            source="cli",
        )

    # -- what is seen

    async def row(self, run_id: str) -> RunRow:
        """Return a run of the drill."""
        row = await self.core.reader.find_run(TENANT, run_id)
        if row is None:
            raise Unavailable(f"the run {run_id} is gone")
        return row

    async def until(self, run_id: str, holds: Callable[[RunRow], bool]) -> RunRow:
        """Return a run once it is as asked."""
        async with self.core.signals.subscribe(run_topic(run_id)) as bell:
            while not holds(row := await self.row(run_id)):
                with anyio.move_on_after(LOOK_S):
                    await bell.wait()
        return row

    async def ended(self, run_id: str) -> RunRow:
        """Return a run once it has ended."""
        return await self.until(run_id, lambda row: row.hot.state in TERMINAL)

    async def asked(self, run_id: str) -> list[InterruptRow]:
        """Return the open questions of a run once it waits for a person, or has ended."""
        await self.until(
            run_id,
            lambda row: row.hot.state in {RunState.WAITING_HUMAN, *TERMINAL},
        )
        where = InterruptFilter(status=InterruptStatus.PENDING, run_id=run_id)
        return await self.core.reader.list_interrupts(
            TENANT, where, after=None, limit=QUESTIONS_MAX
        )

    async def seen(self, holds: Callable[[], bool]) -> None:
        """Return once it holds in the world outside, which tells nobody."""
        while not holds():  # noqa: ASYNC110  # a folder rings no bell
            await anyio.sleep(LOOK_S)

    # -- workers

    @asynccontextmanager
    async def worker(self, *, mute: bool = False) -> AsyncGenerator[Worker]:
        """Have a worker in this process. A mute one holds one run, and its lease runs out."""
        core = self.core
        if mute:
            core = replace(core, settings=replace(core.settings, runs_max=1))
        opened = open_worker(core, self.settings, make_catalog(self.outside))
        async with opened as made, anyio.create_task_group() as group:
            made.beside = ()  # what it verifies is all that the installation has
            if mute:
                made.heartbeat = _Mute()
            await group.start(made.run)
            try:
                yield made
            finally:
                made.drain()  # bounded by its grace period

    @asynccontextmanager
    async def mortal_worker(self) -> AsyncGenerator[anyio.abc.Process]:
        """Have a worker in a process of its own, which its tools kill."""
        worker = self.settings.worker
        settings = {
            "PERDURE_DB__URL": self.settings.db.url,
            "PERDURE_WORKER__QUEUES": worker.queues[0],
            "PERDURE_WORKER__LEASE_TTL_S": str(worker.lease_ttl_s),
            "PERDURE_WORKER__POLL_INTERVAL_S": str(worker.poll_interval_s),
            "PERDURE_AGENTS": "",
        }
        with (self.folder / "worker.log").open("ab") as log:
            process = await anyio.open_process(
                [sys.executable, "-P", "-m", "perdure.drill.child", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await stop_child(process, STOP_S)

    # -- the end

    async def verify(self) -> None:
        """Note what `perdure verify` finds in the runs of the scene."""
        found: list[Finding] = []
        for run_id in self.run_ids:
            await verify(self.core.reader, tenant_id=TENANT, run_id=run_id, on_finding=found.append)
        self.problems += [f"verify: {item.check} {item.subject}: {item.text}" for item in found]

    async def clear_away(self) -> bool:
        """Delete what the scene left, with its history; False when that was not possible."""
        try:
            for run_id in self.run_ids:
                row = await self.row(run_id)
                await delete_thread(self.service, WHO, row.facts.thread_id)
        except PerdureError as error:
            self.problems.append(f"it could not be cleared away: {error.message}")
            return False
        return True


def settings_of_scene(settings: Settings, queue: str, lease_s: float) -> Settings:
    """Return the installation's settings with a worker of the drill's own."""
    worker = WorkerSettings(
        queues=(queue,), lease_ttl_s=lease_s, poll_interval_s=LOOK_S, drain_grace_s=STOP_S / 2
    )
    update = {"worker": worker, "retention": RetentionSettings(), "agents": ()}
    return settings.model_copy(update=update)


@asynccontextmanager
async def open_stage(settings: Settings, folder: Path) -> AsyncGenerator[Stage]:
    """Open a stage over the database of the settings; the folder is the world outside."""
    run_ids: set[str] = set()
    async with open_core(settings) as opened:
        core = replace(
            opened,
            reader=own_reader(opened.reader, run_ids),
            store=own_store(opened.store),
            settings=replace(opened.settings, cancel_grace_s=GRACE_S),
        )
        await _register(core)
        yield Stage(core=core, settings=settings, folder=folder, run_ids=run_ids)


async def _register(core: Core) -> None:
    """Register the drill's agent, so that runs can be ordered before there is a worker."""
    found: list[AgentRegistration] = []
    for hosted in make_catalog(Outside(Path())).served():
        card = hosted.card.model_dump(mode="json")
        found.append(
            AgentRegistration(
                agent_id=hosted.card.agent_id,
                version=hosted.card.version,
                card=card,
                digest=digest(card),
            )
        )
    await core.store.register(found, [])
