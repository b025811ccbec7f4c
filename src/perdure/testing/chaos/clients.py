"""The clients of a campaign: they start runs, follow them, cancel, retry, and answer questions.

Each client starts a run, follows its stream, cut at random bytes, to the end, and starts the next:
so the load is what the machine can do. What clients were told is kept, to be compared with the
store at the end: acknowledged starts, accepted cancels and answers, and every event that was seen.
"""

import hashlib
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.abc
from pydantic import JsonValue

from perdure.testing.chaos.agents import Provider
from perdure.testing.chaos.api import Api, Reply
from perdure.testing.chaos.report import Record
from perdure.testing.sim.actors import CODE_AGENT, LOOP_AGENT
from perdure.testing.sim.draw import draw_steps
from perdure.testing.sse_client import SseClient, SseEvent, StreamInterrupted

ATTEMPTS = 100
"""Attempts that a run may lose in one step: their bound is not what is tested."""

SLEEP_SCALE = 0.1
"""Virtual time costs nothing, real time does: sleeps of the simulation are so much shorter here."""

SILENCE_S = 25.0
"""A stream that says nothing for so long, no heartbeat either, is left for another server."""

AGAIN_S = 0.6
CUT_BYTES_MAX = 6000
CANCELS, RETRIES, DOUBLES, ON_THREADS = 0.07, 0.4, 0.06, 0.1
CUTS = 0.35
LOOK_S = 0.4
STRATEGIES = ("enqueue", "interrupt", "rollback", "reject")


def gentle(steps: Sequence[JsonValue]) -> list[JsonValue]:
    """Return the steps with shorter sleeps."""
    return [_gentle(cast("list[Any]", step)) for step in steps]


def _gentle(step: list[Any]) -> JsonValue:
    match step:
        case ["sleep", seconds]:
            return ["sleep", round(seconds * SLEEP_SCALE, 3)]
        case ["spawn", children, wait]:
            return ["spawn", [gentle(child) for child in children], wait]
        case _:
            return step


def kinds_of(agent: str, steps: Sequence[JsonValue]) -> list[str]:
    """Return what a run is, in the words of the report."""
    kinds = {agent}
    for step in cast("Sequence[list[Any]]", steps):
        match step:
            case ["spawn", *_]:
                kinds.add("with children")
            case ["ask", _]:
                kinds.add("with questions")
            case ["sleep", _]:
                kinds.add("with sleeps")
            case ["call", calls]:
                names = {str(call[0]) for call in calls}
                kinds |= {"with approvals"} if "publish" in names else set()
                kinds |= {"with payments"} if any(n.startswith("pay") for n in names) else set()
            case _:
                pass
    return sorted(kinds)


@dataclass(slots=True)
class Seen:
    """A run as its client saw it: each event's seq and the digest of its text."""

    run_id: str
    events: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    end: dict[str, Any] | None = None

    @property
    def end_state(self) -> str | None:
        """The state that the run ended in, once its end was seen."""
        return None if self.end is None else str(self.end["state"])


