"""Draws charts as SVG inside of HTML.

The SVG holds lines only and is stretched to the width of the page; all text is HTML beside it, so
that it has a readable size on a phone too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from helios.core.text import number_text
from helios.ledger.summary.document import Chart, Sample, Spread

_WIDTH, _HEIGHT = 1_000.0, 300.0
_DECADES = 2.0
_MANY_DOTS = 150


def draw_chart(chart: Chart) -> str:
    """Return the HTML of a chart."""
    scale = _Scale(_values(chart))
    first, last = chart.span
    width = max(last - first, 1.0)

    def across(place: float) -> float:
        return (place - first) / width * _WIDTH

    parts = [_grid(scale)]
    for place, was_killed in chart.marks:
        kind = "killed" if was_killed else "resumed"
        x = _round(across(place))
        parts.append(f'<path class="{kind}" d="M{x} 0V{_HEIGHT:g}"/>')
    band = [(across(place), low, high) for place, low, high in chart.line.band]
    if band:
        there = [f"{_round(x)} {scale.down(high)}" for x, _, high in band]
        back = [f"{_round(x)} {scale.down(low)}" for x, low, _ in reversed(band)]
        parts.append(f'<path class="band" d="M{"L".join(there + back)}Z"/>')
    points = [f"{_round(across(x))} {scale.down(y)}" for x, y in chart.line.points]
    if points:
        parts.append(f'<path class="line" d="M{"L".join(points)}"/>')
    if points and (chart.line.has_dots or len(points) == 1) and len(points) <= _MANY_DOTS:
        # A line of length zero with round ends is a dot that is not stretched.
        dots = "".join(f"M{point}h0" for point in points)
        parts.append(f'<path class="dots" d="{dots}"/>')
    return _frame(chart, scale, "".join(parts))


def _values(chart: Chart) -> list[float]:
    return [
        *(y for _, y in chart.line.points),
        *(y for _, low, high in chart.line.band for y in (low, high)),
    ]


def _frame(chart: Chart, scale: _Scale, content: str) -> str:
    title, note = html.escape(chart.title), html.escape(chart.note)
    first, last = chart.span
    middle = (first + last) / 2
    labels = "".join(
        f'<span style="top:{100 * scale.down(tick) / _HEIGHT:.1f}%">{tick:.6g}</span>'
        for tick in scale.ticks
    )
    kind = " (logarithmic)" if scale.is_logarithmic else ""
    places = "".join(f"<span>{place:,.0f}</span>" for place in (first, middle, last))
    return (
        f"<figure><figcaption>{title}<small>{kind}</small></figcaption>"
        f'<div class="plot"><div class="ticks">{labels}</div>'
        f'<svg role="img" aria-label="{title}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'preserveAspectRatio="none">{content}</svg>'
        f'<div class="places">{places}</div></div>'
        + (f'<p class="note">{note}</p>' if note else "")
        + "</figure>"
    )


def _grid(scale: _Scale) -> str:
    lines = "".join(f"M0 {scale.down(tick)}H{_WIDTH:g}" for tick in scale.ticks)
    return f'<path class="grid" d="{lines}"/>'


def _round(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


class _Scale:
    """Heights of values; logarithmic if all are positive and far apart."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.is_logarithmic = low > 0 and math.log10(high) - math.log10(low) >= _DECADES
        self._low, self._high = self._place(low), self._place(high)
        if self._high - self._low <= 1e-12 * max(1e-300, abs(self._low)):
            margin = abs(self._low) / 10 or 1.0
            self._low, self._high = self._low - margin, self._high + margin
        self.ticks = self._find_ticks()

    def _place(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value

    def down(self, value: float) -> float:
        """Return the distance from the upper edge; a part of the height is margin."""
        # Halves first: the difference of two large numbers may be infinite.
        share = (self._place(value) / 2 - self._low / 2) / (self._high / 2 - self._low / 2)
        return round(_HEIGHT * (0.96 - 0.92 * share), 1)

    def _find_ticks(self) -> list[float]:
        if self.is_logarithmic:
            first, last = math.ceil(self._low), math.floor(self._high)
            step = max(1, math.ceil((last - first) / 4))
            return [10.0**power for power in range(first, last + 1, step)]
        return _round_numbers(self._low, self._high)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return two to five round numbers between two bounds."""
    rough = high / 5 - low / 5
    if not 0 < rough < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * power for factor in (1, 2, 5, 10) if factor * power >= rough]
    step = steps[0] if steps else rough
    first = math.ceil(low / step)
    found = [(first + number) * step for number in range(6)]
    return [tick for tick in found if low <= tick <= high] or [low]


def draw_spread(spread: Spread) -> str:
    """Return the HTML of a picture of groups: a row each, with runs, mean and interval."""
    numbers = [
        number
        for sample in spread.samples
        for number in (*sample.numbers, *(sample.interval or ()))
    ]
    scale = _Scale(numbers)
    rows = "".join(_draw_sample(sample, scale) for sample in spread.samples)
    title = html.escape(spread.title)
    ends = f"<span>{number_text(min(numbers))}</span><span>{number_text(max(numbers))}</span>"
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<div class="rows">{rows}<span></span><div class="places">{ends}</div></div></figure>'
    )


def _draw_sample(sample: Sample, scale: _Scale) -> str:
    def across(value: float) -> str:
        return _round(_WIDTH * (1 - scale.down(value) / _HEIGHT))

    parts = []
    if sample.interval is not None:
        low, high = sample.interval
        parts.append(f'<path class="interval" d="M{across(low)} 20H{across(high)}"/>')
    dots = "".join(f"M{across(number)} 20h0" for number in sample.numbers)
    parts.append(f'<path class="dots" d="{dots}"/>')
    parts.append(f'<path class="mean" d="M{across(sample.mean)} 4V36"/>')
    name = html.escape(sample.name)
    return (
        f'<span class="group">{name}</span><svg role="img" aria-label="{name}" '
        f'viewBox="0 0 {_WIDTH:g} 40" preserveAspectRatio="none">{"".join(parts)}</svg>'
    )
