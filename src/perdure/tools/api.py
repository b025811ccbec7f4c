"""What a tool is, what it gets, and how it says what it came to.

A tool returns a plain JSON value (succeeded), one of the `Returned` helpers, or raises:
`ToolError` for an error of its business (data for the planner), `ToolUnavailable` when what it
needs cannot be reached and nothing has happened. Any other exception is reported as TOOL_ERROR
with its type. Nothing a tool raises leaves its own call (R-5.8).
"""

import threading
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from perdure.engine.ports import FieldWrite, ProducedArtifact, ToolInvocation
from perdure.protocol.codec import clean, encode
from perdure.protocol.errors import Invalid
from perdure.protocol.failures import FailureCode
from perdure.protocol.fields import WRITES_MAX
from perdure.protocol.plain import no_entries, value
from perdure.protocol.runs import Caller, RunContext
from perdure.protocol.states import ArtifactStatus, ToolCallStatus
from perdure.protocol.tools import CALLBACK_S_MAX, ToolSpec
from perdure.protocol.values import BLOB_BYTES_MAX, INLINE_BYTES_MAX, NAME_CHARACTERS_MAX

ARTIFACTS_MAX = 50
EXTERNAL_REF_CHARACTERS_MAX = 1000

Isolation = Literal["thread", "process"]
"""Where a tool that is not trusted runs: in this process beside the engine, or in a child."""


