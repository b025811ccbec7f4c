"""Large values by reference, and tools that say nothing of their effects (R-5.9, R-5.11)."""

import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.codec import decode
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.events import ResultEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.protocol.values import INLINE_BYTES_MAX, PREVIEW_CHARACTERS
from perdure.testing.embedded import calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import tool
from tests.flow.rows import Rows
from tests.flow.world import data_of, flow

SIZE = 20_000


async def test_a_large_output_is_kept_once_and_shown_by_its_preview(url: str, zoo: ToolZoo) -> None:
    """R-5.9: content-addressed, with a preview for the planner; the same content is one row."""
    wishes = calls(("big", {"size": SIZE}), ("big", {"size": SIZE}), ("big", {"size": 10}))
    seen: list[object] = []

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return wishes
        seen.extend(record.output for record in context.turns[0].calls)
        return Finish(answer="x" * SIZE)

    async with flow(url, [scripted("big", decide, tools=["big"])], zoo) as engine:
        run_id = await engine.submit("big", "y" * SIZE)
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        first, second, small = data_of(await engine.events(run_id), ResultEvent)
        assert (small.output, small.output_ref) == ("x" * 10, None)
        assert first.output is None
        assert first.output_ref is not None
        assert first.output_ref == second.output_ref
        assert first.output_ref.size == SIZE + 2
        assert first.output_ref.preview == ('"' + "x" * SIZE)[:PREVIEW_CHARACTERS]
        digest = first.output_ref.digest
        assert seen == [
            {"ref": digest, "size": SIZE + 2, "preview": first.output_ref.preview}
        ] * 2 + ["x" * 10]
        data = await engine.core.reader.read_blob(row.facts.tenant_id, digest)
        assert data is not None
        assert decode(data) == "x" * SIZE
        assert await engine.core.reader.read_blob("other", digest) is None
        assert Rows(url).count_blobs(digest) == 1, "results and answer share one row"
        largest = max(len(event.raw) for event in await engine.events(run_id))
        assert largest < INLINE_BYTES_MAX


@pytest.mark.parametrize("tells_planner", [False, True])
async def test_a_tool_that_is_silent_about_its_effects_is_not_run(
    url: str, zoo: ToolZoo, *, tells_planner: bool
) -> None:
    """R-5.11, decision 43: denied whatever the grant says; the run fails, or the planner is told."""

    @tool(side_effect="external")
    def shout(text: str) -> str:
        """Do something in the world and declare nothing about it."""
        zoo.begin("shout")
        return text

    zoo.registry.add(shout)

    def decide(context: PlannerContext) -> Decision:
        if context.turns:
            return Finish(answer=context.turns[0].calls[0].status)
        return calls(("shout", {"text": "hey"}))

    agent = scripted("loud", decide, tools=unasked("shout"), deny_tells_planner=tells_planner)
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("loud")
        row = await engine.wait_terminal(run_id)
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert result.status is ToolCallStatus.DENIED
        assert result.error is not None
        assert result.error.code is FailureCode.POLICY_DENIED
        assert zoo.executions == {}
        assert row.hot.code is (None if tells_planner else FailureCode.POLICY_DENIED)
