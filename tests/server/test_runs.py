"""Runs over HTTP, from creation to the end (R-3, R-9.1)."""

import json
import re
from collections.abc import AsyncGenerator

import anyio
import pytest
from pydantic import JsonValue

from perdure.store.requests import AgentRegistration, ClaimWant
from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_a_run_is_accepted_and_reaches_its_end(world: World) -> None:
    """R-3.1: 202 with the durable run."""
    answer = await world.http.post("/v1/agents/echo/run", json={"input": {"times": 2}})
    run = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/runs/{run['run_id']}"
    done = await world.until(run["run_id"], "succeeded")
    assert done["status"] == "COMPLETED"
    assert done["answer"] == "done"
    assert done["error"] is None
    assert done["next_actions"] == ["fork"]
    assert done["waiting_on"] == "nothing"


async def test_waiting_answers_200_with_the_result(world: World) -> None:
    """R-3.1."""
    run = await world.start("echo", {"answer": {"a": [1, None]}}, wait=5)
    assert (run["state"], run["answer"]) == ("succeeded", {"a": [1, None]})


async def test_waiting_for_a_run_that_does_not_end_answers_202_after_the_time(
    world: World,
) -> None:
    """R-3.1, R-3.5: waiting ends, the run goes on."""
    answer = await world.http.post(
        "/v1/agents/sleeper/run", json={"input": None}, params={"wait": 0.1}
    )
    assert answer.status_code == 202
    assert answer.json()["state"] not in {"succeeded", "failed"}


@pytest.mark.parametrize("wait", ["61", "-1", "nan", "inf", "soon"])
async def test_a_wait_out_of_bounds_is_invalid(world: World, wait: str) -> None:
    answer = await world.http.post(f"/v1/agents/echo/run?wait={wait}", json={"input": 1})
    assert (answer.status_code, answer.json()["field"]) == (422, "wait")


async def test_a_planner_that_raises_ends_as_failed_with_a_code(world: World) -> None:
    """R-2.4."""
    run = await world.start("broken", options={"max_attempts": 2}, wait=5)
    assert run["state"] == "failed"
    assert run["error"]["code"] in {"RETRIES_EXHAUSTED", "INTERNAL"}
    assert re.search(r"a fault of the planner \(world\.py:\d+\)", run["error"]["reason"])