class ToolError(Exception):
    """An error of the tool's business: the planner sees reason and details, the run goes on."""

    def __init__(
        self,
        reason: str,
        details: Mapping[str, object] | None = None,
        *,
        retryable: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.details = dict(details or {})
        self.retryable = retryable


class ToolUnavailable(Exception):
    """What the tool needs cannot be reached, and nothing has happened; it may be tried again."""


@value
class Returned:
    """A result that says more than a value. Made by the helpers below."""

    status: ToolCallStatus
    output: object = None
    code: FailureCode | None = None
    reason: str = ""
    retryable: bool = False
    details: Mapping[str, object] = field(default_factory=no_entries)
    external_ref: str | None = None
    done: str | None = None
    not_done: str | None = None
    expires_in_s: float | None = None


def succeeded(output: object = None, *, external_ref: str | None = None) -> Returned:
    """Say that it worked, with the id that the outside world gave it."""
    return Returned(
        status=ToolCallStatus.SUCCEEDED, output=output, external_ref=_bounded_ref(external_ref)
    )


def partial(
    *, done: str, not_done: str, output: object = None, external_ref: str | None = None
) -> Returned:
    """Say that a part happened and a part did not."""
    return Returned(
        status=ToolCallStatus.PARTIAL,
        output=output,
        external_ref=_bounded_ref(external_ref),
        done=done,
        not_done=not_done,
    )


def failed(
    reason: str,
    *,
    code: FailureCode = FailureCode.TOOL_ERROR,
    retryable: bool = False,
    details: Mapping[str, object] | None = None,
    external_ref: str | None = None,
) -> Returned:
    """Say that it did not work, as data for the planner."""
    return Returned(
        status=ToolCallStatus.FAILED,
        code=code,
        reason=reason,
        retryable=retryable,
        details=dict(details or {}),
        external_ref=_bounded_ref(external_ref),
    )


def pending(*, external_ref: str | None = None, expires_in_s: float | None = None) -> Returned:
    """Say that the result comes later, by callback, within a time (None: the default; R-5.10).

    Raises Invalid for a time that is not above 0, or longer than 366 days.
    """
    if expires_in_s is not None and not 0 < expires_in_s <= CALLBACK_S_MAX:
        raise Invalid("a callback is waited for more than 0 s and at most 366 days")
    return Returned(
        status=ToolCallStatus.PENDING,
        external_ref=_bounded_ref(external_ref),
        expires_in_s=expires_in_s,
    )


def not_happened(reason: str = "no execution is known under this key") -> Returned:
    """Answer a lookup: it certainly did not happen, so it may be run."""
    return failed(
        reason,
        code=FailureCode.TOOL_UNAVAILABLE,
        retryable=True,
        details={"happened": False},
    )


def _bounded_ref(text: str | None) -> str | None:
    if text is not None and len(text) > EXTERNAL_REF_CHARACTERS_MAX:
        raise Invalid(f"an external reference has at most {EXTERNAL_REF_CHARACTERS_MAX} characters")
    return text


_ODD = frozenset("/\\\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What parts folders, and what turns the direction of a name that is shown."""


def _is_odd(character: str) -> bool:
    """Tell whether a file's name must not hold a character: it parts folders or is not shown."""
    return character in _ODD or unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}


class ToolContext:
    """What one execution knows and may leave behind. Safe to use from several threads.

    `effect_key` is the idempotency key of the call: the same for every execution of it (R-5.6).
    """

    __slots__ = (
        "_artifacts",
        "_closed",
        "_external_ref",
        "_lock",
        "_stop",
        "_writes",
        "caller",
        "effect_key",
        "execution",
        "run",
        "run_id",
        "step_index",
        "thread_id",
        "tool_call_id",
    )

    def __init__(self, invocation: ToolInvocation) -> None:
        self.effect_key: str = invocation.effect_key
        self.run_id: str = invocation.run_id
        self.thread_id: str = invocation.thread_id
        self.tool_call_id: str = invocation.tool_call_id
        self.step_index: int = invocation.step_index
        self.execution: int = invocation.execution
        self.run: RunContext = invocation.context
        self.caller: Caller = invocation.caller
        self._lock = threading.Lock()
        self._artifacts: list[ProducedArtifact] = []
        self._writes: list[FieldWrite] = []
        self._external_ref: str | None = None
        self._stop = False
        self._closed = False

    @property
    def stop_requested(self) -> bool:
        """Tell whether the call was cancelled or timed out; a long sync tool looks now and then."""
        return self._stop

    def request_stop(self) -> None:
        """Ask the tool to stop. Called by the runner."""
        self._stop = True

    def artifact(
        self,
        name: str,
        data: bytes | str,
        media_type: str,
        *,
        status: ArtifactStatus = ArtifactStatus.FINAL,
    ) -> None:
        """Add a formal product of this execution, committed with its result.

        The name is that of a file without a folder; the status is `draft` or `final`. Raises Invalid
        for others, and for a name or content over the limits (200 characters, 16 MiB, 50 a call).
        """
        if status not in {ArtifactStatus.DRAFT, ArtifactStatus.FINAL}:
            raise Invalid("a tool makes drafts and final artifacts")
        content = data.encode() if isinstance(data, str) else bytes(data)
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise Invalid(f"an artifact's name has 1 to {NAME_CHARACTERS_MAX} characters")
        if name in {".", ".."} or any(_is_odd(character) for character in name):
            raise Invalid("an artifact's name has no folder and no control characters")
        if len(content) > BLOB_BYTES_MAX:
            raise Invalid(f"artifact {name!r} is larger than {BLOB_BYTES_MAX} bytes")
        made = ProducedArtifact(name=name, media_type=media_type, data=content, status=status)
        with self._lock:
            self._check_open()
            if len(self._artifacts) >= ARTIFACTS_MAX:
                raise Invalid(f"a call makes at most {ARTIFACTS_MAX} artifacts")
            self._artifacts.append(made)

    def write(self, field: str, value: object) -> None:
        """Write a field of the state that the agent declares, by its rule, with the call's result.

        Nothing is written when the call fails or answers by callback. A field that is not declared,
        or a value that does not fit, makes the result invalid. Raises Invalid for a value larger
        than an inline one (8 KiB), and for more than 50 writes.
        """
        written = FieldWrite(field=field, value=clean(value))
        if len(encode(written.value)) > INLINE_BYTES_MAX:
            raise Invalid(f"a value of a field has at most {INLINE_BYTES_MAX} bytes")
        with self._lock:
            self._check_open()
            if len(self._writes) >= WRITES_MAX:
                raise Invalid(f"a call makes at most {WRITES_MAX} writes")
            self._writes.append(written)

    def external_ref(self, text: str) -> None:
        """Note the id that the outside world gave the effect; kept even when the tool fails."""
        _bounded_ref(text)
        with self._lock:
            self._check_open()
            self._external_ref = text

    @property
    def noted_ref(self) -> str | None:
        """Return the external reference noted so far."""
        return self._external_ref

    def close(
        self,
    ) -> tuple[str | None, tuple[ProducedArtifact, ...], tuple[FieldWrite, ...]]:
        """End the execution; return its reference, artifacts and writes. Called by the runner."""
        with self._lock:
            self._closed = True
            return self._external_ref, tuple(self._artifacts), tuple(self._writes)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the execution has ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Performed:
    """What a call did, as its `compensate` gets it. `effect_key` is the key that the call had."""

    args: JsonValue
    output: JsonValue
    external_ref: str | None
    effect_key: str
    status: Literal["succeeded", "partial"]
    done: str | None = None
    not_done: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A piece of user code. `run` returns a value, or an awaitable when `is_async`.

    A lookup returns what a tool returns; None means that it cannot say. A compensation is run with
    the fields of a `Performed` in the place of arguments.
    """

    run: Callable[[ToolContext, JsonValue], object]
    is_async: bool


class Tool(Protocol):
    """A tool of any origin, as the registry keeps it."""

    @property
    def spec(self) -> ToolSpec:
        """Return its declaration."""
        ...

    @property
    def call(self) -> Operation:
        """Return what runs it."""
        ...

    @property
    def lookup(self) -> Operation | None:
        """Return what tells the outcome of an earlier execution by its effect key."""
        ...

    @property
    def compensate(self) -> Operation | None:
        """Return what undoes a call that has succeeded, in part or whole."""
        ...

    @property
    def isolation(self) -> Isolation:
        """Return where it runs when it is not trusted."""
        ...

    @property
    def import_path(self) -> str:
        """Return `module:qualified.name`, by which a child process finds the same tool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTool:
    """A tool whose declaration came from elsewhere: MCP, OpenAPI, an OpenAI function schema."""

    spec: ToolSpec
    call: Operation
    lookup: Operation | None = None
    compensate: Operation | None = None
    isolation: Isolation = "thread"
    import_path: str = ""
