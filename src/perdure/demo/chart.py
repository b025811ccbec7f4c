"""Draws the two weeks of each product as bars in one SVG that needs nothing else.

The picture has a title and a description for screen readers, brings its own background and
follows the reader's preference for light or dark.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape

WIDTH = 720
BARS_LEFT = 16
BARS_WIDTH = 560
ROW_HEIGHT = 64
TOP = 72
LABEL_CHARS_MAX = 60

# What XML 1.0 has no way to write.
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_STYLE = """\
  <style>
    @media (prefers-color-scheme: dark) {
      .ground { fill: #0d1117 } .text { fill: #e6edf3 } .axis { stroke: #8b949e }
      .before { fill: #8b949e } .after { fill: #f0883e }
    }
  </style>"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One product: its label, and its revenue in pounds in the two weeks."""

    label: str
    before: Decimal
    after: Decimal


@dataclass(frozen=True, slots=True)
class _Scale:
    lowest: Decimal
    span: Decimal

    def x(self, value: Decimal) -> int:
        return BARS_LEFT + int((value - self.lowest) * BARS_WIDTH / self.span)


def draw_bars(title: str, description: str, *, names: tuple[str, str], bars: Sequence[Bar]) -> str:
    """Return an SVG with a pair of bars per product; `names` are those of the two weeks.

    Negative revenue goes to the left of the axis. All texts are escaped.
    """
    height = TOP + ROW_HEIGHT * max(len(bars), 1)
    scale = _scale(bars)
    rows = [_row(bar, TOP + ROW_HEIGHT * place, scale) for place, bar in enumerate(bars)]
    if not rows:
        rows = [_text(BARS_LEFT, TOP + 20, "No product fell.")]
    parts = [
        _opening(height),
        f'  <title id="title">{_escaped(title)}</title>',
        f'  <desc id="description">{_escaped(description)}</desc>',
        _STYLE,
        f'  <rect class="ground" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(BARS_LEFT, 28, title, size=16),
        *_legend(names),
        *rows,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _opening(height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title description" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )


def _scale(bars: Sequence[Bar]) -> _Scale:
    values = [Decimal(0), *(value for bar in bars for value in (bar.before, bar.after))]
    span = max(values) - min(values)
    return _Scale(lowest=min(values), span=span or Decimal(1))


def _row(bar: Bar, top: int, scale: _Scale) -> str:
    label = bar.label
    if len(label) > LABEL_CHARS_MAX:
        label = label[: LABEL_CHARS_MAX - 1] + "…"
    return "\n".join(
        [
            _text(BARS_LEFT, top + 16, label),
            *_bar("before", bar.before, "#6e7781", top + 22, scale),
            *_bar("after", bar.after, "#bc4c00", top + 38, scale),
            f'  <path class="axis" d="M{scale.x(Decimal(0))} {top + 20}v34" stroke="#57606a"/>',
        ]
    )


def _bar(name: str, value: Decimal, fill: str, top: int, scale: _Scale) -> list[str]:
    ends = sorted((scale.x(Decimal(0)), scale.x(value)))
    place = f'x="{ends[0]}" y="{top}" width="{ends[1] - ends[0]}" height="14"'
    return [
        f'  <rect class="{name}" {place} fill="{fill}"/>',
        _text(ends[1] + 6, top + 12, f"{value:,.2f}"),
    ]


def _legend(names: tuple[str, str]) -> list[str]:
    before, after = names
    return [
        f'  <rect class="before" x="{BARS_LEFT}" y="44" width="12" height="12" fill="#6e7781"/>',
        _text(BARS_LEFT + 18, 55, before),
        f'  <rect class="after" x="{WIDTH // 2}" y="44" width="12" height="12" fill="#bc4c00"/>',
        _text(WIDTH // 2 + 18, 55, after),
    ]


def _text(x: int, y: int, text: str, *, size: int = 13) -> str:
    return (
        f'  <text class="text" x="{x}" y="{y}" font-size="{size}" fill="#1f2328">'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return escape(_UNWRITABLE.sub(" ", text))