async def test_a_body_that_is_missing_is_asked_for(world: World) -> None:
    """Nothing is cancelled by a request that says nothing."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    answer = await world.http.post("/v1/runs/cancel")
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid")
    assert problem["detail"] == "the request needs a body: a JSON object"
    assert (await world.get(f"/v1/runs/{run['run_id']}"))["state"] == "waiting_human"


async def test_what_does_not_fit_is_told_with_its_field_and_not_in_the_validators_words(
    world: World,
) -> None:
    answer = await world.http.post("/v1/agents/echo/run", json={"nonsense": 1, "options": 3})
    assert answer.json()["detail"] == "/input: is missing"  # to be understood by itself
    found = {item["field"]: item["detail"] for item in answer.json()["errors"]}
    assert found == {
        "/input": "is missing",
        "/nonsense": "there is no such field",
        "/options": "must be an object",
    }


async def test_the_same_key_returns_the_same_run(world: World) -> None:
    """R-3.2, R-3.5."""
    body = {"input": 1, "options": {"idempotency_key": "k"}}
    first = await world.http.post("/v1/agents/echo/run", json=body)
    second = await world.http.post("/v1/agents/echo/run", json=body)
    assert first.json()["run_id"] == second.json()["run_id"]
    assert "Idempotency-Replayed" not in first.headers
    assert second.headers["Idempotency-Replayed"] == "true"


async def test_the_key_as_header_is_the_key_in_the_body(world: World) -> None:
    """R-3.2, decision 34."""
    first = await world.http.post(
        "/v1/agents/echo/run", json={"input": 1}, headers={"Idempotency-Key": "k"}
    )
    second = await world.http.post(
        "/v1/agents/echo/run", json={"input": 1, "options": {"idempotency_key": "k"}}
    )
    assert first.json()["run_id"] == second.json()["run_id"]


async def test_waiting_and_the_form_of_the_answer_are_not_part_of_the_request(
    world: World,
) -> None:
    """R-3.2, decision 34."""
    key = {"Idempotency-Key": "k"}
    first = await world.http.post("/v1/agents/echo/run", json={"input": 1}, headers=key)
    second = await world.http.post(
        "/v1/agents/echo/run?wait=5", json={"input": 1, "context": {}}, headers=key
    )
    assert second.status_code == 200
    assert first.json()["run_id"] == second.json()["run_id"]


async def test_fifty_equal_requests_at_once_make_one_run(world: World) -> None:
    """R-3.2."""
    found: set[str] = set()

    async def post() -> None:
        answer = await world.http.post(
            "/v1/agents/echo/run", json={"input": 1}, headers={"Idempotency-Key": "storm"}
        )
        found.add(answer.json()["run_id"])

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(post)
    assert len(found) == 1
    assert len((await world.get("/v1/runs"))["items"]) == 1


async def test_another_body_under_the_key_is_refused_and_names_the_run(world: World) -> None:
    """R-3.2."""
    key = {"Idempotency-Key": "k"}
    first = await world.http.post("/v1/agents/echo/run", json={"input": 1}, headers=key)
    second = await world.http.post("/v1/agents/echo/run", json={"input": 2}, headers=key)
    problem = second.json()
    assert (second.status_code, problem["code"]) == (409, "idempotency_mismatch")
    assert problem["details"]["run_id"] == first.json()["run_id"]


async def test_two_different_keys_in_one_request_are_malformed(world: World) -> None:
    answer = await world.http.post(
        "/v1/agents/echo/run",
        json={"input": 1, "options": {"idempotency_key": "a"}},
        headers={"Idempotency-Key": "b"},
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")


@pytest.mark.parametrize("key", ["", "x" * 256, "a\0b"])
async def test_a_key_out_of_bounds_is_invalid(world: World, key: str) -> None:
    answer = await world.http.post(
        "/v1/agents/echo/run", json={"input": 1, "options": {"idempotency_key": key}}
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "/options/idempotency_key")


@pytest.mark.parametrize(
    ("option", "values"),
    [
        (
            "after",
            [
                *(-1, 31_536_001, True, "5", "soon", [1], "2026-01-01", "2026-01-01T00:00:00"),
                *("2026-13-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "2999-01-01T00:00:00Z"),
            ],
        ),
        ("queue", ["", "A", "a b", "-a", "x" * 65, 1, None]),
        ("priority", [101, -101, 1.5, "high"]),
        ("recovery_mode", ["maybe"]),
        ("cancel_policy", ["stop", "", None, ["interrupt"]]),
    ],
)
async def test_a_start_option_out_of_bounds_is_invalid(
    world: World, option: str, values: list[JsonValue]
) -> None:
    """R-3.4: refused with its field, and no run is made."""
    for value in values:
        body: JsonValue = {"input": 1, "options": {option: value}}
        answer = await world.http.post("/v1/agents/echo/run", json=body)
        problem = answer.json()
        assert (answer.status_code, problem["field"]) == (422, f"/options/{option}"), value
    assert (await world.http.get("/v1/runs")).json()["items"] == []


@pytest.mark.slow
async def test_a_delayed_run_is_shown_kept_under_its_key_and_not_passed_on(world: World) -> None:
    """R-3.2, R-3.4, R-12.7: the key stands for its start, queue and priority; a retry starts now."""
    options: dict[str, JsonValue] = {"after": 0.3, "priority": 9, "idempotency_key": "later"}
    made = await world.http.post("/v1/agents/broken/run", json={"input": 1, "options": options})
    run = made.json()
    assert (made.status_code, run["status"], run["waiting_on"]) == (202, "SUBMITTED", "timer")
    assert run["wake_at"] > run["created_at"]
    assert (run["options"]["after"], run["options"]["priority"]) == (0.3, 9)
    for name, value in (("after", 0.4), ("after", "2026-01-01T00:00:00Z"), ("priority", 8)):
        other = {"input": 1, "options": {**options, name: value}}
        answer = await world.http.post("/v1/agents/broken/run", json=other)
        assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_mismatch")
    again = await world.http.post("/v1/agents/broken/run", json={"input": 1, "options": options})
    assert again.json()["run_id"] == run["run_id"]
    await world.until(run["run_id"], "failed")
    retry = await world.http.post(f"/v1/runs/{run['run_id']}/retry", json={})
    passed_on = retry.json()["options"]
    assert (passed_on["after"], passed_on["priority"]) == (None, 9)
    text = (await world.http.get("/metrics")).text
    assert "# TYPE perdure_queue_ready_runs gauge" in text


async def test_a_context_of_another_tenant_is_forbidden(world: World) -> None:
    """R-3.3, decision 41."""
    answer = await world.http.post(
        "/v1/agents/echo/run", json={"input": 1, "context": {"tenant_id": "other"}}
    )
    assert (answer.status_code, answer.json()["field"]) == (403, "/context/tenant_id")
    assert (await world.get("/v1/runs"))["items"] == []


async def test_an_unknown_agent_or_version_is_not_found(world: World) -> None:
    """R-3.4, R-21.3."""
    for agent, options in (("nobody", {}), ("echo", {"agent_version": "9"}), ("a\0b", {})):
        answer = await world.http.post(
            f"/v1/agents/{agent.replace(chr(0), '%00')}/run",
            json={"input": 1, "options": options},
        )
        assert answer.status_code in {404, 422}


async def test_an_input_against_the_agents_schema_is_invalid(world: World) -> None:
    """R-21.3."""
    answer = await world.http.post("/v1/agents/publisher/run", json={"input": "text"})
    assert (answer.status_code, answer.json()["field"]) == (422, "/input")


async def test_a_large_input_and_answer_are_whole_when_a_run_is_shown(world: World) -> None:
    """R-5.9."""
    text = "long " * 5000
    run = await world.start("echo", {"answer": text}, wait=5)
    assert run["answer"] == text
    shown = await world.get(f"/v1/runs/{run['run_id']}")
    assert shown["input"] == {"answer": text}
    assert shown["input_ref"]["size"] > 20_000
    listed = (await world.get("/v1/runs"))["items"][0]
    assert listed["answer"] is None
    assert listed["answer_ref"]["preview"].startswith('"long')


@pytest.mark.parametrize("text", ["a\0b", "\u2028\u2029\x85", "\ufeff", "\u202e\u200b", "👩‍👩‍👧"])
async def test_odd_text_survives_unchanged(world: World, text: str) -> None:
    run = await world.start("echo", {"answer": text, "text": text}, wait=5)
    assert run["answer"] == text
    assert run["input"]["text"] == text
    page = await world.get(f"/v1/runs/{run['run_id']}/events", limit=200)
    action = next(event for event in page["items"] if event["type"] == "action")
    assert action["data"]["args"]["text"] == f"{text} 0"


async def test_lists_are_paged_by_opaque_cursors(world: World) -> None:
    """R-1.1."""
    made = [(await world.start("echo"))["run_id"] for _ in range(5)]
    seen: list[str] = []
    after: str | None = None
    while True:
        query = {"limit": 2} | ({"after": after} if after else {})
        page = await world.get("/v1/runs", **query)
        seen += [run["run_id"] for run in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == made[::-1]


async def test_a_cursor_of_another_list_is_malformed(world: World) -> None:
    for _ in range(2):
        await world.start("echo")
    cursor = (await world.get("/v1/runs", limit=1))["next"]
    for path, text in (("/v1/threads", cursor), ("/v1/runs", "zzz"), ("/v1/runs", "é")):
        answer = await world.http.get(path, params={"after": text})
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed")


async def test_runs_are_listed_by_filter(world: World) -> None:
    await world.start("echo", wait=5)
    sleeper = await world.start("sleeper")
    page = await world.get("/v1/runs", unfinished=True)
    assert [run["run_id"] for run in page["items"]] == [sleeper["run_id"]]
    assert (await world.get("/v1/runs", agent_id="nobody"))["items"] == []
    assert len((await world.get("/v1/runs", state="succeeded"))["items"]) == 1


async def test_an_unknown_or_garbled_id_is_not_found(world: World) -> None:
    unknown = "0" * 32
    for path in (
        f"/v1/runs/run_{unknown}",
        "/v1/runs/nope",
        f"/v1/runs/run_{unknown}/events",
        f"/v1/runs/run_{unknown}/steps",
        f"/v1/steps/stp_{unknown}_0",
        "/v1/steps/x",
        f"/v1/events/evt_{unknown}_1",
        "/v1/events/evt_1",
        f"/v1/tool_calls/tc_{unknown}",
        f"/v1/checkpoints/ckp_{unknown}",
        f"/v1/interrupts/int_{unknown}",
        f"/v1/artifacts/art_{unknown}",
        f"/v1/artifacts/art_{unknown}/content",
        f"/v1/threads/thr_{unknown}",
        f"/v1/threads/thr_{unknown}/runs",
        "/v1/agents/nobody",
        "/v1/agents/nobody/card",
    ):
        answer = await world.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


async def test_cancel_is_durable_at_once_and_idempotent(world: World) -> None:
    """R-9.1."""
    run = await world.start("sleeper")
    await world.until(run["run_id"], "planning", "executing")
    path = f"/v1/runs/{run['run_id']}/cancel"
    first = await world.http.post(path, json={"reason": "enough"}, params={"wait": 5})
    assert (first.status_code, first.json()["status"]) == (200, "INTERRUPTED")
    assert first.json()["error"]["code"] == "RUN_CANCELLED"
    second = await world.http.post(path)
    assert second.status_code == 200
    assert second.json()["cancel_epoch"] == first.json()["cancel_epoch"] == 1


async def test_cancel_and_wait_says_requested_when_nobody_stops_the_run() -> None:
    """R-2.3, R-9.2."""
    async with open_world(works=False) as world:
        await _register(world)
        run = await world.start("echo")
        held = await _hold(world)
        assert held == run["run_id"]
        answer = await world.http.post(f"/v1/runs/{held}/cancel", params={"wait": 0.2})
        assert (answer.status_code, answer.json()["status"]) == (202, "CANCEL_REQUESTED")
        assert answer.json()["cancel_epoch"] == 1


async def _register(world: World) -> None:

    card: JsonValue = {"agent_id": "echo", "version": "1"}
    row = AgentRegistration(agent_id="echo", version="1", card=card, digest="d")
    await world.core.store.register([row], [])


async def _hold(world: World) -> str:

    want = ClaimWant(
        worker_id="w", limit=1, lease_ttl_s=60, serves=(("echo", "1"),), runtime_version=1
    )
    (claimed,) = await world.core.store.claim_runs(want)
    return claimed.row.facts.run_id


async def test_a_cancel_with_rollback_takes_the_run_back(world: World) -> None:
    """R-9.1: its row stays, nothing goes on from it."""
    run = await world.start("asker")
    run = await world.until(run["run_id"], "waiting_human")
    path = f"/v1/runs/{run['run_id']}"
    answer = await world.http.post(f"{path}/cancel", json={"action": "rollback", "reason": "no"})
    assert (answer.status_code, answer.json()["status"]) == (200, "CANCELED")
    assert answer.json()["cancel_epoch"] == 1
    assert (await world.http.post(f"{path}/fork")).json()["code"] == "conflict"
    assert (await world.http.post(f"{path}/retry")).json()["code"] == "conflict"
    again = await world.http.post(f"{path}/cancel", json={"action": "rollback"})
    assert again.json()["cancel_epoch"] == 1


async def test_a_cancel_can_ask_that_what_was_done_is_undone(world: World) -> None:
    """R-9.1, R-9.4: and says nothing of an action, so the run's own policy counts (R-3.4)."""
    options: JsonValue = {"cancel_policy": "rollback"}
    made = await world.http.post("/v1/agents/reader/run", json={"input": 1, "options": options})
    path = f"/v1/runs/{made.json()['run_id']}"
    await world.until(made.json()["run_id"], "waiting_human")
    wish: JsonValue = {"compensate": "yes please"}
    refused = await world.http.post(f"{path}/cancel", json=wish)
    assert (refused.status_code, refused.json()["field"]) == (422, "/compensate")
    wish = {"compensate": True}
    answer = await world.http.post(f"{path}/cancel", json=wish, params={"wait": 10})
    assert (answer.status_code, answer.json()["status"]) == (200, "CANCELED")
    asked = {"Accept": "application/json"}
    events = (await world.http.get(f"{path}/events", headers=asked)).json()["items"]
    tries = [item["data"] for item in events if item["type"] == "compensation"]
    assert [item["status"] for item in tries] == ["started", "succeeded"]
    assert tries[1]["detail"] == {"given back": "Emma"}
    (effect,) = events[-1]["data"]["effects"]
    assert (effect["tool"], effect["compensation"]) == ("borrow", "succeeded")
    again = await world.http.post(f"{path}/cancel", json=wish)
    assert (again.status_code, again.json()["cancel_epoch"]) == (200, 1)


