"""What the planners that ask a model share: which model, what is sent, what a reply may be.

Trusted code that runs on the engine's loop. A planner keeps nothing that a decision depends on
but the context: its cache of conversations may be lost at any time.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from anyio.lowlevel import checkpoint_if_cancelled
from pydantic import JsonValue

from perdure.agents.loop.conversation import Conversations
from perdure.agents.loop.render import ASK_TOOL
from perdure.agents.models.port import (
    MODEL_IDLE_S_DEFAULT,
    MODEL_TIMEOUT_S_DEFAULT,
    ChatMessage,
    ModelClient,
    ModelDelta,
    ModelReply,
    ModelRequest,
    use_of,
)
from perdure.engine.context import OpenMessage, PlannerContext
from perdure.engine.ports import PlannerFailure
from perdure.protocol.codec import clean, encode
from perdure.protocol.decisions import Ask, CallTools, ModelUse, ToolRequest
from perdure.protocol.durations import WORK_S_MAX, checked_s
from perdure.protocol.errors import Invalid
from perdure.protocol.events import PlanItem
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.tools import ToolSpec

ASK_SPEC = ToolSpec(
    name=ASK_TOOL,
    description="Ask a person a question and wait for the answer. Ask one thing at a time.",
    input_schema={
        "type": "object",
        "properties": {"question": {"type": "string"}},
        "required": ["question"],
        "additionalProperties": False,
    },
)
_TITLE_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A usable reply with its record."""

    reply: ModelReply
    uses: tuple[ModelUse, ...]


