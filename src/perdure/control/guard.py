"""Policy hooks of a user's own, behind a guard: no answer means deny (AUT-03).

An error, a None, nonsense, a timeout: all deny, and are logged. A hook cannot grant what the base
policy denies.
"""

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, Field, JsonValue, ValidationError

from perdure.control.policy import DefaultPolicy, Effect
from perdure.engine.ports import HostedAgent, Policy, PolicyDecision
from perdure.protocol.durations import WAIT_S_MAX
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import OnExpiry
from perdure.protocol.tools import ToolSpec

STUCK_MAX = 3
WAITED_S_MAX = 2.0
"""So long the engine's loop waits for hooks within `WINDOW_S`: then calls are denied unasked, as the
loop has leases to keep."""
WINDOW_S = 10.0

log = logging.getLogger(__name__)

PolicyHook = Callable[[HostedAgent, RunFacts, ToolSpec, JsonValue], "PolicyDecision | Effect"]
"""A rule of a user's own. Whatever else it returns, or raises, means deny."""


class GuardedPolicy:
    """A user's hook behind the base policy: the base's denials stand, else the hook decides.

    The hook runs in a thread of the guard's own. The engine's loop waits for it `timeout_s` at
    most, so a hook answers from memory. It gets a copy of the arguments; the rest it must not
    change. While three of its answers are overdue every call is denied, and so it is once it took
    two seconds of ten. `version` names the
    hook's rules; give it a new one with each change.
    """

    def __init__(
        self,
        hook: PolicyHook,
        *,
        version: str,
        base: Policy | None = None,
        timeout_s: float = 0.25,
    ) -> None:
        self._base = base or DefaultPolicy()
        self._hook = hook
        self._bench = _Bench(timeout_s)
        self._version = version

    def judge(
        self, agent: HostedAgent, facts: RunFacts, spec: ToolSpec, args: JsonValue
    ) -> PolicyDecision:
        """Return the base's denial, else the hook's decision; deny when the hook gives none."""
        decision = self._base.judge(agent, facts, spec, args)
        if decision.effect == "deny":
            return self._versioned(decision, decision)
        shown = _copied(args)
        answer = self._bench.ask(lambda: self._hook(agent, facts, spec, shown))
        if isinstance(answer, _NoAnswer):
            log.warning(
                "the policy hook gave no answer: denied",
                extra={"run_id": facts.run_id, "tool": spec.name, "problem": answer.problem},
            )
            denied = _decision("deny", "hook-failed", f"the policy {answer.problem}")
            return self._versioned(denied, decision)
        return self._versioned(self._taken(answer, decision, facts, spec), decision)

    def _taken(
        self, answer: object, base: PolicyDecision, facts: RunFacts, spec: ToolSpec
    ) -> PolicyDecision:
        if isinstance(answer, PolicyDecision) and _is_sound(answer):
            return answer
        if answer == "ask":
            own = _decision("ask", "hook", "the policy asks a person")
            return replace(own, expires_in_s=base.expires_in_s, on_expiry=base.on_expiry)
        if answer == "allow":
            return _decision("allow", "hook", "the policy allows it")
        if answer == "deny":
            return _decision("deny", "hook", "the policy denies it")
        if inspect.iscoroutine(answer):
            answer.close()
        log.warning(
            "the policy hook answered nonsense: denied",
            extra={"run_id": facts.run_id, "tool": spec.name, "answer": type(answer).__name__},
        )
        return _decision("deny", "hook-failed", "the policy gave no decision")

    def _versioned(self, decision: PolicyDecision, base: PolicyDecision) -> PolicyDecision:
        """Return the decision under the versions of both, the hook's and the base's."""
        return replace(decision, version=f"{self._version}+{base.version}")


def _decision(effect: Effect, rule: str, reason: str) -> PolicyDecision:
    return PolicyDecision(effect=effect, rule=rule, version="", reason=reason)


def _is_sound(decision: PolicyDecision) -> bool:
    """Tell whether a hook filled its decision with what the fields say."""
    try:
        _Sound.model_validate(decision, from_attributes=True)
    except ValidationError:
        return False
    return True


def _copied(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


class _Sound(BaseModel):
    effect: Effect
    rule: str
    reason: str
    approvers: tuple[str, ...]
    expires_in_s: float | None = Field(gt=0, le=WAIT_S_MAX)
    on_expiry: OnExpiry
    escalate_after_s: float | None = Field(default=None, gt=0, le=WAIT_S_MAX)
    escalate_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Why there is no answer, as the end of a sentence."""

    problem: str


@dataclass(slots=True)
class _Question:
    body: Callable[[], object]
    answered: threading.Event
    answer: object = field(default_factory=lambda: _NoAnswer("ended without an answer"))


class _Bench:
    """Daemon threads that answer one question at a time; one that is stuck is replaced.

    `_stuck` and the thread in service are changed by the asking thread alone; a worker that comes
    back late only sets its question's event.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._questions: queue.SimpleQueue[_Question | None] | None = None
        self._stuck: list[_Question] = []
        self._waited_s = 0.0
        self._window_end_s = 0.0

    def ask(self, body: Callable[[], object]) -> object:
        """Return what `body` returns, or a `_NoAnswer`."""
        self._stuck = [question for question in self._stuck if not question.answered.is_set()]
        if len(self._stuck) >= STUCK_MAX:
            return _NoAnswer("is stuck")
        asked_s = time.monotonic()
        if asked_s >= self._window_end_s:
            self._window_end_s, self._waited_s = asked_s + WINDOW_S, 0.0
        if self._waited_s >= WAITED_S_MAX:
            return _NoAnswer("is too slow")
        try:
            return self._answer_of(body)
        finally:
            self._waited_s += time.monotonic() - asked_s

    def _answer_of(self, body: Callable[[], object]) -> object:
        if self._questions is None:
            self._questions = queue.SimpleQueue()
            threading.Thread(
                target=_answer_all, args=(self._questions,), name="perdure-policy", daemon=True
            ).start()
        question = _Question(body, threading.Event())
        self._questions.put(question)
        if question.answered.wait(self._timeout_s):
            return question.answer
        self._stuck.append(question)
        self._questions.put(None)  # the thread ends once it comes back
        self._questions = None
        return _NoAnswer(f"gave no answer within {self._timeout_s:g} s")


def _answer_all(questions: "queue.SimpleQueue[_Question | None]") -> None:
    while (question := questions.get()) is not None:
        with suppress(BaseException):  # a hook may raise anything, its exit included
            question.answer = _answered(question.body)
        question.answered.set()


def _answered(body: Callable[[], object]) -> object:
    try:
        return body()
    except Exception as error:  # noqa: BLE001 (whatever a hook raises means deny)
        return _NoAnswer(f"raised {type(error).__name__}")
