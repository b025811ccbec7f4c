"""What the errors of the `openai` package mean here: one function, at the adapter's edge."""

import re
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime

import openai

from perdure.protocol.failures import Failure, FailureCode, Stage

REASON_CHARACTERS_MAX = 500
RETRY_AFTER_S_MAX = 3600.0

_RETRYABLE_STATUS = frozenset({408, 429})
_OVERFLOW_STATUS = frozenset({400, 413, 422})
_OVERFLOW_CODES = frozenset(
    {"context_length_exceeded", "context_window_exceeded", "string_above_max_length"}
)
_OVERFLOW_TEXT = re.compile(
    r"maximum context length|context (?:length|window|size)|prompt is too long"
    r"|input is too long|too many (?:input )?tokens|exceeds? the (?:model's )?token limit",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(?i)\b(bearer\s+)\S+|\b(?:sk|pk|key)-[A-Za-z0-9_*.\-]{6,}|//[^/@\s]+@")

Redact = Callable[[str], str]


def redactor(secrets: Iterable[str]) -> Redact:
    """Return a function that takes these secrets, and what looks like one, out of a text."""
    known = sorted({secret for secret in secrets if len(secret) >= 8}, key=len, reverse=True)

    def redact(text: str) -> str:
        for secret in known:
            text = text.replace(secret, "[redacted]")
        return _SECRET.sub("[redacted]", text)

    return redact


def failure_of(error: Exception, model: str, redact: Redact) -> tuple[Failure, float | None]:
    """Return the failure that an error stands for, and the seconds the service asked to wait."""
    code, retryable = _meaning(error)
    reason = redact(f"{model}: {_words(error)}")[:REASON_CHARACTERS_MAX]
    failure = Failure(code=code, reason=reason, retryable=retryable, stage=Stage.PLANNING)
    return failure, _retry_after_s(error) if retryable else None


def _meaning(error: Exception) -> tuple[FailureCode, bool]:
    if isinstance(error, openai.APIStatusError):
        return _meaning_of_status(error)
    if isinstance(error, openai.APITimeoutError):
        return FailureCode.MODEL_TIMEOUT, True
    if isinstance(error, openai.APIConnectionError):
        return FailureCode.MODEL_ERROR, True
    if isinstance(error, openai.APIError):  # an error told within the stream
        if _is_overflow(error):
            return FailureCode.CONTEXT_OVERFLOW, False
        return FailureCode.MODEL_ERROR, _may_pass(error)
    broken_stream = isinstance(error, ValueError | RecursionError)
    return FailureCode.MODEL_ERROR, broken_stream


def _meaning_of_status(error: openai.APIStatusError) -> tuple[FailureCode, bool]:
    status = error.status_code
    if status == 413 or (status in _OVERFLOW_STATUS and _is_overflow(error)):
        return FailureCode.CONTEXT_OVERFLOW, False
    if status == 408:
        return FailureCode.MODEL_TIMEOUT, True
    return FailureCode.MODEL_ERROR, status in _RETRYABLE_STATUS or status >= 500


def _is_overflow(error: openai.APIError) -> bool:
    return error.code in _OVERFLOW_CODES or _OVERFLOW_TEXT.search(error.message) is not None


def _may_pass(error: openai.APIError) -> bool:
    """Tell whether an error within a stream may pass; gateways put the HTTP status into `code`."""
    code = error.code or ""
    if code.isdecimal() and 400 <= int(code[:6]) < 500:
        return int(code) in _RETRYABLE_STATUS
    return error.type != "invalid_request_error"


def _words(error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}: {error.message}"
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__
        return f"{error.message} ({type(cause).__name__})" if cause else error.message
    if isinstance(error, openai.APIError):
        return f"an error within the stream: {error.message}"
    if isinstance(error, UnicodeDecodeError):
        return "the stream is not UTF-8"
    if isinstance(error, ValueError | RecursionError):
        return "the stream holds something that is not JSON"
    return str(error)


def _retry_after_s(error: Exception) -> float | None:
    """Return Retry-After in seconds (RFC 9110 §10.2.3); a date counts from the answer's own."""
    if not isinstance(error, openai.APIStatusError):
        return None
    headers = error.response.headers
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None:
        return _bounded(seconds)
    return _seconds_until(text, headers.get("date"))


def _number(text: str | None) -> float | None:
    if text is None or not re.fullmatch(r"\s*\d{1,12}(?:\.\d{1,6})?\s*", text):
        return None
    return float(text)


def _seconds_until(text: str | None, now: str | None) -> float | None:
    if text is None or now is None:
        return None
    try:
        return _bounded((parsedate_to_datetime(text) - parsedate_to_datetime(now)).total_seconds())
    except (TypeError, ValueError):
        return None


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
