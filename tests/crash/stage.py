"""The parent's side of the acceptance scene: its processes, its person, and who follows the run.

A stage has a database, a folder for the world outside, and a client's core. Its follower is
attached as soon as there is a run and sees the log as a stream's client would. The person approves
what is asked, and answers an outcome by looking into the provider's journal.
"""

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
from pydantic import JsonValue

from perdure.engine.answers import Reply, answer_interrupt
from perdure.engine.core import Core
from perdure.engine.feed import follow
from perdure.ops.verify import verify
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.events import ApprovalRequestEvent, InterruptEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.policies import MAX_ATTEMPTS_DEFAULT
from perdure.protocol.runs import RunRow
from perdure.protocol.states import Answer, InterruptKind
from perdure.runtime import open_core
from perdure.testing.faults import Plan
from perdure.testing.scene import (
    LEASE_S,
    Act,
    Order,
    approve,
    register_agent,
    scene_settings,
    submit_act,
)
from perdure.testing.scene_tools import Outside

WAIT_S = 90.0
"""Bounds a wait whose event must come; a busy machine may take its time."""

STOP_S = 30.0
LOOK_S = 0.02
PAGE = 1000


class Actor:
    """One process of the scene."""

    def __init__(self, process: anyio.abc.Process, log: Path) -> None:
        self.process = process
        self.log = log

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Return its exit code once it has ended."""
        with anyio.fail_after(WAIT_S):
            return await self.process.wait()

    async def was_killed(self) -> None:
        """Wait until it died by SIGKILL; fail when it ended otherwise."""
        code = await self.ended()
        assert code == -signal.SIGKILL, f"it ended with {code}: {self.said()}"

    async def lives_on(self) -> None:
        """Wait until it ends, which it must not."""
        code = await self.process.wait()
        raise AssertionError(f"it ended with {code}: {self.said()}")

    async def drained(self) -> None:
        """Ask a worker to stop and wait until it has; fail when it did not end in order."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        code = await self.ended()
        assert code == 0, f"it ended with {code}: {self.said()}"

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(encoding="utf-8")[-4000:]


@dataclass(slots=True)
class Followed:
    """A run as its follower saw it."""

    run_id: str
    events: list[RecordedEvent] = field(default_factory=list[RecordedEvent])
    ended: anyio.Event = field(default_factory=anyio.Event)
    news: anyio.Event = field(default_factory=anyio.Event)

    async def finished_a_step(self) -> None:
        """Return once a step is over."""
        with anyio.fail_after(WAIT_S):
            while not any(event.type == "step" for event in self.events):
                await self.news.wait()

    async def wait(self, *workers: Actor) -> None:
        """Return once the follower has seen the end; fail when one of these workers ends first."""
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(worker.lives_on)
            with anyio.fail_after(WAIT_S):
                await self.ended.wait()
            group.cancel_scope.cancel()


