"""Writes the report on falling products: the same findings always give the same bytes.

Texts from the data are escaped, so a description can neither break the table nor add markup.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from perdure.demo.chart import Bar, draw_bars
from perdure.demo.sales import FallingProduct, Week

CHART_NAME = "chart.svg"

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_DASH = "\u2013"
_MARKUP = re.compile(r"([\\`*_\[\]<>|~])")


@dataclass(frozen=True, slots=True)
class Report:
    """A Markdown text, and the SVG that it shows under the name CHART_NAME."""

    markdown: str
    svg: str


def render_report(
    region: str, before: Week, after: Week, products: Sequence[FallingProduct]
) -> Report:
    """Return the report on the products of a region whose revenue fell between two weeks.

    Money is in pounds with two decimals and thousands separators; a fall has a minus sign.
    """
    title = f"Falling products: {region}"
    return Report(
        markdown=_markdown(title, before, after, products),
        svg=draw_bars(
            title,
            _in_words(products),
            names=(week_text(before), week_text(after)),
            bars=[_bar(product) for product in products],
        ),
    )


def week_text(week: Week) -> str:
    """Return the days of a week in words, such as 14 to 20 November 2011 with a dash."""
    first, last = week.monday, week.sunday
    end = f"{last.day} {_MONTHS[last.month - 1]} {last.year}"
    if first.month == last.month:
        return f"{first.day}{_DASH}{end}"
    year = "" if first.year == last.year else f" {first.year}"
    return f"{first.day} {_MONTHS[first.month - 1]}{year} {_DASH} {end}"


def _markdown(title: str, before: Week, after: Week, products: Sequence[FallingProduct]) -> str:
    weeks = f"{week_text(before)} compared with {week_text(after)}"
    lines = [
        f"# {_cell(title)}",
        "",
        f"Revenue in pounds (GBP): the week of {weeks}. Cancellations are included.",
        "",
        *(_table(products) if products else ["No product's revenue fell."]),
        "",
        f"![Revenue of the falling products in both weeks]({CHART_NAME})",
    ]
    return "\n".join(lines) + "\n"


def _table(products: Sequence[FallingProduct]) -> list[str]:
    rows = [
        f"| {place} | {_cell(product.stock_code)} | {_cell(product.description)} "
        f"| {_money(product.before)} | {_money(product.after)} | {_money(product.change)} |"
        for place, product in enumerate(products, start=1)
    ]
    before = sum(Decimal(product.before) for product in products)
    after = sum(Decimal(product.after) for product in products)
    total = f"{before:,.2f} before, {after:,.2f} after, change {after - before:,.2f}"
    return [
        "| # | Stock code | Description | Before | After | Change |",
        "|--:|:-----------|:------------|-------:|------:|-------:|",
        *rows,
        "",
        f"Total of these {len(products)}: {total}.",
    ]


def _in_words(products: Sequence[FallingProduct]) -> str:
    if not products:
        return "No product's revenue fell."
    parts = [
        f"{_label(product)} from {_money(product.before)} to {_money(product.after)}"
        for product in products
    ]
    return f"Revenue in pounds: {'; '.join(parts)}."


def _bar(product: FallingProduct) -> Bar:
    return Bar(_label(product), Decimal(product.before), Decimal(product.after))


def _label(product: FallingProduct) -> str:
    return f"{product.stock_code} {product.description}".rstrip()


def _money(pounds: str) -> str:
    return f"{Decimal(pounds):,.2f}"


def _cell(text: str) -> str:
    """Return a text for one line of Markdown; spaces at its ends stay visible."""
    one_line = re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]", " ", text)
    escaped = _MARKUP.sub(r"\\\1", one_line)
    return re.sub(r"^ +| +$", lambda spaces: "&nbsp;" * len(spaces.group()), escaped)