async def test_a_cancel_can_ask_that_what_was_made_is_discarded(world: World) -> None:
    """R-9.7: one run, and many by filter."""
    many: JsonValue = {"agent_id": "reader", "all": False, "discard_artifacts": True}
    for bulk in (False, True):
        run_id = (await world.start("reader"))["run_id"]
        path = f"/v1/runs/{run_id}"
        await world.until(run_id, "waiting_human")
        [slip] = (await world.get(f"{path}/artifacts"))["items"]
        content = await world.http.get(f"/v1/artifacts/{slip['artifact_id']}/content")
        assert (slip["status"], content.text) == ("final", "slip of Emma")
        if bulk:
            told = await world.http.post("/v1/runs/cancel", json=many)
            assert told.json()["run_ids"] == [run_id]
        else:
            wrong: JsonValue = {"discard_artifacts": "all"}
            refused = await world.http.post(f"{path}/cancel", json=wrong)
            assert (refused.status_code, refused.json()["field"]) == (422, "/discard_artifacts")
            wish: JsonValue = {"discard_artifacts": True}
            await world.http.post(f"{path}/cancel", json=wish, params={"wait": 10})
        await world.until(run_id, "failed")
        shown = await world.get(f"/v1/artifacts/{slip['artifact_id']}")
        assert (shown["status"], shown["digest"]) == ("discarded", slip["digest"])
        gone = await world.http.get(f"/v1/artifacts/{slip['artifact_id']}/content")
        assert (gone.status_code, gone.json()["code"]) == (410, "gone")


