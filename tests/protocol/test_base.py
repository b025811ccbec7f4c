"""Times as they are written, and read again."""

from datetime import UTC, datetime

import pytest

from perdure.protocol.base import format_time
from perdure.protocol.runs import RunOptions


@pytest.mark.parametrize("year", [1, 999, 2026, 9999])
def test_a_time_of_any_year_is_read_as_it_was_written(year: int) -> None:
    """F36: four digits, also of years that have fewer."""
    at = datetime(year, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert format_time(at) == f"{year:04}-02-03T04:05:06.000007Z"
    options = RunOptions(after=at)
    assert RunOptions.model_validate_json(options.model_dump_json()) == options
