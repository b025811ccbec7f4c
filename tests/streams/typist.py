"""A model that says what a test dictates, when it dictates it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from perdure.agents.catalog import AgentRegistry, loop_agent
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.models.port import ModelRequest
from perdure.agents.models.scripted import Dictation, ScriptedModel, ScriptEntry
from perdure.engine.ports import HostedAgent, PlannerFailure
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.policies import RetryPolicy

OVERLOADED = PlannerFailure(
    Failure(code=FailureCode.MODEL_ERROR, reason="overloaded", retryable=True, stage=Stage.PLANNING)
)
Piece = str | PlannerFailure | None


@dataclass(slots=True)
class Typist:
    """Each request to the model takes pieces until None ends it or a failure fails it."""

    requests: int = 0
    asked: anyio.Event = field(default_factory=anyio.Event)
    _send: MemoryObjectSendStream[Piece] = field(init=False)
    _take: MemoryObjectReceiveStream[Piece] = field(init=False)

    def __post_init__(self) -> None:
        self._send, self._take = anyio.create_memory_object_stream[Piece](0)

    async def say(self, *pieces: Piece) -> None:
        """Say pieces; returns once the model has taken the last one."""
        for piece in pieces:
            with anyio.fail_after(30):
                await self._send.send(piece)

    def close(self) -> None:
        """Give the streams up."""
        self._send.close()
        self._take.close()

    def agent(self) -> HostedAgent:
        """Return an agent that answers with what is dictated."""

        def reply(_: ModelRequest) -> ScriptEntry:
            return Dictation(self._pieces)

        planner = ReActPlanner(
            [ScriptedModel(reply, name="typist")], model_retry=RetryPolicy(backoff_s=0.01)
        )
        return loop_agent("teller", "1", planner)

    def registry(self) -> AgentRegistry:
        """Return a registry with that agent."""
        found = AgentRegistry()
        found.add(self.agent())
        return found

    async def _pieces(self) -> AsyncIterator[str]:
        self.requests += 1
        self.asked.set()
        while (piece := await self._take.receive()) is not None:
            if isinstance(piece, PlannerFailure):
                raise piece
            yield piece
