"""A conversation of agents: who speaks next is decided, recorded, and spoken once (R-4.8, R-13.4).

A participant is an agent with a thread of its own that lasts for the whole run. Each time it
speaks, a child run goes on in that thread: it is told what was said since it spoke last, and what
it answers is its speech. Choosing the speaker is one decision, durable together with the child that
speaks; after a crash either both are there or neither, so nobody speaks twice.

The planner keeps nothing: the speeches are the children that the run's log tells of.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Literal

from pydantic import JsonValue

from perdure.agents.catalog import loop_agent
from perdure.agents.loop.base import nonsense
from perdure.agents.loop.isolated import IsolatedPlanner
from perdure.agents.loop.render import text_of
from perdure.agents.models.port import ChatMessage, ModelClient, ModelRequest, use_of
from perdure.engine.context import ChildRecord, PlannerContext
from perdure.engine.history import HISTORY_MESSAGES_MAX
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import (
    GIVE_UP_CODES,
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    ModelUse,
    Spawn,
)
from perdure.protocol.errors import Invalid
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.policies import Budget, RetryPolicy, Timeouts

TURNS_MAX_DEFAULT = 20
TURNS_MAX = HISTORY_MESSAGES_MAX // 2
"""One who speaks every time still has the task in sight: a speech takes two messages."""
PARTICIPANTS_MAX = 50
END = "END"
"""What a model that selects says when nobody is to speak any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """An agent that takes part, under a name of its own. `description` is for who selects."""

    name: str
    agent_id: str
    version: str | None = None
    description: str = ""
    budget: Budget = Budget()
    timeouts: Timeouts = Timeouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What a participant answered; `error` when it failed or could not be asked."""

    speaker: str
    said: JsonValue = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation as far as it has come: what a selector decides upon."""

    task: JsonValue
    participants: Sequence[Participant]
    speeches: Sequence[Speech]


Selector = Callable[[Talk], "str | Awaitable[str | None] | None"]
"""Names who speaks next; None ends the conversation. It must be a function of the talk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByModel:
    """Lets models choose: the first, and the next ones after `model_retry` failures of one."""

    models: Sequence[ModelClient]
    instructions: str = ""


def in_turn(talk: Talk) -> str | None:
    """Let all speak one after the other, in their order, again and again."""
    return talk.participants[len(talk.speeches) % len(talk.participants)].name


def routed(talk: Talk) -> str | None:
    """Let the last speaker say who is next: its answer is an object with `next`.

    `next` null ends the conversation; an answer without `next` passes the word on in turn.
    """
    said = talk.speeches[-1].said if talk.speeches else None
    if not isinstance(said, dict) or "next" not in said:
        return in_turn(talk)
    wanted = said["next"]
    return None if wanted is None else text_of(wanted)


class ConversationPlanner:
    """Decides who speaks, until nobody is to or `turns_max` speeches were made."""

    def __init__(
        self,
        participants: Sequence[Participant],
        select: Selector | ByModel,
        *,
        turns_max: int,
        on_failure: Literal["end", "go_on"],
        answer: Literal["last", "all"],
        stop_word: str | None,
        model_retry: RetryPolicy,
    ) -> None:
        self._participants = tuple(participants)
        self._by_name = {one.name: one for one in self._participants}
        self._select = select
        self._turns_max = turns_max
        self._on_failure = on_failure
        self._answer = answer
        self._stop_word = stop_word
        self._model_retry = model_retry

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the next decision; raises PlannerFailure as its models do."""
        records = [child for turn in context.turns for child in turn.children]
        speeches = [_speech(record) for record in records]
        last = speeches[-1] if speeches else None
        if last is not None and last.error is not None and self._on_failure == "end":
            return _failed(last, last.error)
        if len(speeches) >= self._turns_max or self._is_last_word(last):
            return self._finish(speeches)
        talk = Talk(task=context.input, participants=self._participants, speeches=speeches)
        name, uses = await self._choose(context, talk)
        if name is None:
            return self._finish(speeches, uses)
        speaker = self._by_name.get(name)
        if speaker is None:
            reason = f"{name[:200]!r} was to speak next, who takes no part"
            return GiveUp(code=FailureCode.OUTPUT_INVALID, reason=reason, model_uses=uses)
        return Spawn(
            children=(
                ChildRequest(
                    agent_id=speaker.agent_id,
                    version=speaker.version,
                    input=_told(context, speaker, records, speeches),
                    key=speaker.name,
                    participant=speaker.name,
                    budget=speaker.budget,
                    timeouts=speaker.timeouts,
                ),
            ),
            model_uses=uses,
        )

    async def _choose(
        self, context: PlannerContext, talk: Talk
    ) -> tuple[str | None, tuple[ModelUse, ...]]:
        if isinstance(self._select, ByModel):
            return await self._ask_model(self._select, context, talk)
        chosen = self._select(talk)
        return (await chosen if isawaitable(chosen) else chosen), ()

    async def _ask_model(
        self, select: ByModel, context: PlannerContext, talk: Talk
    ) -> tuple[str | None, tuple[ModelUse, ...]]:
        position = context.model_failures // self._model_retry.attempts_max
        model = select.models[min(position, len(select.models) - 1)]
        timeout_s = context.facts.options.timeouts.model_s
        request = ModelRequest(messages=_question(talk, select.instructions))
        if timeout_s is not None:
            request = ModelRequest(messages=request.messages, timeout_s=timeout_s)
        reply = await model.complete(request)
        uses = (use_of(reply),)
        said = reply.text.strip().strip("`'\".:")
        if said.upper() == END:
            return None, uses
        if said not in self._by_name:
            raise nonsense(f"{reply.model}: {said[:100]!r} is no participant", uses)
        return said, uses

    def _is_last_word(self, last: Speech | None) -> bool:
        return (
            self._stop_word is not None
            and last is not None
            and last.error is None
            and self._stop_word in text_of(last.said)
        )

    def _finish(self, speeches: Sequence[Speech], uses: tuple[ModelUse, ...] = ()) -> Finish:
        if self._answer == "all":
            return Finish(answer=[_line(speech) for speech in speeches], model_uses=uses)
        heard = [speech.said for speech in speeches if speech.error is None]
        return Finish(answer=heard[-1] if heard else None, model_uses=uses)