async def test_what_a_run_does_on_a_busy_thread_is_chosen_and_shown(world: World) -> None:
    """R-11.1, CON-05, HITL-02: two requests close together, for each strategy."""
    for strategy, status in (
        ("enqueue", "INPUT_REQUIRED"),
        ("reject", "INPUT_REQUIRED"),
        ("interrupt", "INTERRUPTED"),
        ("rollback", "CANCELED"),
    ):
        run = await world.start("asker")
        first = (await world.until(run["run_id"], "waiting_human"))["run_id"]
        path = f"/v1/threads/{run['thread_id']}/runs"
        body = {"agent_id": "echo", "input": 1, "options": {"multitask_strategy": strategy}}
        answers = [
            await world.http.post(path, json=body, headers={"Idempotency-Key": strategy})
            for _ in range(2)
        ]
        seen = await world.get(f"/v1/runs/{first}")
        assert seen["status"] == status
        if strategy == "reject":
            assert [answer.status_code for answer in answers] == [409, 409]
            assert answers[0].json()["details"] == {"run_id": first}
            continue
        new, again = (answer.json() for answer in answers)
        assert [answer.status_code for answer in answers] == [202, 202]
        assert new["run_id"] == again["run_id"]
        assert new["options"]["multitask_strategy"] == strategy
        assert new["supersedes"] == again["supersedes"]
        assert new["supersedes"] == (None if strategy == "enqueue" else first)
        if strategy != "enqueue":
            await world.until(new["run_id"], "succeeded")
    wrong = await world.http.post(
        "/v1/agents/echo/run", json={"input": 1, "options": {"multitask_strategy": "perhaps"}}
    )
    assert (wrong.status_code, wrong.json()["field"]) == (422, "/options/multitask_strategy")


