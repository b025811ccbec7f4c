"""Continuing from a breakpoint over HTTP (R-8.4): the route, its replays and its refusals."""

from tests.server.world import open_world


async def test_a_paused_run_is_continued_once_by_the_same_request() -> None:
    async with open_world() as world:
        options = {"breakpoints": [{"at": "before_tool", "tool": "echo"}]}
        run = await world.start("echo", options=options)
        paused = await world.until(run["run_id"], "waiting_human")
        assert paused["next_actions"] == ["continue", "cancel"]
        (interrupt_id,) = paused["open_interrupts"]
        path = f"/v1/runs/{run['run_id']}/continue"
        answer = await world.http.post(
            f"/v1/interrupts/{interrupt_id}/resolve", json={"answer": "respond"}
        )
        assert answer.status_code == 422
        body = {"interrupt_id": interrupt_id}
        for _ in range(2):
            answer = await world.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        assert (await world.until(run["run_id"], "succeeded"))["answer"] == "done"
        answer = await world.http.post(path, json={**body, "mode": "step"})
        assert (answer.status_code, answer.json()["code"]) == (409, "already_answered")
        for wrong, status in (({}, 422), ({"interrupt_id": f"int_{'0' * 32}"}, 404)):
            assert (await world.http.post(path, json=wrong)).status_code == status
        bad = {"breakpoints": [{"at": "before_step", "tool": "echo"}]}
        body = {"input": 1, "options": bad}
        answer = await world.http.post("/v1/agents/echo/run", json=body)
        assert answer.status_code == 422
