"""The operations of a code agent: what its function is given as `ctx`.

Every operation has a position, and is recorded there once. When the function runs again, after a
wait, a crash or a release, an operation that has its result returns it without being done again.
Arguments and results are JSON; what is returned is a copy. Nothing else that the function awaits
is durable.
"""

import hashlib
import inspect
import random as random_module
import uuid as uuid_module
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, cast

from pydantic import JsonValue

from perdure.agents.code.errors import (
    ChildFailed,
    InterruptExpired,
    StateConflict,
    StepFailed,
    ToolFailed,
)
from perdure.agents.code.live import (
    LiveFunction,
    ModelWish,
    later_by,
    request_digest,
    whole,
)
from perdure.agents.code.positions import Branch, at
from perdure.agents.code.steps import local_step
from perdure.engine.context import PlannerContext
from perdure.engine.fields_written import problem_with_field
from perdure.engine.journal import NOW, SLEEP, STEP_TOOLS, plan_digest, question_digest
from perdure.engine.ports import LocalStep
from perdure.engine.schema import check_schema
from perdure.engine.spawning import child_digest
from perdure.engine.topics import published
from perdure.engine.values import keep
from perdure.protocol.codec import clean, digest, digest_bytes, encode
from perdure.protocol.decisions import (
    Ask,
    ChildRequest,
    Note,
    Product,
    Publish,
    Revision,
    ToolRequest,
)
from perdure.protocol.durations import WAIT_S_MAX, WORK_S_MAX, checked_s
from perdure.protocol.events import PlanItem
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    LOOP_MARK,
    Slot,
    StateField,
    conflict,
    empty,
    merged,
    read_values,
    reducers_of,
    slot_of,
    write_of,
)
from perdure.protocol.folding import FoldedField
from perdure.protocol.messages import Message
from perdure.protocol.policies import Budget, RetryPolicy, Timeouts
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import Answer, InterruptKind, OnExpiry, RunState, ToolCallStatus
from perdure.protocol.topics import PUBLISHED_EVENT_NAME
from perdure.protocol.values import (
    BLOB_BYTES_MAX,
    INLINE_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    RESERVED,
)
from perdure.tools.jobs import copied

R = TypeVar("R")

STEP, STEP_ONCE = "perdure.step", "perdure.step_once"
SLEEP_S_MAX = int(WAIT_S_MAX)

