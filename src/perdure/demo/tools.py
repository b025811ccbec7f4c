"""The sales analyst's tools. Where they read and write comes from the run's context.

A planner, least of all a model, never names a file: `Place` is put into the run's context when
the run is created, so a worker in any process finds the same folders.
"""

import hashlib
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Self, cast

from pydantic import JsonValue

from perdure.demo import publish, sales
from perdure.demo.files import replace_file
from perdure.demo.report import CHART_NAME, render_report
from perdure.demo.sales import FallingProduct, QueryResult, Week
from perdure.protocol.runs import RunContext
from perdure.tools import Returned, ToolContext, ToolError, not_happened, succeeded, tool

REPORT_NAME = "report.md"
CONTEXT_KEY = "sales"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run of the analyst reads its CSV and keeps its files."""

    csv: Path
    database: Path
    reports: Path
    published: Path

    @classmethod
    def of(cls, context: RunContext) -> Self:
        """Return the place that a run's context names; raise ToolError when it names none."""
        extra = context.model_extra or {}
        named = cast("object", extra.get(CONTEXT_KEY))
        found = cast("dict[str, object]", named) if isinstance(named, dict) else {}
        if not all(isinstance(found.get(field), str) for field in _FIELDS):
            raise ToolError(f"the run's context lacks {CONTEXT_KEY}: {', '.join(_FIELDS)}")
        paths = [Path(str(found[field])) for field in _FIELDS]
        return cls(*paths)

    def as_context(self) -> RunContext:
        """Return the run context that names this place."""
        paths: dict[str, JsonValue] = {field: str(getattr(self, field)) for field in _FIELDS}
        return RunContext.model_validate({CONTEXT_KEY: paths})


_FIELDS = ("csv", "database", "reports", "published")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    lines: int
    stock_codes: int
    countries: int
    first_date: date
    last_date: date


@dataclass(frozen=True, slots=True)
class WeekSpan:
    """A week from Monday to Sunday."""

    monday: date
    sunday: date


@dataclass(frozen=True, slots=True)
class Written:
    """A report: its id, which publishing takes, and what it holds."""

    report: str
    artifacts: list[str]
    products: int


@tool(timeout_s=120)
def load_sales(context: ToolContext) -> Loaded:
    """Load the sales data into the analytical database. Do this first."""
    place = Place.of(context.run)
    with _told():
        summary = sales.open_sales(place.csv, place.database)
    return Loaded(
        summary.lines,
        summary.stock_codes,
        summary.countries,
        summary.first_date,
        summary.last_date,
    )


@tool
def sales_schema(context: ToolContext) -> str:
    """Describe the tables, units, dates and countries, for writing SQL."""
    with _told():
        return sales.schema_text(Place.of(context.run).database)


@tool(timeout_s=30)
def query_sales(context: ToolContext, sql: str) -> QueryResult:
    """Run one SELECT on the sales database, which cannot be changed.

    Args:
        sql: One SQLite SELECT statement; see sales_schema.
    """
    with _told():
        return sales.query(Place.of(context.run).database, sql)


@tool
def full_weeks(context: ToolContext) -> list[WeekSpan]:
    """List the weeks, Monday to Sunday, that the data covers fully, in order."""
    with _told():
        weeks = sales.full_weeks(Place.of(context.run).database)
    return [WeekSpan(week.monday, week.sunday) for week in weeks]


@tool(timeout_s=120)
def falling_products(
    context: ToolContext, region: str, before: date, after: date
) -> list[FallingProduct]:
    """Find the five products whose revenue in a region fell most between two weeks, by SQL.

    Args:
        region: A country exactly as written in the data.
        before: Monday of the earlier week.
        after: Monday of the later week.
    """
    with _told():
        return sales.falling_products(
            Place.of(context.run).database, region, Week(before), Week(after)
        )


@tool(timeout_s=120)
def write_report(context: ToolContext, region: str, before: date, after: date) -> Written:
    """Write the report on the falling products: Markdown with a table, and a chart.

    The figures are taken from the database again, so that nobody can alter them on the way.

    Args:
        region: A country exactly as written in the data.
        before: Monday of the earlier week.
        after: Monday of the later week.
    """
    place = Place.of(context.run)
    with _told():
        weeks = Week(before), Week(after)
        found = sales.falling_products(place.database, region, *weeks)
        report = render_report(region, *weeks, found)
    files = {REPORT_NAME: report.markdown.encode(), CHART_NAME: report.svg.encode()}
    name = _digest(files)
    folder = place.reports / name
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, data in files.items():
        replace_file(folder / file_name, data)
    context.artifact(REPORT_NAME, files[REPORT_NAME], "text/markdown")
    context.artifact(CHART_NAME, files[CHART_NAME], "image/svg+xml")
    return Written(name, list(files), len(found))


def _lookup_publication(effect_key: str, context: ToolContext) -> Returned:
    """Tell what became of an earlier execution."""
    found = publish.lookup(Place.of(context.run).published, effect_key)
    return not_happened() if found is None else _published(found)


@tool(
    side_effect="write",
    idempotent=True,
    timeout_s=60,
    compensation="delete the publication's folder; its path is the reference",
    risk="medium",
    lookup=_lookup_publication,
)
def publish_report(context: ToolContext, report: str, name: str) -> Returned:
    """Publish a report where everybody can read it.

    Args:
        report: Id of the report, as write_report returned it.
        name: Name of the publication.
    """
    place = Place.of(context.run)
    files = _read_report(place.reports, report)
    at = datetime.fromtimestamp(time.time(), UTC)
    with _told():
        return _published(publish.publish(place.published, context.effect_key, name, files, at=at))


def _published(publication: publish.Publication) -> Returned:
    return succeeded(
        {"reference": publication.reference, "name": publication.name},
        external_ref=publication.reference,
    )


def _read_report(reports: Path, name: str) -> dict[str, bytes]:
    """Return the files of a report, which are still those it was named after."""
    if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise ToolError("report is not an id that write_report returned")
    try:
        files = {file: (reports / name / file).read_bytes() for file in (REPORT_NAME, CHART_NAME)}
    except FileNotFoundError:
        raise ToolError("there is no such report") from None
    if _digest(files) != name:
        raise ToolError("the report was changed after it was written")
    return files


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


@contextmanager
def _told() -> Generator[None]:
    """Tell the planner what is wrong with data, arguments or SQL."""
    try:
        yield
    except ValueError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"{error.strerror}: {error.filename}") from error


TOOLS = (
    load_sales,
    sales_schema,
    query_sales,
    full_weeks,
    falling_products,
    write_report,
    publish_report,
)
