"""Giving the result of a pending tool call over HTTP (R-5.10, R-3.2)."""

from typing import Any

from tests.server.world import open_world


async def test_a_callback_is_taken_once_and_what_comes_after_is_late() -> None:
    """R-5.10, F29: bad input changes nothing; the same again is 200, another one 409, then 410."""
    async with open_world() as world:
        run = await world.start("buyer")
        path = f"/v1/runs/{run['run_id']}"

        async def parked() -> dict[str, Any]:
            return (await world.get(f"{path}/tool_calls"))["items"][0]

        await world.until_waiting(run["run_id"], "callback")
        call = await parked()
        assert (call["status"], call["external_ref"]) == ("pending", "order-1")
        assert call["executions"][0]["outcome"] == "pending"
        result = f"/v1/tool_calls/{call['tool_call_id']}/result"
        for wrong in (
            {},
            {"status": "pending"},
            {"status": "succeeded", "done": "half"},
            {"status": "succeeded", "error": {"reason": "no"}},
            {"status": "failed"},
            {"status": "failed", "error": {"reason": "no", "details": {"text": "x" * 9000}}},
            {"status": "failed", "error": {"reason": "no", "code": "X"}},
        ):
            answer = await world.http.post(result, json=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid"), wrong
        unknown = await world.http.post(
            f"/v1/tool_calls/tc_{'0' * 32}/result", json={"status": "succeeded"}
        )
        assert unknown.status_code == 404
        assert (await parked())["status"] == "pending"

        body = {"status": "partial", "output": [1], "done": "one", "not_done": "two"}
        first = await world.http.post(result, json=body, headers={"Idempotency-Key": "k"})
        assert (first.status_code, first.json()["resolved_by"]) == (200, "callback"), first.text
        assert "Idempotency-Replayed" not in first.headers
        assert (await world.until(run["run_id"], "succeeded"))["answer"] == "bought"
        again = await world.http.post(result, json=body)
        assert (again.status_code, again.headers["Idempotency-Replayed"]) == (200, "true")
        assert again.json()["output"] == [1]
        other = await world.http.post(result, json={"status": "succeeded", "output": 2})
        assert (other.status_code, other.json()["code"]) == (410, "gone")
        assert other.json()["details"] == {"status": "partial", "late": True}
        (late,) = (await world.get(f"{path}/late_results"))["items"]
        assert (late["status"], late["output"]) == ("succeeded", 2)
