"""What callers do in a play: order runs, cancel them, go on from them, subscribe, delete, follow."""

import asyncio
from typing import Any

from perdure.engine.branch import BranchWish, fork_run, retry_run
from perdure.engine.cancel import cancel_run
from perdure.engine.core import Core
from perdure.engine.feed import follow
from perdure.engine.history import load_value
from perdure.engine.submit import RunOrder, submit_run
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.breakpoints import Breakpoint
from perdure.protocol.codec import digest
from perdure.protocol.errors import NotFound, PerdureError, ThreadBusy, Unavailable
from perdure.protocol.ids import THREAD
from perdure.protocol.log import RecordedEvent
from perdure.protocol.policies import Timeouts
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import Caller, RunContext, RunOptions
from perdure.protocol.states import TERMINAL
from perdure.protocol.topics import SubscriptionRow, SubscriptionTerms
from perdure.store.requests import CancelWish
from perdure.testing.sim.loop import Process
from perdure.testing.sim.script import Adopt, Again, Cancel, Forget, Submit, Subscribe
from perdure.testing.sim.stage import TRY_AGAIN_S, Stage, chance_of, repeated

CALLER = Caller(tenant_id=TENANT_DEFAULT, principal="ada")
FOLLOWED_S = 20.0
CUT = 0.05
"""How often a follower's connection is cut after a page."""


class Callers:
    """Those who use the API."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._clients = Process("clients")
        self._chance = chance_of(stage.script, "callers")

    # ---------------------------------------------------------------- runs

    async def submit(self, item: Submit) -> None:
        """Order a run, again while no answer comes, and follow it."""
        stage = self.stage
        core, body = stage.core(stage.api), _body(item)
        order = RunOrder(
            agent_id=item.agent,
            input=body,
            context=RunContext(user_id="ada"),
            options=_options(item),
            caller=CALLER.model_copy(update={"tenant_id": item.tenant_id}),
            fingerprint=digest([item.agent, body]),
            thread_id=None if item.group is None else stage.threads.get(item.group),
        )
        try:
            submitted = await repeated(lambda: submit_run(core, order), (Unavailable, NotFound))
        except PerdureError as error:
            stage.cover(f"submit refused {error.code}")
            return
        facts = submitted.row.facts
        stage.trace.add(f"run {item.run} is {facts.run_id}")
        if stage.known.setdefault(item.run, facts.run_id) != facts.run_id:
            stage.facts.found("keys", f"two runs under the key of run {item.run}")
        elif facts.run_id not in stage.facts.seen:
            if item.group is not None:
                stage.threads.setdefault(item.group, facts.thread_id)
            self._begin_to_follow(facts.run_id)

    async def cancel(self, item: Cancel) -> None:
        """Cancel a run."""
        stage, run_id = self.stage, self.stage.known.get(item.run)
        if run_id is None:
            return
        core = stage.core(stage.api)
        wish = CancelWish(
            action=item.action, by="ada", source="api", reason="enough", options=item.options
        )
        stage.trace.add(f"cancel of {run_id}")
        row = await repeated(lambda: cancel_run(core, TENANT_DEFAULT, run_id, wish))
        if row.hot.cancel_epoch > 0 or row.hot.state not in TERMINAL:
            stage.facts.cancelled.add(run_id)
            stage.cover(f"cancel accepted {item.action} with {int(item.options)}")

    async def again(self, item: Again) -> None:
        """Go on from a run's history in a run of its own."""
        stage, run_id = self.stage, self.stage.known.get(item.run)
        if run_id is None:
            return
        core = stage.core(stage.api)
        try:
            made = await repeated(lambda: _again(core, run_id, item))
        except PerdureError as error:
            stage.cover(f"{item.mode} refused {error.code}")
            return
        facts = made.row.facts
        stage.trace.add(f"{item.mode} of {run_id} is {facts.run_id}")
        stage.cover(f"{item.mode} accepted")
        if item.mode == "fork":
            stage.forks[item.run] = facts.thread_id
        self._begin_to_follow(facts.run_id)

    # ---------------------------------------------------------------- threads

    async def adopt(self, item: Adopt) -> None:
        """Let a thread adopt a branch, once neither has an active run; not for ever."""
        stage, run_id = self.stage, self.stage.known.get(item.run)
        branch = stage.forks.get(item.run)
        if run_id is None or branch is None:
            return
        core = stage.core(stage.api)
        row = await repeated(lambda: core.reader.find_run(TENANT_DEFAULT, run_id))
        if row is None:
            return
        thread_id, adopt = row.facts.thread_id, core.store.adopt_branch
        for _ in range(10):
            try:
                await repeated(lambda: adopt(TENANT_DEFAULT, thread_id, branch, "ada"))
            except ThreadBusy:
                stage.cover("thread is busy and adopts nothing")
                await asyncio.sleep(5.0)
            except PerdureError as error:
                stage.cover(f"adoption refused {error.code}")
                return
            else:
                stage.trace.add(f"{thread_id} has adopted {branch}")
                stage.cover("branch adopted")
                return

    async def subscribe(self, item: Subscribe) -> None:
        """Subscribe an agent to a topic, or end its subscription."""
        stage, thread_id = self.stage, self.stage.threads.get(item.group)
        if thread_id is None:
            return
        store, key = stage.core(stage.api).store, (thread_id, item.topic, item.agent)
        if item.ends:
            await repeated(lambda: store.delete_subscription(TENANT_DEFAULT, *key))
            stage.cover("subscription ended")
            return
        row, inbox = self._subscription(*key)
        try:
            await repeated(lambda: store.put_subscription(row, inbox))
        except PerdureError as error:
            stage.cover(f"subscription refused {error.code}")
        else:
            stage.cover("subscription made")

    def _subscription(
        self, thread_id: str, topic: str, agent: str
    ) -> tuple[SubscriptionRow, ThreadRow]:
        core = self.stage.core(self.stage.api)
        now, inbox = core.clock.now(), core.ids.new(THREAD)
        row = SubscriptionRow(
            tenant_id=TENANT_DEFAULT,
            thread_id=thread_id,
            topic=topic,
            agent_id=agent,
            inbox_thread_id=inbox,
            terms=SubscriptionTerms(),
            caller=CALLER,
            created_at=now,
        )
        thread = ThreadRow(
            thread_id=inbox,
            tenant_id=TENANT_DEFAULT,
            title=f"{agent} on {topic}",
            metadata={"topic": topic, "thread_id": thread_id},
            participants=[],
            capabilities=[],
            active_run_id=None,
            last_position=0,
            created_at=now,
            updated_at=now,
        )
        return row, thread

    async def forget(self, item: Forget) -> None:
        """Delete a thread, once none of its runs goes on; not for ever."""
        stage, thread_id = self.stage, self.stage.threads.get(item.group)
        if thread_id is None:
            return
        store = stage.core(stage.api).store
        for _ in range(10):
            try:
                await repeated(lambda: store.delete_thread(TENANT_DEFAULT, thread_id))
            except ThreadBusy:
                stage.cover("thread is busy and not deleted")
                await asyncio.sleep(5.0)
            else:
                stage.trace.add(f"{thread_id} is deleted")
                stage.cover("thread deleted")
                return

    # ---------------------------------------------------------------- following

    def _begin_to_follow(self, run_id: str) -> None:
        if run_id not in self.stage.facts.seen:
            self.stage.facts.seen[run_id] = []
            self.stage.begin(self._follow(run_id), self._clients)

    async def _follow(self, run_id: str) -> None:
        """Follow a run to its end, beginning again where the connection was lost or cut."""
        stage = self.stage
        core, seen = stage.core(self._clients), stage.facts.seen[run_id]
        while True:
            try:
                if await self._read(core, run_id, seen):
                    stage.facts.followed.add(run_id)
                    return
            except Unavailable:
                await asyncio.sleep(TRY_AGAIN_S)

    async def _read(self, core: Core, run_id: str, seen: list[RecordedEvent]) -> bool:
        """Read up to the end (True), or until the connection is cut."""
        async with follow(core, run_id, seen[-1].seq if seen else 0) as cursor:
            while not cursor.ended:
                seen += await cursor.read(wait_s=FOLLOWED_S)
                if self._chance.random() < CUT:
                    return False
        return True


