"""What a function draws, and from which run."""

from datetime import UTC, datetime

import pytest

from perdure.agents.code.live import LiveFunction, Recorded
from perdure.engine.context import Entry
from perdure.protocol.values import Value


async def _nothing() -> None:
    """Do nothing."""


def _live(*owners: str) -> LiveFunction:
    """Return a function whose journal holds an operation of each of these runs; "": of its own."""
    journal = {
        str(place): Recorded(
            entry=Entry(
                position=str(place),
                kind="value",
                name="",
                digest="",
                done=True,
                value=Value(),
                run_id=owner,
            ),
            value=None,
        )
        for place, owner in enumerate(owners)
    }
    return LiveFunction(
        start=_nothing, run_id="run_own", journal=journal, now=datetime(2026, 1, 2, tzinfo=UTC)
    )


def test_a_draw_goes_through_the_journal_only_where_a_part_of_it_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R-4.6: a thousand draws over a thousand operations took seconds, on the loop of all code."""
    shared = _live("run_origin", "run_origin", "")
    assert [shared.first_past(place) for place in ("0", "1", "2")] == [
        "run_origin",
        "run_own",
        "run_own",
    ]
    monkeypatch.delattr("perdure.agents.code.live.is_past")
    assert _live("", "").first_past("0") == "run_own"