Kind = Literal["input", "auth", "approval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """What a model replied. `calls` are its wishes to call tools: `tool`, `args`, `call_id`."""

    text: str
    calls: tuple[dict[str, JsonValue], ...]
    finish: str


class Context:
    """The operations of one run. `facts` say who ordered it, `messages` what was said before."""

    def __init__(
        self, live: LiveFunction, seen: PlannerContext, fields: Mapping[str, StateField]
    ) -> None:
        self._live = live
        self._fields = fields
        self._writes: dict[str, JsonValue] = {}
        self._folded: dict[Slot, FoldedField] = {}
        for slot, value in read_values(seen.fields_read).items():
            self._folded[slot] = FoldedField(base=(value,))
        self._take({at: one for at, one in seen.writes.items() if at.startswith(LOOP_MARK)})
        self._agent_id = seen.agent_id
        self._reducers = reducers_of(fields.values())
        self.facts: RunFacts = seen.facts
        self.messages: tuple[Message, ...] = tuple(seen.messages)

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self._live.run_id

    async def step(
        self,
        function: Callable[..., Awaitable[R] | R],
        *args: object,
        name: str | None = None,
        once: bool = False,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> R:
        """Run a function of your own beside the engine, and record what it returns.

        It gets its arguments as JSON. It runs at least once: again when its worker died before the
        result was recorded; with `once`, a person is asked instead. Raises StepFailed when it
        raised, after as many tries as `retry` allows.
        """
        named = _name(name or getattr(function, "__name__", type(function).__name__))
        wish = ToolRequest(
            tool=STEP_ONCE if once else STEP,
            args={"args": [clean(arg) for arg in args]},
            call_id=named,
        )
        step = local_step(function, cast("dict[str, Any]", wish.args)["args"], retry, timeout_s)
        return cast("R", await self._call(wish, named, step))

    async def tool(self, name: str, /, **args: object) -> Any:
        """Call a tool that the agent is granted; return its output, or raise ToolFailed."""
        if name in STEP_TOOLS:
            raise ValueError(f"{name} stands for steps: use ctx.step")
        return await self._call(ToolRequest(tool=name, args=clean(args)), name, None)

    async def _call(self, wish: ToolRequest, name: str, step: LocalStep | None) -> JsonValue:
        branch = self._live.branch()
        position = branch.take()
        kind = "tool" if step is None else "step"
        recorded = self._live.known(position, kind, name, keep(wish.args).digest)
        if recorded is None and step is not None and step.timeout_s is not None:
            checked_s("the timeout_s of a step", step.timeout_s, WORK_S_MAX)
        if recorded is None or not recorded.entry.done:
            wish = wish.model_copy(update={"position": position})
            recorded = await self._live.wait(branch, position, kind, name, wish, step)
        entry = recorded.entry
        self._take(entry.writes)
        if entry.outcome == ToolCallStatus.SUCCEEDED:
            return whole(recorded)
        failed = ToolFailed if step is None else StepFailed
        raise failed(name, entry.outcome or "", entry.error, whole(recorded))

    async def interrupt(
        self,
        payload: object = None,
        *,
        key: str | None = None,
        title: str = "",
        schema: dict[str, JsonValue] | None = None,
        kind: Kind = "input",
        expires_in: timedelta | None = None,
        on_expiry: Literal["fail", "deny"] = "fail",
    ) -> Any:
        """Ask a person and return the answer; meanwhile no process is held.

        The question stands for `expires_in`, 366 days at most; without it for ever. An approval without a value returns True. A rejection ends the run. Raises InterruptExpired
        when nobody answers in time and `on_expiry` is "deny".
        """
        if schema is not None:
            check_schema(schema)
        shown = clean(payload)
        asked = question_digest(InterruptKind(kind), title, keep(shown).digest, schema)
        branch = self._live.branch()
        position = branch.take()
        recorded = self._live.known(position, "interrupt", key or "", asked)
        if recorded is None:
            if key and key in self._live.keys:
                raise ValueError(f"the key {key!r} was used by another question of this run")
            self._live.keys.add(key or "")
            if expires_in is not None:
                checked_s("the expires_in of a question", expires_in.total_seconds(), WAIT_S_MAX)
        else:
            expires_in = None  # it was asked: what is left of a deadline may be over by now
        if recorded is None or not recorded.entry.done:
            ask = Ask(
                ask=cast("Any", InterruptKind(kind)),
                title=title,
                payload=shown,
                key=key,
                answer_schema=schema,
                expires_in=expires_in,
                on_expiry=OnExpiry(on_expiry),
                position=position,
            )
            recorded = await self._live.wait(branch, position, "interrupt", key or "", ask)
        entry = recorded.entry
        if entry.outcome == "expired":
            raise InterruptExpired(title or key or position)
        if entry.answer == Answer.APPROVE and recorded.value is None:
            return True
        return whole(recorded)

    async def spawn(
        self,
        agent_id: str,
        input: object = None,
        *,
        version: str | None = None,
        key: str | None = None,
        participant: str | None = None,
        detach: bool = False,
        budget: Budget | None = None,
        timeouts: Timeouts | None = None,
        output_schema: dict[str, JsonValue] | None = None,
    ) -> Any:
        """Run another agent as a child and return its answer, without holding a worker meanwhile.

        Raises ChildFailed when it failed or could not be started. A detached child goes its own
        way: its run's id is returned at once, and neither result nor cancel passes between them.
        All children under the name of one `participant` share a thread: each goes on from what
        those before it were asked and answered.
        """
        wish = ChildRequest(
            agent_id=agent_id,
            version=version,
            input=clean(input),
            key=key,
            participant=participant,
            detach=detach,
            budget=budget or Budget(),
            timeouts=timeouts or Timeouts(),
            output_schema=output_schema,
        )
        branch = self._live.branch()
        position = branch.take()
        recorded = self._live.known(position, "child", agent_id, child_digest(wish))
        if recorded is None or not recorded.entry.done:
            wish = wish.model_copy(update={"position": position})
            recorded = await self._live.wait(branch, position, "child", agent_id, wish)
        entry = recorded.entry
        if entry.error is None and entry.outcome in {RunState.SUCCEEDED, "spawned"}:
            return whole(recorded)
        raise ChildFailed(agent_id, entry.outcome or "", entry.error, whole(recorded))

    async def model(
        self,
        messages: str | Sequence[dict[str, Any]],
        *,
        system: str = "",
        tools: Sequence[str] = (),
        temperature: float | None = None,
        max_output_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> ModelAnswer:
        """Ask the agent's model once, with a text or messages (`role` and `text`).

        `tools` are names of granted tools whose declarations the model sees; to carry out the
        calls it wishes is the function's choice. A reply that is recorded is not paid for again.
        """
        spoken = [{"role": "user", "text": messages}] if isinstance(messages, str) else messages
        if system:
            spoken = [{"role": "system", "text": system}, *spoken]
        wish = ModelWish(
            messages=tuple(cast("dict[str, JsonValue]", clean(message)) for message in spoken),
            tools=tuple(tools),
            temperature=temperature,
            max_output_tokens=max_output_tokens,
            timeout_s=timeout_s,
        )
        asked = request_digest(wish)
        branch = self._live.branch()
        position = branch.take()
        recorded = self._live.known(position, "model", "", asked)
        if recorded is None:
            if timeout_s is not None:
                checked_s("the timeout_s of a model request", timeout_s, WORK_S_MAX)
            recorded = await self._live.wait(branch, position, "model", "", wish)
        calls = tuple(cast("dict[str, JsonValue]", copied(call)) for call in recorded.entry.calls)
        return ModelAnswer(
            text=str(recorded.value or ""), calls=calls, finish=recorded.entry.finish
        )

    async def sleep(self, seconds: float) -> None:
        """Wait at least so long, without holding a worker when all branches wait."""
        if not 0 <= seconds <= SLEEP_S_MAX:
            raise ValueError(f"a sleep takes 0 to {SLEEP_S_MAX} seconds")
        live, branch = self._live, self._live.branch()
        position = branch.take()
        recorded = live.known(position, "value", SLEEP, "")
        if recorded is None:
            until = later_by(live.now, seconds)
            live.record(Note(position=position, name=SLEEP, value={"until": until.isoformat()}))
        else:
            told = cast("dict[str, str]", recorded.value)
            until = datetime.fromisoformat(told["until"])
            if until <= live.now:
                return
        await live.wait(branch, position, "value", SLEEP, until)

    async def gather(self, *branches: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
        """Run branches side by side; return their results in order once all have ended.

        When some raised, the error of the first of them in order is raised then; with
        `return_exceptions` errors stand among the results. Raises StateConflict when two branches
        replaced one field of the state.
        """
        try:
            results = await self._live.gather(branches)
            clash = conflict(self._written_in(self._live.branch()))
            if clash is not None:
                raise StateConflict(*clash)
        finally:
            for branch in branches:
                if (
                    inspect.iscoroutine(branch)
                    and inspect.getcoroutinestate(branch) == "CORO_CREATED"
                ):
                    branch.close()
        for result in results:
            if isinstance(result, BaseException) and not (
                return_exceptions and isinstance(result, Exception)
            ):
                raise result
        return results

    def emit(self, name: str, value: object = None) -> None:
        """Report a value: a `custom` event, written once, with the next decision."""
        if name.startswith(RESERVED):
            raise ValueError(f"names that begin with `{RESERVED}` are the runtime's")
        cleaned = _inline(clean(value))
        live = self._live
        position = live.branch().take()
        if live.known(position, "value", _name(name), digest(cleaned)) is None:
            live.record(Note(position=position, name=name, value=cleaned))

    def plan(self, items: Sequence[PlanItem | str]) -> None:
        """Revise the run's plan, which `items` are from now on, with the next decision.

        A text is an item that is pending. Every revision is a `plan` event that clients see.
        """
        revised = tuple(PlanItem(text=item) if isinstance(item, str) else item for item in items)
        live = self._live
        position = live.branch().take()
        if live.known(position, "plan", "", plan_digest(revised)) is None:
            live.record(Revision(position=position, items=revised))

    def write(self, name: str, value: object) -> None:
        """Write a declared field of the state by its rule, once, with the next decision.

        Other branches see it once they have joined this one: writes merge in the order of the
        branches. Raises ValueError for a field that is not declared or a value that does not fit.
        """
        declared = self._fields.get(name)
        if declared is None:
            raise ValueError(f"the state has no field {name!r}")
        cleaned = _inline(clean(value))
        after = merged(declared.rule, self._held(declared), cleaned, declared.reducer)
        problem = problem_with_field(declared, after)
        if problem is not None:
            raise ValueError(problem)
        live = self._live
        position = live.branch().take()
        told = write_of(declared, self._agent_id, cleaned)
        self._take({position: told})
        if live.known(position, "value", FIELD_EVENT_NAME, digest(told)) is None:
            live.record(Note(position=position, name=FIELD_EVENT_NAME, value=told))

    def _written_in(self, branch: Branch) -> dict[str, JsonValue]:
        """Return the writes of the branches of the gather that has just ended in a branch."""
        gather = at(branch.path, branch.count - 1) + "."
        return {
            position: write
            for position, write in self._writes.items()
            if position.startswith(gather)
        }

    def read(self, name: str) -> Any:
        """Return what a declared field holds, as this branch sees it: no other's writes beside it."""
        declared = self._fields.get(name)
        if declared is None:
            raise ValueError(f"the state has no field {name!r}")
        return copied(self._held(declared))

    def _held(self, declared: StateField) -> JsonValue:
        branch = self._live.branch()
        folded = self._folded.get(declared.slot(self._agent_id), FoldedField())
        seen = folded.seen_from(at(branch.path, branch.count)).value(self._reducers)
        return seen[0] if seen else empty(declared.rule)

    def _take(self, writes: Mapping[str, JsonValue]) -> None:
        self._writes |= writes
        for place, write in writes.items():
            slot = slot_of(cast("dict[str, JsonValue]", write))
            self._folded.setdefault(slot, FoldedField()).add(place, write)

    def publish(self, topic: str, value: object = None) -> None:
        """Publish to a topic of the root's thread, once, with the next decision.

        Every agent that subscribes to it gets a run of its own, with `value` as its input.
        """
        cleaned = clean(value)
        wish = Publish(topic=topic, value=cleaned)
        live = self._live
        position = live.branch().take()
        told = digest(published(topic, keep(cleaned)))
        if live.known(position, "value", PUBLISHED_EVENT_NAME, told) is None:
            live.record(wish.model_copy(update={"position": position}))

    def artifact(self, name: str, data: bytes | str, media_type: str) -> None:
        """Add a formal product of the run, committed once, with the next decision."""
        content = data.encode() if isinstance(data, str) else bytes(data)
        if len(content) > BLOB_BYTES_MAX:
            raise ValueError(f"an artifact has at most {BLOB_BYTES_MAX} bytes")
        live = self._live
        position = live.branch().take()
        told = digest([media_type, digest_bytes(content)])
        if live.known(position, "artifact", _name(name), told) is None:
            live.record(Product(position=position, name=name, media_type=media_type, data=content))

    def now(self) -> datetime:
        """Return the time at which this was first asked for, aware, in UTC."""
        live = self._live
        position = live.branch().take()
        recorded = live.known(position, "value", NOW, "")
        if recorded is not None:
            return datetime.fromisoformat(str(recorded.value))
        live.record(Note(position=position, name=NOW, value=live.now.isoformat()))
        return live.now

    def random(self) -> float:
        """Return a number in [0, 1) that is the same whenever the function runs again."""
        return random_module.Random(self._seed("random")).random()  # noqa: S311  # repeatable, no secret

    def uuid(self) -> uuid_module.UUID:
        """Return a UUID that is the same whenever the function runs again."""
        return uuid_module.UUID(bytes=self._seed("uuid")[:16], version=4)

    def patched(self, change: str) -> bool:
        """Tell whether this run takes the code with a change, or was past this place before it."""
        return self._live.patched(_name(change))

    def _seed(self, kind: str) -> bytes:
        position = self._live.derived(kind)
        run_id = self._live.first_past(position)
        return hashlib.sha256(f"{run_id}\x1f{position}\x1f{kind}".encode()).digest()


def _name(name: str) -> str:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        raise ValueError(f"a name has 1 to {NAME_CHARACTERS_MAX} characters")
    return str(clean(name))


def _inline(value: JsonValue) -> JsonValue:
    if len(encode(value)) > INLINE_BYTES_MAX:
        raise ValueError(f"a reported value has at most {INLINE_BYTES_MAX} bytes: make an artifact")
    return value
