"""What a tool may answer, and what becomes of it in the run (R-5.4, R-5.5, R-5.8)."""

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import RunState
from perdure.testing.embedded import call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import flow


async def test_an_answer_by_callback_is_refused_as_a_result(url: str, zoo: ToolZoo) -> None:
    """R-5.10 is not due: the call fails as data instead of standing open without a result."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return call("answers_later")
        error = context.turns[0].calls[0].error
        return Finish(answer=error.code if error is not None else None)

    async with flow(url, [scripted("later", decide, tools=["answers_later"])], zoo) as engine:
        run_id = await engine.submit("later")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        (tool_call,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=2)
        assert tool_call.status == "failed"
        assert tool_call.result_seq is not None
        end = (await engine.events(run_id))[-1].data
        assert isinstance(end, StateEvent)
        assert end.answer == FailureCode.TOOL_RESULT_INVALID
