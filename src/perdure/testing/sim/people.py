"""Those who answer in a play: people who are asked, and the provider that calls back."""

import asyncio
from typing import Literal

from pydantic import JsonValue

from perdure.engine.answers import Reply
from perdure.engine.breakpoints import continue_run
from perdure.engine.callbacks import call_back
from perdure.engine.core import Core
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.failures import Stage as FailureStage
from perdure.protocol.records import InterruptRow
from perdure.protocol.states import Answer, InterruptKind, InterruptStatus, ToolCallStatus
from perdure.protocol.tools import ToolResult
from perdure.store.reader import InterruptFilter
from perdure.testing.sim.loop import Process
from perdure.testing.sim.outside import Order, receipt
from perdure.testing.sim.script import People, Provider
from perdure.testing.sim.stage import Stage, chance_of, repeated
from perdure.testing.sim.tools import APPROVERS, THEIR_BOSS

PATIENT = People(at=0.0, pause_s=3.0, doubled=0.0, opposite=0.0, idle=0.0)
PROMPT = Provider(at=0.0, late_s=1.0, doubled=0.0, opposite=0.0, silent=0.0)
NAMES = (*APPROVERS, THEIR_BOSS)
OPEN_MAX = 100


class Answering:
    """People, as the script wants them: slow, two at once, of different minds."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._chance = chance_of(stage.script, "people")
        self._answers = 0
        self.people = next((i for i in stage.script.items if isinstance(i, People)), PATIENT)

    async def run(self) -> None:
        """Answer what is asked, now and then, until the play is over."""
        stage, chance = self.stage, self._chance
        core = stage.core(stage.api)
        where = InterruptFilter(status=InterruptStatus.PENDING)
        while not stage.over:
            await asyncio.sleep(self.people.pause_s * (0.5 + chance.random()))
            try:
                pending = await core.reader.list_interrupts(
                    TENANT_DEFAULT, where, after=None, limit=OPEN_MAX
                )
            except Unavailable:
                continue
            chance.shuffle(pending)
            for row in pending:
                if stage.network.is_healed or chance.random() >= self.people.idle:
                    await self._answer(core, row)

    async def _answer(self, core: Core, row: InterruptRow) -> None:
        stage = self.stage
        twice = self._chance.random() < self.people.doubled
        others = twice and self._chance.random() < self.people.opposite
        if twice:
            stage.cover("answers opposite" if others else "answers doubled")
        if row.kind is InterruptKind.BREAKPOINT:
            modes: list[Literal["next", "step"]] = ["next", "step"]
            first = self._chance.choice(modes)
            stage.begin(self._go_on(core, row, first), stage.api)
            if twice:
                stage.begin(
                    self._go_on(core, row, self._chance.choice(modes) if others else first),
                    stage.api,
                )
            return
        reader = stage.backend.database.reader
        call = await reader.find_tool_call(TENANT_DEFAULT, row.tool_call_id or "")
        paid = call is not None and stage.outside.find(call.effect_key or "") is not None
        reply = self._reply(row, paid)
        stage.begin(self._give(core, row, reply), stage.api)
        if twice:
            second = self._reply(row, paid) if others else reply
            stage.begin(self._give(core, row, second), stage.api)

    def _reply(self, row: InterruptRow, paid: bool) -> Reply:
        self._answers += 1
        chance, by = self._chance.random(), self._chance.choice(NAMES)
        match row.kind:
            case InterruptKind.APPROVAL if chance < 0.1:
                args: JsonValue = {"amount": self._answers}
                return Reply(answer=Answer.EDIT, by=by, args=args)
            case InterruptKind.APPROVAL:
                return Reply(answer=Answer.APPROVE if chance < 0.85 else Answer.REJECT, by=by)
            case InterruptKind.OUTCOME:
                answer = Answer.HAPPENED if paid else Answer.RETRY
                return Reply(answer=Answer.SKIP if chance < 0.1 else answer, by=by)
            case _:
                return Reply(answer=Answer.RESPOND, by=by, value={"answered": self._answers})

    async def _give(self, core: Core, row: InterruptRow, reply: Reply) -> None:
        stage = self.stage
        stage.facts.sent.setdefault(row.interrupt_id, []).append(reply)
        stage.trace.add(f"{reply.by} answers {row.interrupt_id}: {reply.answer}")
        give = stage.planted.answer
        try:
            answered = await repeated(lambda: give(core, TENANT_DEFAULT, row.interrupt_id, reply))
        except PerdureError as error:
            stage.cover(f"answer refused {error.code}")
        else:
            if not answered.replayed:
                stage.facts.accepted.setdefault(row.interrupt_id, []).append(reply)
            stage.cover(f"answer {row.kind} {reply.answer}")

    async def _go_on(self, core: Core, row: InterruptRow, mode: Literal["next", "step"]) -> None:
        stage, named = self.stage, row.interrupt_id
        stage.trace.add(f"{named} goes on: {mode}")
        try:
            await repeated(
                lambda: continue_run(core, TENANT_DEFAULT, row.run_id, named, mode=mode, by="ada")
            )
        except PerdureError as error:
            stage.cover(f"breakpoint refused {error.code}")
        else:
            stage.cover(f"breakpoint {mode}")


class CallingBack:
    """The provider: what was ordered is told later, at once, twice, otherwise, or never."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._chance = chance_of(stage.script, "provider")
        self._process = Process("provider")
        self._called = 0
        self.provider = next((i for i in stage.script.items if isinstance(i, Provider)), PROMPT)

    def take(self, order: Order) -> None:
        """Take an order, and tell its result some time."""
        stage, chance, provider = self.stage, self._chance, self.provider
        if not stage.network.is_healed and chance.random() < provider.silent:
            stage.cover("callback left out")
            return
        first = self._result(order)
        self._tell(order, first)
        if chance.random() < provider.doubled:
            others = chance.random() < provider.opposite
            stage.cover("callbacks opposite" if others else "callbacks doubled")
            self._tell(order, self._result(order) if others else first)

    def _result(self, order: Order) -> ToolResult:
        self._called += 1
        reference = receipt(order.key)
        if self._chance.random() < 0.8:
            output: JsonValue = {"paid": order.amount, "told": self._called}
            return ToolResult(
                status=ToolCallStatus.SUCCEEDED, output=output, external_ref=reference
            )
        error = Failure(
            code=FailureCode.TOOL_ERROR,
            reason=f"not delivered ({self._called})",
            stage=FailureStage.TOOL,
        )
        return ToolResult(status=ToolCallStatus.FAILED, error=error, external_ref=reference)

    def _tell(self, order: Order, result: ToolResult) -> None:
        delay_s = self._chance.random() * self.provider.late_s
        self.stage.begin(
            self._call_back(order, result, delay_s), self._process, self._process.context.copy()
        )

    async def _call_back(self, order: Order, result: ToolResult, delay_s: float) -> None:
        stage = self.stage
        core, call = stage.core(self._process), order.tool_call_id
        await asyncio.sleep(delay_s)
        stage.facts.called.setdefault(call, []).append(result)
        stage.trace.add(f"the provider calls back for {call}: {result.status}")
        try:
            done = await repeated(lambda: call_back(core, TENANT_DEFAULT, call, result))
        except PerdureError as error:
            stage.cover(f"callback refused {error.code}")
        else:
            if not done.replayed:
                stage.facts.taken.setdefault(call, []).append(result)
            stage.cover("callback replayed" if done.replayed else f"callback {result.status}")