@dataclass(slots=True)
class Told:
    """What clients were told, and must find true."""

    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])
    """Every run whose start was acknowledged, as it was followed."""

    cancelled: set[str] = field(default_factory=set[str])
    """Runs whose cancel was accepted before their end."""

    sent: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The answers that were sent to each question."""

    accepted: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """The answers of which a server said that they count."""


class Load:
    """All clients. `closing` lets each end with its run; `close` waits for them."""

    def __init__(self, api: Api, provider: Provider, record: Record, seed: int) -> None:
        self.api = api
        self.told = Told()
        self.closing = False
        self._provider = provider
        self._record = record
        self._seed = seed
        self._probes = 0

    def chance(self, name: str) -> random.Random:
        """Return the chance of somebody who acts by himself."""
        return random.Random(f"{self._seed} {name}")  # noqa: S311  # to be repeated

    async def client(self, number: int) -> None:
        """Start runs, one after the other, until the load is to end."""
        chance, count = self.chance(f"client {number}"), 0
        while not self.closing:
            count += 1
            await self._one(f"client-{number}-{count}", chance)

    async def probe(self) -> str | None:
        """Start a small run as a new client, follow it to its end and return its id."""
        self._probes += 1
        chance = self.chance(f"probe {self._probes}")
        steps: list[JsonValue] = [["call", [["echo", 1]]], ["call", [["pay_idempotent", 2]]]]
        run_id = await self._start(f"probe-{self._probes}", LOOP_AGENT, steps, chance)
        if run_id is not None:
            await self.follow(run_id, chance)
        return run_id

    async def story(self, run_id: str) -> str:
        """Return when what happened to a run, in one line."""
        path, query = f"/runs/{run_id}/events", {"limit": "100"}
        found = await self.api.request("GET", path, self.chance(run_id), query=query)
        if not found.is_ok:
            return run_id
        events = cast("list[dict[str, Any]]", found.body["items"])
        return f"{run_id}: " + ", ".join(
            f"{event['time'][14:23]} {event['type']}" for event in events
        )

    # ---------------------------------------------------------------- one run

    async def _one(self, key: str, chance: random.Random) -> None:
        agent = chance.choice([LOOP_AGENT, LOOP_AGENT, CODE_AGENT])
        steps = gentle(draw_steps(chance))
        cancels = chance.random() < CANCELS
        cancel_after_s = chance.uniform(0.05, 3.0)
        run_id = await self._start(key, agent, steps, chance)
        if run_id is None:
            return
        async with anyio.create_task_group() as group:
            if cancels:
                group.start_soon(self._cancel, run_id, cancel_after_s, self.chance(f"{key} c"))
            if chance.random() < ON_THREADS:
                group.start_soon(self._beside, f"{key}-beside", run_id, self.chance(f"{key} t"))
            await self.follow(run_id, chance)
        if self.told.seen[run_id].end_state == "failed" and chance.random() < RETRIES:
            await self._retry(f"{key}-retry", run_id, chance)

    async def _start(
        self,
        key: str,
        agent: str,
        steps: Sequence[JsonValue],
        chance: random.Random,
        thread: tuple[str, str] | None = None,
    ) -> str | None:
        """Start a run, sometimes twice at once under its key; on a thread with a strategy."""
        options: dict[str, JsonValue] = {"max_attempts": ATTEMPTS}
        body: dict[str, JsonValue] = {"input": {"steps": list(steps)}, "options": options}
        path = f"/agents/{agent}/run"
        if thread is not None:
            thread_id, options["multitask_strategy"] = thread
            path, body["agent_id"] = f"/threads/{thread_id}/runs", agent
        replies: list[Reply] = []

        async def send(by: random.Random) -> None:
            replies.append(await self.api.request("POST", path, by, key=key, body=body))

        async with anyio.create_task_group() as group:
            group.start_soon(send, chance)
            if chance.random() < DOUBLES:
                group.start_soon(send, self.chance(f"{key} double"))
        started = {str(reply.body["run_id"]) for reply in replies if reply.is_ok}
        refused = [reply for reply in replies if not reply.is_ok]
        for reply in refused:
            self._refused("start", reply, {"conflict", "thread_busy"} if thread else set())
        wrong = [reply for reply in refused if not was_before(reply, started)]
        if len(started) > 1 or (started and wrong):
            self._record.found("keys", f"under {key}: runs {started}, refusals {wrong}")
        if not started:
            return None
        run_id = min(started)
        self.told.seen.setdefault(run_id, Seen(run_id))
        for kind in kinds_of(agent, steps):
            self._record.count("runs started", kind)
        self._record.count("runs started", "all")
        return run_id

    async def _beside(self, key: str, run_id: str, chance: random.Random) -> None:
        """Start another run on a run's thread while that one may still go on."""
        run = await self.api.request("GET", f"/runs/{run_id}", chance)
        if not run.is_ok:
            self._refused("look", run, set())
            return
        strategy = chance.choice(STRATEGIES)
        thread = (str(run.body["thread_id"]), strategy)
        other = await self._start(key, LOOP_AGENT, gentle(draw_steps(chance)), chance, thread)
        self._record.count("threads", f"{strategy}{' refused' if other is None else ''}")
        if other is not None:
            await self.follow(other, chance)

    async def _cancel(self, run_id: str, after_s: float, chance: random.Random) -> None:
        await anyio.sleep(after_s)
        action = chance.choice(["interrupt", "rollback"])
        body = {"action": action, "reason": "enough"}
        reply = await self.api.request("POST", f"/runs/{run_id}/cancel", chance, body=body)
        if not reply.is_ok:
            self._refused("cancel", reply, set())
        elif reply.body["cancel_epoch"] > 0:
            self.told.cancelled.add(run_id)
            self._record.count("cancels", f"accepted: {action}")
        else:
            self._record.count("cancels", "too late")

    async def _retry(self, key: str, run_id: str, chance: random.Random) -> None:
        body = {"reason": "once more", "redrive": chance.random() < 0.5}
        reply = await self.api.request("POST", f"/runs/{run_id}/retry", chance, key=key, body=body)
        if not reply.is_ok:
            self._refused("retry", reply, {"conflict", "gone"})
            return
        other = str(reply.body["run_id"])
        self.told.seen.setdefault(other, Seen(other))
        self._record.count("runs started", "retries")
        await self.follow(other, chance)

    def _refused(self, what: str, reply: Reply, expected: set[str]) -> None:
        code = str(reply.body.get("code"))
        self._record.count("refusals", f"{what}: {reply.status} {code}")
        if code not in expected:
            self._record.found("http", f"{what} was refused: {reply.status} {reply.body}")

    # ---------------------------------------------------------------- following

    async def follow(self, run_id: str, chance: random.Random) -> None:
        """Follow a run to its end, coming again after every cut, to whatever server."""
        seen = self.told.seen[run_id]
        last = str(seen.events[-1][0]) if seen.events else ""
        while seen.end is None:
            client = SseClient(
                "127.0.0.1",
                chance.choice(self.api.ports),
                f"/v1/runs/{run_id}/events",
                last_event_id=last,
            )
            cut = chance.randint(1, CUT_BYTES_MAX) if chance.random() < CUTS else None
            self._record.count("streams", "opened")
            try:
                await self._listen(client, seen, cut)
            except StreamInterrupted as cut_off:
                self._record.count("streams", "ended cleanly" if cut_off.clean else "cut")
            except OSError:
                self._record.count("streams", "lost")
            except (ValueError, LookupError) as error:
                self._record.found("streams", f"{run_id} cannot be read: {error!r}")
            last = str(seen.events[-1][0]) if seen.events else ""
            if seen.end is None:
                await anyio.sleep(AGAIN_S * chance.random())
        self._record.saw_end()

    async def _listen(self, client: SseClient, seen: Seen, cut_after: int | None) -> None:
        with anyio.move_on_after(SILENCE_S) as patience:
            async with client.connect(cut_after=cut_after) as stream:
                if stream.status != 200:
                    self._record.count("streams", f"answered {stream.status}")
                    if stream.status not in {204, 503}:
                        text = f"{client.path} after {client.last_event_id!r}: {stream.status}"
                        self._record.found("streams", text)
                    return
                while (event := await stream.next()) is not None:
                    patience.deadline = anyio.current_time() + SILENCE_S
                    self._take(seen, event)
        if patience.cancelled_caught:
            self._record.count("streams", "silent")

    def _take(self, seen: Seen, event: SseEvent) -> None:
        body = event.json()
        if body.get("live"):
            return
        if str(body["seq"]) != event.id:
            self._record.found("streams", f"{seen.run_id}: event {event.id} says {body['seq']}")
        seen.events.append((body["seq"], text_digest(event.data.encode())))
        if event.is_end:
            seen.end = body["data"]
            state, code = body["data"]["state"], body["data"]["code"]
            self._record.count("runs seen to their end", f"{state} {code or ''}".strip())

    # ---------------------------------------------------------------- people

    async def people(self) -> None:
        """Answer what is asked, now and then; at times two people at once, who may disagree."""
        chance = self.chance("people")
        while True:
            await anyio.sleep(LOOK_S * (0.5 + chance.random()))
            query = {"status": "pending", "limit": "100"}
            inbox = await self.api.request("GET", "/interrupts", chance, query=query)
            if not inbox.is_ok:
                self._refused("inbox", inbox, set())
                continue
            questions = cast("list[dict[str, Any]]", inbox.body["items"])
            async with anyio.create_task_group() as group:
                for question in questions:
                    if self.closing or chance.random() < 0.7:
                        self._attend(group, question, chance)

    def _attend(
        self, group: anyio.abc.TaskGroup, question: Mapping[str, Any], chance: random.Random
    ) -> None:
        identifier = str(question["interrupt_id"])
        first = self._answer(question, chance)
        answers = [first]
        if chance.random() < 0.25:
            answers.append(first if chance.random() < 0.5 else self._answer(question, chance))
            self._record.count("answers", "two at once")
        for number, answer in enumerate(answers):
            by = self.chance(f"{identifier} {number}")
            group.start_soon(self._give, identifier, answer, by)

    def _answer(self, question: Mapping[str, Any], chance: random.Random) -> dict[str, JsonValue]:
        drawn = chance.random()
        match question["kind"]:
            case "approval":
                return {"answer": "approve" if drawn < 0.85 else "reject"}
            case "outcome":
                return self._outcome(question, drawn)
            case _:
                return {"answer": "respond", "value": {"number": chance.randrange(10**6)}}

    def _outcome(self, question: Mapping[str, Any], drawn: float) -> dict[str, JsonValue]:
        """Look into the provider's journal and say what became of a payment."""
        if drawn < 0.1:
            return {"answer": "skip"}
        key = str(cast("dict[str, Any]", question["payload"])["effect_key"])
        paid = self._provider.find(key)
        if paid is None:
            return {"answer": "retry"}
        value: JsonValue = {"paid": paid["amount"]}
        return {"answer": "happened", "value": value, "external_ref": f"receipt-{key}"}

    async def _give(
        self, identifier: str, answer: dict[str, JsonValue], chance: random.Random
    ) -> None:
        text = answer_text(str(answer["answer"]), answer.get("value"))
        self.told.sent.setdefault(identifier, []).append(text)
        reply = await self.api.request(
            "POST", f"/interrupts/{identifier}/resolve", chance, body=answer
        )
        if reply.is_ok:
            self.told.accepted.setdefault(identifier, set()).add(text)
            self._record.count("answers", f"{answer['answer']}{' again' * reply.replayed}")
        else:
            self._refused("answer", reply, {"already_answered", "gone"})


def answer_text(answer: str, value: object) -> str:
    """Return an answer in one text, to compare it."""
    return f"{answer} {value}" if answer == "respond" else answer


def text_digest(text: bytes) -> bytes:
    """Return what is kept of an event's text."""
    return hashlib.blake2b(text, digest_size=12).digest()


def was_before(refused: Reply, started: Container[str]) -> bool:
    """Tell whether a request was refused because another run was active, before the one sent beside
    it under the same key started its run: a refusal leaves nothing under the key.
    """
    details = cast("Mapping[str, object]", refused.body.get("details") or {})
    other = details.get("run_id")
    is_busy = refused.body.get("code") == "thread_busy"
    return is_busy and isinstance(other, str) and other not in started
