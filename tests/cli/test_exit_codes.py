"""Errors are one line on stderr and an exit code that scripts can rely on."""

import pytest

from perdure.agents.catalog import AgentRegistry
from perdure.ops.exits import ExitCode, exit_of_error, run_async
from perdure.protocol import errors
from perdure.protocol.errors import NotFound, PerdureError
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

RUN_ID = "run_" + "0" * 32
empty = AgentRegistry()
INTERRUPT_ID = "int_" + "0" * 32


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "show", RUN_ID),
        ("runs", "show", "nonsense"),
        ("runs", "events", RUN_ID),
        ("runs", "events", RUN_ID, "--follow"),
        ("runs", "cancel", RUN_ID),
        ("interrupts", "resolve", INTERRUPT_ID, "--approve"),
        ("interrupts", "list", "--run", RUN_ID),
        ("run", "nobody"),
    ],
)
def test_what_is_not_there_is_4(perdure: Program, words: tuple[str, ...]) -> None:
    perdure("db", "upgrade")
    done = perdure(*words)
    assert (done.code, done.out) == (ExitCode.NOT_FOUND, "")
    assert done.err.startswith("error: not_found: ")
    assert "no database" not in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [("runs", "list"), ("agents", "list"), ("verify",), ("run", "echo"), ("db", "status")],
)
def test_looking_at_a_database_that_is_not_there_makes_none(
    perdure: Program, words: tuple[str, ...]
) -> None:
    done = perdure(*words, "--db", "sqlite:///missing/no.db")
    assert done.code == (ExitCode.RUN_FAILED if "status" in words else ExitCode.NOT_FOUND)
    assert not (perdure.folder / "missing").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "echo", "--priority", "1000"), "--priority: must be at most 100"),
        (("run", "echo", "--options", '{"nonsense": 1}'), "--options at /nonsense: there is no"),
        (("run", "echo", "--timeout", "3"), "--timeout needs --wait"),
        (("threads", "list", "--limit", "0"), "Invalid value for '--limit'"),
        (("runs", "list", "--nonsense"), "No such option: --nonsense"),
        (("runs", "cancel-many", "--nonsens", "x"), "perdure runs cancel-many --help"),
        (("runs", "repair", RUN_ID, "--return"), "--return and --fail need a --reason"),
        (("runs", "callback", "tc", "--output", "1", "--ref", "x" * 1001), "--ref: must have"),
        (("topics", "subscribe", "t", "t", "a", "--version", "x" * 51), "--version: must have"),
        (("threads", "fork", "t", "--position", "-1"), "--position: must be"),
        (("threads", "fork", "t", "--title", "x" * 501), "--title: must have"),
        (("interrupts", "delegate", INTERRUPT_ID, "--to", ""), "--to at /0: must have"),
        (("runs", "events", RUN_ID, "--json", "--jsonl"), "at most one of --json, --jsonl"),
        (("worker", "--queue", "A B"), "setting worker.queues.0 (flag)"),
        (("runs", "list", "--state", "waiting"), "'--state': 'waiting' is not one of"),
        (("runs", "cancel-many"), "name which runs to cancel, or say `all` (--all)"),
    ],
)
def test_what_is_wrong_is_named_by_its_option(
    perdure: Program, words: tuple[str, ...], says: str
) -> None:
    perdure("db", "upgrade")
    done = perdure(*words)
    assert done.code == ExitCode.USAGE
    assert says in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_a_field_of_a_refused_request_is_named_by_its_option(perdure: Program) -> None:
    perdure("run", "asks", "--here", "--agents", REFERENCE)
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    done = perdure("interrupts", "resolve", asked["interrupt_id"], "--edit", "{}")
    assert done.code == ExitCode.USAGE
    assert "/" not in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("runs", "nonsense"),
        ("runs", "list", "--nonsense"),
        ("runs", "list", "--limit", "0"),
        ("interrupts", "resolve", INTERRUPT_ID),
        ("interrupts", "resolve", INTERRUPT_ID, "--approve", "--reject"),
        ("interrupts", "resolve", INTERRUPT_ID, "--edit", "{"),
        ("run", "echo", "--input", "not json"),
        ("run", "echo", "--input", "@nothing.json"),
        ("run", "echo", "--options", '{"max_steps": 0}'),
        ("runs", "events", RUN_ID, "--json", "--follow"),
        ("run", "echo", "--here", "--agents", "nothing"),
        ("run", "echo", "--agents", REFERENCE),
        ("worker",),
        ("worker", "--agents", "tests.cli.test_exit_codes:empty"),
        ("runs", "list", "--db", "mysql://x"),
        ("runs", "list", "--db", ""),
        ("config", "show", "--db", ""),
        ("verify", "--db", ""),
        ("runs", "list", "--after", "x"),
        ("runs", "list", "--after", "thr_" + "0" * 32),
        ("runs", "list", "--after", RUN_ID[:-1]),
        ("runs", "artifacts", RUN_ID, "--after", RUN_ID),
        ("threads", "list", "--after", "x"),
        ("threads", "branches", "thr_" + "0" * 32, "--after", RUN_ID),
        ("threads", "state", "thr_" + "0" * 32, "--after", "1"),
        ("interrupts", "list", "--after", "zzz"),
        ("demo", "--data", "nothing.csv"),
    ],
)
def test_a_wrong_command_line_is_2(perdure: Program, words: tuple[str, ...]) -> None:
    if words[0] in {"runs", "threads", "interrupts", "verify"}:
        perdure("db", "upgrade")
    done = perdure(*words)
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert "Traceback" not in done.err


