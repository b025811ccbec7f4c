"""What a process says when it ends: one table from runs and error codes to exit codes."""

from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import TypeVar, cast

import anyio

from perdure.protocol.errors import PerdureError
from perdure.protocol.runs import Run, waits_for_person
from perdure.protocol.states import RunState

T = TypeVar("T")


class ExitCode(IntEnum):
    """The exit codes of every command. They never change."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    WAITING_FOR_HUMAN = 3
    NOT_FOUND = 4
    CONFLICT = 5
    AUTH = 6
    UNREACHABLE = 7
    TIMED_OUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.RUN_FAILED: "the run failed, a check found something, or an unexpected error",
    ExitCode.USAGE: "the command, its input or a setting is wrong",
    ExitCode.WAITING_FOR_HUMAN: "the run waits for a person's answer; `drill --strict`: a tool lacks "
    "something",
    ExitCode.NOT_FOUND: "no such run, interrupt or agent",
    ExitCode.CONFLICT: "the object's state forbids it: answered otherwise, expired, key reused; or the "
    "database's schema is older than this release",
    ExitCode.AUTH: "not allowed",
    ExitCode.UNREACHABLE: "the database or server cannot be reached, or has no room",
    ExitCode.TIMED_OUT: "the time given by `--timeout` is over; the run goes on",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
    ExitCode.TERMINATED: "stopped by SIGTERM",
}

_OF_CODE: dict[str, ExitCode] = {
    "malformed": ExitCode.USAGE,
    "invalid": ExitCode.USAGE,
    "too_large": ExitCode.USAGE,
    "too_slow": ExitCode.UNREACHABLE,
    "unsupported_media": ExitCode.USAGE,
    "not_found": ExitCode.NOT_FOUND,
    "conflict": ExitCode.CONFLICT,
    "idempotency_mismatch": ExitCode.CONFLICT,
    "already_answered": ExitCode.CONFLICT,
    "thread_busy": ExitCode.CONFLICT,
    "history_reset": ExitCode.CONFLICT,
    "gone": ExitCode.CONFLICT,
    "unauthenticated": ExitCode.AUTH,
    "forbidden": ExitCode.AUTH,
    "unreadable": ExitCode.UNREACHABLE,
    "unavailable": ExitCode.UNREACHABLE,
    "store_full": ExitCode.UNREACHABLE,
    "quota_exceeded": ExitCode.UNREACHABLE,
}


def exit_of_error(error: PerdureError) -> ExitCode:
    """Return the exit code of an error; what the table does not know counts as a failure."""
    return _OF_CODE.get(error.code, ExitCode.RUN_FAILED)


def exit_of_run(run: Run) -> ExitCode:
    """Return the exit code of a run that was waited for; one that still goes on is timed out."""
    if run.state is RunState.SUCCEEDED:
        return ExitCode.OK
    if run.state is RunState.FAILED:
        return ExitCode.RUN_FAILED
    return ExitCode.WAITING_FOR_HUMAN if waits_for_person(run) else ExitCode.TIMED_OUT


def exit_of_signal(number: int) -> ExitCode:
    """Return the exit code of a process that a signal asked to end."""
    return ExitCode(128 + number)


def run_async(work: Callable[[], Awaitable[T]]) -> T:
    """Run a command's body on a loop of its own.

    An error that passed task groups comes out plain, so that there is one place to report it.
    """
    try:
        return anyio.run(work)
    except BaseExceptionGroup as group:
        raise sole_error(group) from group


def sole_error(error: BaseException) -> BaseException:
    """Return what a group of groups is about: Ctrl-C, else one of ours, else the first."""
    found = _leaves(error)
    for kind in (KeyboardInterrupt, PerdureError):
        for leaf in found:
            if isinstance(leaf, kind):
                return leaf
    return found[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf for part in inner for leaf in _leaves(part)]
