"""The report: its table, its figures and its chart, whatever the texts contain."""

from datetime import date
from xml.etree import ElementTree

import pytest

from perdure.demo.report import CHART_NAME, render_report, week_text
from perdure.demo.sales import FallingProduct, Week
from tests.demo.shop import AFTER, BEFORE

SVG = "{http://www.w3.org/2000/svg}"
PRODUCTS = [
    FallingProduct("22086", "PAPER CHAIN", "9449.75", "5606.76", "-3842.99"),
    FallingProduct("POST", "POSTAGE", "5.50", "-1234.50", "-1240.00"),
]


def chart_of(products: list[FallingProduct]) -> ElementTree.Element:
    return ElementTree.fromstring(render_report("Germany", BEFORE, AFTER, products).svg)  # noqa: S314  # made by us


def bars_of(chart: ElementTree.Element, name: str) -> list[tuple[int, int]]:
    """Return x and width of the bars of one week; the first is the legend's."""
    bars = [bar for bar in chart.iter(f"{SVG}rect") if bar.get("class") == name]
    return [(int(bar.get("x", "")), int(bar.get("width", ""))) for bar in bars[1:]]


def test_the_table_has_a_row_per_product_with_its_figures() -> None:
    lines = render_report("Germany", BEFORE, AFTER, PRODUCTS).markdown.splitlines()
    assert lines[0] == "# Falling products: Germany"
    assert "| 1 | 22086 | PAPER CHAIN | 9,449.75 | 5,606.76 | -3,842.99 |" in lines
    assert "| 2 | POST | POSTAGE | 5.50 | -1,234.50 | -1,240.00 |" in lines
    assert "Total of these 2: 9,455.25 before, 4,372.26 after, change -5,082.99." in lines


def test_money_is_aligned_to_the_right() -> None:
    markdown = render_report("Germany", BEFORE, AFTER, PRODUCTS).markdown
    rule = next(line for line in markdown.splitlines() if line.startswith("|--"))
    assert [column.endswith("-:") for column in rule.strip("|").split("|")][-3:] == [True] * 3


def test_the_report_names_both_weeks_and_shows_the_chart() -> None:
    markdown = render_report("Germany", BEFORE, AFTER, PRODUCTS).markdown
    assert "14\u201320 November 2011 compared with 21\u201327 November 2011" in markdown
    assert f"]({CHART_NAME})" in markdown


def test_a_report_without_products_says_so() -> None:
    report = render_report("Germany", BEFORE, AFTER, [])
    assert "No product's revenue fell." in report.markdown
    assert "|" not in report.markdown
    assert "No product fell." in report.svg


def test_the_same_findings_give_the_same_report() -> None:
    first, second = (render_report("Germany", BEFORE, AFTER, PRODUCTS) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("A|B", r"A\|B"),
        ("A\\|B", r"A\\\|B"),
        ("A\r\nB", "A  B"),
        ("<img src=x>", r"\<img src=x\>"),
        ("![a](b)", r"!\[a\](b)"),
        ("*a* _b_ `c`", r"\*a\* \_b\_ \`c\`"),
    ],
)
def test_texts_cannot_leave_their_cell(text: str, cell: str) -> None:
    product = FallingProduct("A", text, "2.00", "1.00", "-1.00")
    lines = render_report("Germany", BEFORE, AFTER, [product]).markdown.splitlines()
    assert f"| 1 | A | {cell} | 2.00 | 1.00 | -1.00 |" in lines


def test_spaces_at_the_ends_of_a_code_stay_visible() -> None:
    product = FallingProduct(" A ", "X", "2.00", "1.00", "-1.00")
    assert "| &nbsp;A&nbsp; |" in render_report("Germany", BEFORE, AFTER, [product]).markdown


def test_a_region_cannot_add_markup_to_the_title() -> None:
    report = render_report("<b>\n# x", BEFORE, AFTER, PRODUCTS)
    assert report.markdown.startswith("# Falling products: \\<b\\> # x\n")
    assert "<b>" not in report.svg


def test_the_chart_has_a_title_and_a_description_for_screen_readers() -> None:
    chart = chart_of(PRODUCTS)
    title, description = chart.find(f"{SVG}title"), chart.find(f"{SVG}desc")
    assert title is not None
    assert title.text == "Falling products: Germany"
    assert description is not None
    assert "22086 PAPER CHAIN from 9,449.75 to 5,606.76" in (description.text or "")
    assert chart.get("role") == "img"
    assert chart.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


def test_the_bars_are_as_long_as_the_revenue() -> None:
    chart = chart_of([FallingProduct("A", "X", "100.00", "25.00", "-75.00")])
    ((_, before),) = bars_of(chart, "before")
    ((_, after),) = bars_of(chart, "after")
    assert after * 4 == before


def test_negative_revenue_is_drawn_to_the_left_of_the_axis() -> None:
    chart = chart_of([FallingProduct("A", "X", "50.00", "-50.00", "-100.00")])
    ((before_x, before_width),) = bars_of(chart, "before")
    ((after_x, after_width),) = bars_of(chart, "after")
    assert after_x + after_width == before_x
    assert before_width == after_width > 0


def test_the_chart_is_well_formed_whatever_the_description_has() -> None:
    product = FallingProduct('<&">', "\x00\x1b]]>&amp;", "0.00", "-0.01", "-0.01")
    texts = [text.text for text in chart_of([product]).iter(f"{SVG}text")]
    assert '<&">   ]]>&amp;' in texts


def test_the_chart_follows_light_and_dark() -> None:
    svg = render_report("Germany", BEFORE, AFTER, PRODUCTS).svg
    assert "prefers-color-scheme: dark" in svg
    assert 'class="ground"' in svg


@pytest.mark.parametrize(
    ("monday", "words"),
    [
        (date(2011, 11, 14), "14\u201320 November 2011"),
        (date(2011, 11, 28), "28 November \u2013 4 December 2011"),
        (date(2011, 12, 26), "26 December 2011 \u2013 1 January 2012"),
    ],
)
def test_a_week_is_named_by_its_days(monday: date, words: str) -> None:
    assert week_text(Week(monday)) == words