class Stage:
    """A scene on its stage. `approvals` may take over what a person does with an approval."""

    def __init__(
        self, url: str, folder: Path, core: Core, group: anyio.abc.TaskGroup, lease_s: float
    ) -> None:
        self.url = url
        self.folder = folder
        self.core = core
        self.outside = Outside(folder)
        self.lease_s = lease_s
        self.approvals = self.approve
        self.answered: list[tuple[str, Answer]] = []
        self._group = group
        self._actors: list[Actor] = []

    # ---------------------------------------------------------------- processes

    async def start(self, order: Order) -> Actor:
        """Start a process of the scene."""
        log = self.folder / f"process-{len(self._actors) + 1}.log"
        with log.open("ab") as errors:
            process = await anyio.open_process(
                [sys.executable, "-P", "-m", "perdure.testing.scene", order.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        actor = Actor(process, log)
        self._actors.append(actor)
        return actor

    async def worker(self, plan: Plan | None = None) -> Actor:
        """Start a worker."""
        return await self.start(
            Order(
                do="work",
                db_url=self.url,
                folder=self.folder,
                plan=plan,
                lease_s=self.lease_s,
            )
        )

    async def stop(self) -> None:
        """Kill what still runs."""
        for actor in self._actors:
            if actor.process.returncode is None:
                actor.process.kill()
            await actor.process.aclose()

    # ---------------------------------------------------------------- runs

    async def submit(
        self, act: Act, key: str = "scene", max_attempts: int = MAX_ATTEMPTS_DEFAULT
    ) -> Followed:
        """Submit a run and follow it."""
        return self.follow(await submit_act(self.core, act, key, max_attempts))

    def follow(self, run_id: str) -> Followed:
        """Follow a run from now on; its person answers what is asked."""
        followed = Followed(run_id)
        self._group.start_soon(self._follow, followed)
        return followed

    async def _follow(self, followed: Followed) -> None:
        async with follow(self.core, followed.run_id, 0) as cursor:
            while not cursor.ended:
                page = await cursor.read(wait_s=5)
                followed.events += page
                followed.news.set()
                followed.news = anyio.Event()
                for event in page:
                    await self._attend(event)
        followed.ended.set()

    async def _attend(self, event: RecordedEvent) -> None:
        match event.data:
            case ApprovalRequestEvent() as question:
                self._group.start_soon(self.approvals, question.approval_id)
            case InterruptEvent(kind=InterruptKind.OUTCOME) as question:
                await self._tell_outcome(question)
            case _:
                pass

    async def approve(self, interrupt_id: str) -> None:
        """Approve a call, as any client does."""
        await approve(self.core, interrupt_id)

    async def _tell_outcome(self, question: InterruptEvent) -> None:
        """Look into the journal and say what became of a payment."""
        assert isinstance(question.payload, dict)
        key = str(question.payload["effect_key"])
        paid = self.outside.find(key)
        reply = Reply(answer=Answer.RETRY, by="ada")
        if paid is not None:
            value: JsonValue = {"paid": paid["amount"]}
            ref = f"receipt-{key}"
            reply = Reply(answer=Answer.HAPPENED, by="ada", value=value, external_ref=ref)
        self.answered.append((str(question.payload["tool"]), reply.answer))
        await answer_interrupt(self.core, TENANT_DEFAULT, question.interrupt_id, reply)

    async def row(self, run_id: str) -> RunRow:
        """Return a run's row."""
        row = await self.core.reader.find_run(None, run_id)
        assert row is not None
        return row

    async def log(self, run_id: str) -> list[RecordedEvent]:
        """Return the stored log of a run."""
        found: list[RecordedEvent] = []
        while page := await self.core.reader.events_after(run_id, len(found), limit=PAGE):
            found += page
        return found

    async def began(self, tool: str, run_id: str | None = None, execution: int = 1) -> None:
        """Return once an execution of a tool has begun; the outside world rings no bell."""
        with anyio.fail_after(WAIT_S):
            while not any(  # noqa: ASYNC110  # nothing tells of the outside world's changes
                line["tool"] == tool
                and line["execution"] == execution
                and run_id in {None, line["run_id"]}
                for line in self.outside.executions()
            ):
                await anyio.sleep(LOOK_S)

    async def lease_ran_out(self, run_id: str) -> None:
        """Return once a dead worker's lease is over."""
        with anyio.fail_after(WAIT_S):
            while True:
                row = await self.row(run_id)
                expires = row.hot.lease_expires_at
                if expires is None or expires < self.core.clock.now():
                    return
                await anyio.sleep(LOOK_S)

    async def findings(self) -> Sequence[str]:
        """Return what `perdure verify` finds."""
        found: list[str] = []
        await verify(self.core.reader, on_finding=lambda finding: found.append(str(finding)))
        return found


@asynccontextmanager
async def staged(url: str, folder: Path, *, lease_s: float = LEASE_S) -> AsyncGenerator[Stage]:
    """Open a stage over an empty database and folder; on leaving, what still runs is killed."""
    async with (
        open_core(scene_settings(url, lease_s)) as core,
        anyio.create_task_group() as group,
    ):
        await register_agent(core)
        stage = Stage(url, folder, core, group, lease_s)
        try:
            yield stage
        finally:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await stage.stop()