def test_lists_that_hold_nothing_say_so(perdure: Program) -> None:
    perdure("db", "upgrade")
    for command in ("runs", "threads", "interrupts", "agents"):
        done = perdure(command, "list")
        assert (done.code, done.out, done.err) == (0, "", "nothing found\n")


def test_a_database_that_cannot_be_reached_is_7(perdure: Program) -> None:
    (perdure.folder / "file").write_text("")
    done = perdure("runs", "list", "--db", "sqlite:///file/perdure.db")
    assert done.code == ExitCode.UNREACHABLE
    assert done.err.startswith("error: unavailable: ")


def test_a_file_that_is_no_database_is_7(perdure: Program) -> None:
    (perdure.folder / "file").write_text("not a database" * 100)
    done = perdure("runs", "list", "--db", "sqlite:///file")
    assert done.code == ExitCode.UNREACHABLE
    assert "the file is not an SQLite database: name another one with --db" in done.err
    assert done.err.count("\n") == 1


def test_an_address_for_all_is_refused_before_anything_is_made(perdure: Program) -> None:
    done = perdure("serve", "--host", "0.0.0.0", "--agents", REFERENCE)  # noqa: S104  # refused
    assert (done.code, done.err.count("\n")) == (ExitCode.USAGE, 1)
    assert "refusing to listen on 0.0.0.0" in done.err
    assert not (perdure.folder / ".perdure").exists()


def test_ctrl_c_among_other_errors_is_what_ended_a_command() -> None:
    """R-19.9: pressed twice it may meet what the first one began to take down."""
    errors_of_tasks = BaseExceptionGroup(
        "", [NotFound("x"), BaseExceptionGroup("", [KeyboardInterrupt()])]
    )

    async def work() -> None:
        raise errors_of_tasks

    with pytest.raises(KeyboardInterrupt):
        run_async(work)


def test_every_error_of_the_tree_has_an_exit_code() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PerdureError) and kind is not PerdureError
    ]
    assert kinds
    for kind in kinds:
        assert exit_of_error(kind("")) is not ExitCode.RUN_FAILED, kind
    assert exit_of_error(PerdureError("")) is ExitCode.RUN_FAILED