async def test_what_a_run_did_is_shown_object_by_object(world: World) -> None:
    """R-1.1, R-1.2, R-1.3."""
    run = await world.start("echo", {"times": 2, "text": "hi"}, wait=5)
    path = f"/v1/runs/{run['run_id']}"
    steps = (await world.get(f"{path}/steps"))["items"]
    assert [step["index"] for step in steps] == [0, 1, 2]
    assert [item["kind"] for item in steps[0]["items"]] == ["tool"]
    assert steps[0]["items"][0]["status"] == "succeeded"
    assert await world.get(f"/v1/steps/{steps[1]['step_id']}") == steps[1]
    calls = (await world.get(f"{path}/tool_calls"))["items"]
    assert [(call["args"], call["output"]) for call in calls] == [
        ({"text": "hi 0"}, "hi 0"),
        ({"text": "hi 1"}, "hi 1"),
    ]
    one = await world.get(f"/v1/tool_calls/{calls[0]['tool_call_id']}")
    assert one == calls[0]
    assert [execution["outcome"] for execution in one["executions"]] == ["succeeded"]
    attempts = (await world.get(f"{path}/attempts"))["items"]
    assert [attempt["end_reason"] for attempt in attempts] == ["finished"]
    checkpoints = (await world.get(f"{path}/checkpoints", limit=1))["items"]
    assert await world.get(f"/v1/checkpoints/{checkpoints[0]['checkpoint_id']}") == checkpoints[0]
    assert (await world.get(f"{path}/late_results"))["items"] == []
    assert (await world.get(f"{path}/artifacts"))["items"] == []


