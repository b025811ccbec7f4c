"""Reducers run beside other code of users, and not at any price (R-1.5, decision 15)."""

import threading

import anyio
import pytest

from perdure.agents import merging
from perdure.agents.merging import UserMerger
from perdure.engine.ports import AuthorError, PlannerFailure
from perdure.protocol.fields import Reducer, StateField, write_of
from perdure.tools.usercode import UserCode


async def test_a_reducer_is_not_asked_when_too_much_user_code_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R-1.5: one that does not return is given up; with as many as a process bears, the next is
    told to come again, in words that the engine retries."""
    gate = threading.Event()

    def wait(old: object, value: object) -> object:
        gate.wait()
        return value

    slow = Reducer(name="slow", version="1", function=wait)
    declared = StateField(name="field", scope="agent", rule="reducer", reducer=slow)
    writes = {"~0.0.0": write_of(declared, "a", 1)}
    merger = UserMerger({slow.key: slow})
    monkeypatch.setattr(merging, "MERGE_TIMEOUT_S", 0.05)
    async with UserCode(lost_slots_max=1) as code:
        merger.attach(code)
        try:
            with anyio.fail_after(30):
                while not code.exhausted:  # on a loaded machine it may not even begin
                    with pytest.raises((AuthorError, PlannerFailure), match="a reducer"):
                        await merger(writes, {})
            with pytest.raises(PlannerFailure, match="INTERNAL: too much") as told:
                await merger(writes, {})
            assert told.value.failure.retryable
        finally:
            gate.set()
