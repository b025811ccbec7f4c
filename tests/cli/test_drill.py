"""`perdure drill` as an operator types it, and what its exit code says (R-19.6)."""

import pytest

from perdure.ops.exits import ExitCode
from tests.cli.program import Program
from tests.cli.shop import REFERENCE


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_drill_says_by_its_exit_code_how_it_went(perdure: Program) -> None:
    """R-19.6: `--strict` is about tools; a database that is not there is not made."""
    assert perdure("drill").code == ExitCode.NOT_FOUND
    perdure("run", "echo", "--here", "--agents", REFERENCE, "--timeout", "15")
    assert perdure("drill", "no-such-scene").code == ExitCode.USAGE
    assert perdure("drill", "--tools", "queue-replay").code == ExitCode.USAGE
    done = perdure("drill", "duplicate-approval", "--json")
    assert (done.code, done.json["scenes"][0]["verdict"]) == (ExitCode.OK, "healed")
    assert [gap["tool"] for gap in done.json["gaps"]] == ["pay", "ship"]
    strict = perdure("drill", "--tools", "--strict")
    assert strict.code == ExitCode.WAITING_FOR_HUMAN
    assert "ship" in strict.out
    assert perdure("drill", "--clear").out == "0 threads of drills deleted\n"