class ModelPlanner:
    """Asks the models in turn: after `model_retry.attempts_max` failures of one, the next.

    `output_schema` is what the answer must fit; a run's own option goes before it.
    """

    def __init__(
        self,
        models: Sequence[ModelClient],
        system: str = "",
        *,
        model_retry: RetryPolicy | None = None,
        ask_human: bool = False,
        output_schema: dict[str, JsonValue] | None = None,
        temperature: float | None = None,
        max_output_tokens: int | None = None,
        timeout_s: float = MODEL_TIMEOUT_S_DEFAULT,
        idle_s: float = MODEL_IDLE_S_DEFAULT,
        conversations: Conversations | None = None,
    ) -> None:
        if not models:
            raise ValueError("a planner needs at least one model")
        self.models = tuple(models)
        self.model_retry = model_retry or RetryPolicy()
        self.output_schema = output_schema
        self._ask_human = ask_human
        self._temperature = temperature
        self._max_output_tokens = max_output_tokens
        self._timeout_s = checked_s("timeout_s", timeout_s, WORK_S_MAX)
        self._idle_s = checked_s("idle_s", idle_s, WORK_S_MAX)
        self._system = system
        self._conversations = conversations or Conversations()

    def for_output(self, output_schema: dict[str, JsonValue]) -> Self:
        """Return the same planner for answers of this schema."""
        planner = copy.copy(self)
        planner.output_schema = output_schema
        return planner

    def for_retry(self, model_retry: RetryPolicy) -> Self:
        """Return the same planner with other bounds on the failures of one model."""
        planner = copy.copy(self)
        planner.model_retry = model_retry
        return planner

    async def speak(
        self,
        context: PlannerContext,
        *tail: ChatMessage,
        tools: tuple[ToolSpec, ...] = (),
    ) -> Spoken:
        """Ask the model of this step; raise PlannerFailure when its reply cannot be used.

        `tail` stands after the conversation in this request only.
        """
        view = self._conversations.view(context, self._system_for(context), *tail)
        model = self._model_for(context)
        message = context.open_message() if context.open_message is not None else None
        reply = await model.complete(
            ModelRequest(
                messages=view.messages,
                tools=tools,
                temperature=self._temperature,
                max_output_tokens=self._max_output_tokens,
                timeout_s=context.facts.options.timeouts.model_s or self._timeout_s,
                idle_s=self._idle_s,
                on_delta=None if message is None else _into(message),
            )
        )
        await checkpoint_if_cancelled()  # a client may have swallowed the cancel (CAN-11)
        use = use_of(
            reply,
            request_digest=view.digest,
            message_id=message.message_id if message is not None else None,
        )
        _refuse_cut_off(reply, use)
        return Spoken(reply=reply, uses=(use,))

    def offered(self, context: PlannerContext) -> tuple[ToolSpec, ...]:
        """Return the tools a model may call: the granted ones, and asking a person if enabled."""
        tools = tuple(context.tools)
        return (*tools, ASK_SPEC) if self._asks(context) else tools

    def acted(
        self,
        context: PlannerContext,
        spoken: Spoken,
        plan: tuple[PlanItem, ...] | None = None,
    ) -> CallTools | Ask | None:
        """Return the calls or the question of a reply, or None when it has neither.

        A question goes first: calls beside it are left out, for their sense may hang on the answer.
        """
        calls = spoken.reply.calls
        if not calls:
            return None
        question = next((call for call in calls if call.tool == ASK_TOOL), None)
        if question is not None and self._asks(context):
            return self._ask(context, spoken, question, plan)
        return CallTools(calls=calls, text=spoken.reply.text, model_uses=spoken.uses, plan=plan)

    def schema_for(self, context: PlannerContext) -> dict[str, JsonValue] | None:
        """Return the schema that the answer must fit."""
        return context.facts.options.output_schema or self.output_schema

    def answer_of(self, context: PlannerContext, text: str) -> JsonValue:
        """Return the answer that a text stands for: parsed JSON if a schema asks for it.

        What does not parse is returned as text; the runtime then tells the planner (R-10.1).
        """
        if self.schema_for(context) is None:
            return text
        found, value = read_json(text)
        return value if found else text

    def _system_for(self, context: PlannerContext) -> str:
        schema = self.schema_for(context)
        if schema is None:
            return self._system
        note = (
            "When you are done, answer with nothing but one JSON document that fits this schema: "
            + encode(schema).decode()
        )
        return f"{self._system}\n\n{note}" if self._system else note

    def _asks(self, context: PlannerContext) -> bool:
        """Tell whether a person can be asked; an agent's own tool of that name goes first."""
        return self._ask_human and all(tool.name != ASK_TOOL for tool in context.tools)

    def _model_for(self, context: PlannerContext) -> ModelClient:
        position = context.model_failures // self.model_retry.attempts_max
        return self.models[min(position, len(self.models) - 1)]

    def _ask(
        self,
        context: PlannerContext,
        spoken: Spoken,
        request: ToolRequest,
        plan: tuple[PlanItem, ...] | None,
    ) -> Ask:
        args = request.args
        question = args.get("question") if isinstance(args, dict) else args
        text = question if isinstance(question, str) else spoken.reply.text
        return Ask(
            title=(text or "The agent asks for your input.")[:_TITLE_CHARACTERS_MAX],
            payload={"question": text, "said": spoken.reply.text},
            key=f"{ASK_TOOL}:{context.step_index}",
            model_uses=spoken.uses,
            plan=plan,
        )


def _into(message: OpenMessage) -> Callable[[ModelDelta], None]:
    """Return what passes the pieces of a reply on to those who follow the run."""

    def take(delta: ModelDelta) -> None:
        if delta.text:
            message.say(delta.text)

    return take


def read_json(text: str) -> tuple[bool, JsonValue]:
    """Return whether a text is a JSON document, bare or in a code fence, and its value."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    try:
        return True, clean(json.loads(fenced.group(1) if fenced else text))
    except (ValueError, RecursionError, Invalid):
        return False, None


def nonsense(reason: str, uses: tuple[ModelUse, ...], *, retryable: bool = True) -> PlannerFailure:
    """Return the failure of a model that answered, but not usably."""
    failure = Failure(
        code=FailureCode.MODEL_ERROR, reason=reason, retryable=retryable, stage=Stage.PLANNING
    )
    return PlannerFailure(failure, model_uses=uses)


def _refuse_cut_off(reply: ModelReply, use: ModelUse) -> None:
    """Raise for a reply that is not the model's whole word: part of a text is no answer (F43)."""
    uses = (use.model_copy(update={"text": ""}),)
    if reply.finish == "length" and not reply.calls:
        raise nonsense(f"{reply.model}: the reply was cut at the output limit", uses)
    if reply.finish == "content_filter":
        reason = f"{reply.model}: the provider's filter withheld the reply"
        raise nonsense(reason, uses, retryable=False)