def _body(item: Submit) -> Any:
    return {"steps": list(item.steps)}


def _options(item: Submit) -> RunOptions:
    return RunOptions(
        idempotency_key=f"run-{item.run}",
        max_attempts=item.max_attempts,
        multitask_strategy=item.strategy,
        timeouts=Timeouts(run_s=item.run_s, approval_s=item.approval_s),
        after=item.after_s,
        priority=item.priority,
        breakpoints=tuple(
            Breakpoint.model_validate({"at": at, "tool": about}) for at, about in item.breakpoints
        ),
    )


async def _again(core: Core, run_id: str, item: Again) -> Any:
    row = await core.reader.find_run(TENANT_DEFAULT, run_id)
    if row is None:
        raise NotFound("no such run")
    facts = row.facts
    own = {
        "idempotency_key": f"{item.mode}-{item.run}-{item.at}",
        "multitask_strategy": "enqueue",
        "after": None,
        "agent_version": None,
        "breakpoints": (),
    }
    try:
        value = await load_value(core, TENANT_DEFAULT, facts.input)
    except LookupError as error:
        raise NotFound("its input is no longer kept") from error
    order = RunOrder(
        agent_id=facts.agent_id,
        input=value,
        context=facts.context,
        options=facts.options.model_copy(update=own),
        caller=CALLER,
        fingerprint=digest([item.mode, run_id]),
        thread_id=None if item.mode == "fork" else facts.thread_id,
    )
    wish = BranchWish(mode=item.mode, by="ada")
    return await (fork_run if item.mode == "fork" else retry_run)(core, row, order, wish)