async def test_tool_calls_are_paged(world: World) -> None:
    run = await world.start("echo", {"times": 3}, wait=5)
    path = f"/v1/runs/{run['run_id']}/tool_calls"
    first = await world.get(path, limit=2)
    second = await world.get(path, limit=2, after=first["next"])
    assert [call["step_index"] for call in first["items"] + second["items"]] == [0, 1, 2]
    assert second["next"] is None


async def test_discovery_lists_agents_cards_and_tools(world: World) -> None:
    """R-1.7."""
    agents = (await world.get("/v1/agents"))["items"]
    assert [agent["agent_id"] for agent in agents][:2] == ["asker", "broken"]
    assert (await world.get("/v1/agents/echo"))["versions"] == ["1"]
    assert (await world.get("/v1/agents/echo/card"))["tools"] == ["echo"]
    answer = await world.http.get("/v1/agents/echo/card", params={"version": "9"})
    assert answer.status_code == 404
    tools = {item["name"]: item for item in (await world.get("/v1/tools"))["items"]}
    assert tools["publish"]["side_effect"] == "write"
    assert not tools["publish"]["sandbox_only"]


async def test_threads_hold_messages_and_runs(world: World) -> None:
    """R-1.2, R-1.5."""
    thread = (await world.http.post("/v1/threads", json={"title": "t"})).json()
    path = f"/v1/threads/{thread['thread_id']}"
    parts = [{"type": "text", "text": "before"}]
    message = await world.http.post(f"{path}/messages", json={"parts": parts})
    assert message.status_code == 201
    run = await world.http.post(
        f"{path}/runs?wait=5", json={"agent_id": "echo", "input": {"answer": "after"}}
    )
    assert run.json()["thread_id"] == thread["thread_id"]
    found = (await world.get(f"{path}/messages"))["items"]
    assert [item["role"] for item in found] == ["user", "user", "assistant"]
    assert found[2]["parts"] == [{"type": "text", "text": "after"}]
    assert [item["run_id"] for item in (await world.get(f"{path}/runs"))["items"]] == [
        run.json()["run_id"]
    ]
    first = await world.get(f"{path}/messages", limit=1)
    assert (await world.get(f"{path}/messages", after=first["next"]))["items"] == found[1:]
    assert (await world.get(path))["last_position"] == 3


async def test_the_metrics_tell_what_waits(world: World) -> None:
    asker = await world.start("asker")
    await world.start("echo", wait=5)
    await world.until(asker["run_id"], "waiting_human")
    text = (await world.http.get("/metrics")).text
    assert "perdure_open_interrupts 1.0" in text
    assert 'perdure_runs{state="waiting_human"} 1.0' in text
    assert 'route="/v1/agents/{agent_id}/run"' in text


async def test_the_trace_of_the_caller_is_the_runs(world: World) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    answer = await world.http.post(
        "/v1/agents/echo/run",
        json={"input": 1},
        headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    )
    assert answer.json()["trace_id"] == trace


async def test_events_in_pages_are_a_strict_json_document(world: World) -> None:
    """R-6.2, R-6.3."""
    run = await world.start("echo", {"times": 3}, wait=5)
    answer = await world.http.get(
        f"/v1/runs/{run['run_id']}/events?limit=4", headers={"Accept": "application/json"}
    )
    page = json.loads(answer.content)
    assert [event["seq"] for event in page["items"]] == [1, 2, 3, 4]
    assert page["next"] == 4
    assert page["last_seq"] == run["last_seq"]
    first = page["items"][0]
    assert (first["type"], first["data"]["state"], first["data"]["status"]) == (
        "state",
        "pending",
        "QUEUED",
    )
    assert await world.get(f"/v1/events/{first['event_id']}") == first