def _speech(record: ChildRecord) -> Speech:
    return Speech(speaker=record.key or "", said=record.answer, error=record.error)


def _failed(speech: Speech, error: Failure) -> GiveUp:
    code = error.code if error.code in GIVE_UP_CODES else FailureCode.INTERNAL
    return GiveUp(
        code=code,
        reason=f"{speech.speaker} failed: {error.code}: {error.reason}",
        details={"participant": speech.speaker, "code": error.code.value},
    )


def _line(speech: Speech) -> dict[str, JsonValue]:
    if speech.error is None:
        return {"by": speech.speaker, "said": speech.said}
    return {"by": speech.speaker, "failed": speech.error.code.value}


def _told(
    context: PlannerContext,
    speaker: Participant,
    records: Sequence[ChildRecord],
    speeches: Sequence[Speech],
) -> dict[str, JsonValue]:
    """Return what a participant has not heard yet; to one that is new, the task comes first."""
    heard = 0
    if speaker.name in context.participants:
        own = (
            place
            for place, record in enumerate(records)
            if record.key == speaker.name and record.child_run_id is not None
        )
        heard = max(own, default=-1) + 1
    told: dict[str, JsonValue] = {"said": [_line(speech) for speech in speeches[heard:]]}
    return told if heard else {"task": context.input, "you": speaker.name, **told}


def _question(talk: Talk, instructions: str) -> tuple[ChatMessage, ...]:
    listed = "\n".join(
        f"- {one.name}: {one.description}" if one.description else f"- {one.name}"
        for one in talk.participants
    )
    order = (
        f"You lead a conversation. Those who take part:\n{listed}\n{instructions}\n"
        f"Reply with nothing but the name of who speaks next, or {END} when all is said."
    )
    told = [f"The task: {text_of(talk.task)}"]
    told += [
        f"{one.speaker}: {text_of(one.said)}"
        if one.error is None
        else f"{one.speaker} failed: {one.error.code}"
        for one in talk.speeches
    ]
    told.append("Who speaks next?")
    return (
        ChatMessage(role="system", text=order),
        ChatMessage(role="user", text="\n\n".join(told)),
    )


def conversation(
    agent_id: str,
    version: str,
    participants: Sequence[Participant],
    *,
    select: Selector | ByModel = in_turn,
    turns_max: int = TURNS_MAX_DEFAULT,
    on_failure: Literal["end", "go_on"] = "end",
    answer: Literal["last", "all"] = "last",
    stop_word: str | None = None,
    model_retry: RetryPolicy | None = None,
    name: str = "",
    description: str = "",
    input_schema: dict[str, JsonValue] | None = None,
    replaces: Sequence[str] = (),
    continues: bool = False,
    publishes: str | None = None,
) -> HostedAgent:
    """Return an agent that lets others speak about its input, at most `turns_max` times in all.

    It ends when the selector names nobody, when an answer contains `stop_word`, or with the last
    turn. Its answer is the last speech, or with `answer="all"` every one. A participant that fails
    ends the run with its code, or with `on_failure="go_on"` is told of to the others. A selector
    of one's own runs as user code. Raises Invalid for names used twice and bounds out of range.
    """
    names = [one.name for one in participants]
    if not 1 <= len(names) <= PARTICIPANTS_MAX or len(set(names)) != len(names) or "" in names:
        raise Invalid(
            f"agent {agent_id!r}: a conversation has 1 to {PARTICIPANTS_MAX} participants, "
            "each with a name of its own",
            field="participants",
        )
    if not 1 <= turns_max <= TURNS_MAX:
        raise Invalid(f"agent {agent_id!r}: turns_max is 1 to {TURNS_MAX}", field="turns_max")
    if stop_word == "":
        raise Invalid(f"agent {agent_id!r}: every answer contains ''", field="stop_word")
    if isinstance(select, ByModel) and not select.models:
        raise Invalid(f"agent {agent_id!r}: no model to select with", field="select")
    retry = model_retry or RetryPolicy()
    planner = ConversationPlanner(
        participants,
        select,
        turns_max=turns_max,
        on_failure=on_failure,
        answer=answer,
        stop_word=stop_word,
        model_retry=retry,
    )
    trusted = isinstance(select, ByModel) or select is in_turn or select is routed
    return loop_agent(
        agent_id,
        version,
        planner if trusted else IsolatedPlanner(planner),
        name=name,
        description=description,
        input_schema=input_schema,
        model_retry=retry,
        models=len(select.models) if isinstance(select, ByModel) else 1,
        replaces=replaces,
        continues=continues,
        publishes=publishes,
    )
