"""A document is Markdown with pictures: what both consist of, and how they are written.

Pictures are sentences in the Markdown file, and SVG in the HTML file, which needs nothing else: no
script, font or picture. The SVG of a chart holds lines only and is stretched to the width of the
page; all text is HTML beside it, so that it has a readable size on a phone too.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from helios.text import number_text
from helios.version import __version__

MOST_ROWS = 200
"""The most rows of a table."""
MOST_CHARACTERS = 600
"""The most characters of a text that a run has written."""
NO_HEAD = ("", "")
"""The heading of a table of names with values."""
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
_ESCAPED = re.compile(r"\\([\\`*_\[\]<>|#~$])")


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        points: place and value of each point, in the order of places.
        band: place, least and largest value; empty for a line without a band.
        name: the run that it belongs to, where there are several; may be empty.
        ends: the first and the last number, which the points may have merged with others; ``None``
            without any.
    """

    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    name: str = ""
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """A chart over iterations.

    Attributes:
        title: what it shows.
        lines: the numbers.
        span: the first and the last iteration.
        marks: iterations after which the run was started again, and whether it was killed before.
        note: a sentence below it; may be empty.
    """

    title: str
    lines: Sequence[Line]
    span: tuple[float, float]
    marks: Sequence[tuple[int, bool]] = ()
    note: str = ""


Block = str | Chart
"""Markdown without empty lines, or a picture."""


@dataclass
class Chapter:
    """A heading with blocks below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    """A title with sections.

    Attributes:
        title: the heading.
        kind: what kind of document it is, in a few words.
        sections: in their order.
    """

    title: str
    kind: str
    sections: list[Chapter] = field(default_factory=list)


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text without what is too much of it."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more)"


def shorten_rows(
    rows: Sequence[tuple[str, str]], most: int = MOST_CHARACTERS
) -> list[tuple[str, str]]:
    """Return the first rows, with texts that are not too long."""
    return [(name, shorten(value, most)) for name, value in rows[:MOST_ROWS]]


def write_markdown(document: Document) -> str:
    """Return the text of the Markdown file; as :func:`write_page`."""
    parts = [f"# {write_text(document.title)}", write_text(document.kind)]
    for section in document.sections:
        parts.append(f"## {write_text(section.title)}")
        parts += map(_write_block, section.blocks)
    # Names of files may hold bytes that are no text.
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace").decode()


def _write_block(block: Block) -> str:
    return block if isinstance(block, str) else _describe_chart(block)


def write_text(text: str) -> str:
    """Return a text as Markdown, in which nothing of it is markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def read_text(markdown: str) -> str:
    """Return the text of which :func:`write_text` made Markdown.

    Example:
        >>> read_text(write_text("a_b <c>"))
        'a_b <c>'
    """
    return _ESCAPED.sub(r"\1", markdown)


def write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; with :data:`NO_HEAD`, one of names with values."""
    rule = _write_row(["---"] * len(head))
    return "\n".join([_write_cells(head), rule, *map(_write_cells, rows)])


def _write_cells(cells: Sequence[str]) -> str:
    return _write_row(list(map(write_text, cells)))


def _write_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read_table(markdown: str) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of what :func:`write_table` has written."""
    head, _, *rows = (
        list(map(read_text, line[2:-2].split(" | "))) for line in markdown.splitlines()
    )
    return head, rows


def _describe_chart(block: Chart) -> str:
    text = "; ".join(map(_describe_line, block.lines))
    return f"{write_text(block.title)}: {text}. {write_text(block.note)}".rstrip()


def _describe_line(line: Line) -> str:
    name = f"{write_text(line.name)} " if line.name else ""
    if not line.points:
        return f"{name}no numbers"
    values = [y for _, low, high in line.band for y in (low, high)] or [y for _, y in line.points]
    ends = "" if line.ends is None else "from {} to {}, ".format(*map(number_text, line.ends))
    return f"{name}{ends}between {number_text(min(values))} and {number_text(max(values))}"


# Nothing can be loaded, even if a text of the run should look like a link or a script.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1c2024;--soft:#5b6470;--rule:#dfe3e8;
--tint:#f5f7f9;--line:#1f5fbf;--band:#1f5fbf33;--killed:#c2362b;--resumed:#8a6d00;--good:#1d7a3e}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--text:#e3e7eb;--soft:#9aa4af;--rule:#2f363d;
--tint:#1c2126;--line:#7db1ff;--band:#7db1ff38;--killed:#ff8379;--resumed:#e0bd4a;--good:#69cf8f}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:58rem;background:var(--page);
color:var(--text);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
header{border-bottom:1px solid var(--rule);padding-bottom:1rem}
h1{font-size:1.75rem;line-height:1.2;margin:.2rem 0}
h2{font-size:1.25rem;line-height:1.3;margin:2.75rem 0 .75rem}
h3{font-size:1rem;margin:1.5rem 0 .4rem}
p{margin:.6rem 0;max-width:44rem}
.kind,.note,footer,nav,small{color:var(--soft);font-size:.875rem}
nav{margin-top:.75rem}nav a{color:inherit;margin-right:1rem;display:inline-block}
.wide{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.45;
font-variant-numeric:tabular-nums;overflow-wrap:normal}
table.facts{font-size:1rem}table.facts td:first-child{color:var(--soft);width:15rem}
table.facts td{overflow-wrap:anywhere;max-width:none}
th,td{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;
border-bottom:1px solid var(--rule);max-width:26rem}
td{overflow-wrap:break-word}td:first-child{white-space:nowrap}th{color:var(--soft);font-weight:600;white-space:nowrap}
figure{margin:1.25rem 0 1.75rem}
figcaption{font-weight:600;margin-bottom:.35rem}figcaption small{font-weight:400}
.plot{display:grid;grid-template-columns:4.5rem 1fr;column-gap:.5rem}
.ticks{position:relative}
.ticks span{position:absolute;right:0;transform:translateY(-50%);font-size:.75rem;
color:var(--soft);font-variant-numeric:tabular-nums}
svg{display:block;overflow:visible;width:100%;height:12.5rem;background:var(--tint);border-radius:4px}
.places{grid-column:2;display:flex;justify-content:space-between;font-size:.75rem;
color:var(--soft);margin-top:.25rem;font-variant-numeric:tabular-nums}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--rule)}.line{stroke:var(--own);stroke-width:1.75;stroke-linejoin:round}
.band{fill:var(--band)}
.dots{stroke:var(--own,var(--line));stroke-width:6;stroke-linecap:round}
.l0{--own:var(--line)}.l1{--own:var(--killed)}.l2{--own:var(--good)}.l3{--own:var(--resumed)}
.l4{--own:#9a5bd0}.l5{--own:#0f8f98}.l6{--own:#d0579a}.l7{--own:#7d8793}
.line.dashed{stroke-dasharray:6 4}
ul.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.4rem 0 0;padding:0;
font-size:.8125rem}
ul.legend li::before{content:"";display:inline-block;width:1.4rem;border-top:3px solid var(--own);
margin-right:.4rem;vertical-align:middle}
ul.legend li.dashed::before{border-top-style:dashed}
.killed,.resumed{stroke-width:1.5;stroke-dasharray:5 4}
.killed{stroke:var(--killed)}.resumed{stroke:var(--resumed)}
footer{margin-top:3rem;border-top:1px solid var(--rule);padding-top:.75rem}
@media(max-width:36rem){body{padding:1.25rem .9rem 3rem}h1{font-size:1.4rem}
table.facts td{display:block;border:0;padding:0}table.facts td:first-child{width:auto;
padding-top:.45rem;font-size:.875rem}.plot{grid-template-columns:3.4rem 1fr}
svg{height:10rem}}
@media print{body{max-width:none}section{break-inside:auto}figure{break-inside:avoid}}
"""


MOST_BYTES = 2_000_000
"""The largest size of a page with charts."""
_POINTS = (800, 400, 200, 100, 50, 0)


def write_fitting(make: Callable[[int], Document]) -> tuple[Document, str]:
    """Return a document and its HTML file, with as many points in its lines as fit.

    Args:
        make: returns the document with at most so many points in each line.
    """
    for points in _POINTS:
        document = make(points)
        page = write_page(document)
        if len(page.encode()) <= MOST_BYTES:
            break
    return document, page


def write_page(document: Document) -> str:
    """Return the text of the HTML file; bytes of names that are no text become question marks."""
    title = html.escape(document.title)
    links = "".join(
        f'<a href="#s{number}">{html.escape(section.title)}</a>'
        for number, section in enumerate(document.sections)
    )
    sections = "".join(
        _html_section(number, section) for number, section in enumerate(document.sections)
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f'<body><header><div class="kind">{html.escape(document.kind)}</div><h1>{title}</h1>'
        f"<nav>{links}</nav></header>\n<main>{sections}</main>\n"
        f"<footer>Written by Helios {html.escape(__version__)} from the files of the run.</footer>"
        "</body></html>\n"
    )
    return page.encode("utf-8", "replace").decode()


def _html_section(number: int, section: Chapter) -> str:
    content = "\n".join(map(_html_block, section.blocks))
    return f'<section id="s{number}"><h2>{html.escape(section.title)}</h2>\n{content}</section>\n'


def _html_block(block: Block) -> str:
    if isinstance(block, Chart):
        return draw_chart(block)
    return _html_markdown(block)


def _html_markdown(text: str) -> str:
    """Return HTML for what is written as Markdown here."""
    if text.startswith("### "):
        return f"<h3>{_html_text(text[4:])}</h3>"
    if text.startswith("| "):
        return _html_table(text)
    return f"<p>{_html_text(text)}</p>"


def _html_text(markdown: str) -> str:
    return html.escape(read_text(markdown))


def _html_table(markdown: str) -> str:
    head, rows = read_table(markdown)
    kind = ' class="facts"' if tuple(head) == NO_HEAD else ""
    titles = "" if kind else f"<thead><tr>{_html_cells('th', head)}</tr></thead>"
    body = "".join(f"<tr>{_html_cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table{kind}>{titles}<tbody>{body}</tbody></table></div>'


def _html_cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


_WIDTH, _HEIGHT = 1_000.0, 300.0
_DECADES = 2.0
_MOST_DOTS = 60
# Further lines have these colours again, and are dashed.
_COLOURS = 8


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
    for number, line in enumerate(chart.lines):
        parts += _draw_line(line, scale, across, f" l{number % _COLOURS}{_dash(number)}")
    return _frame(chart, scale, "".join(parts))


def _dash(number: int) -> str:
    return " dashed" if number >= _COLOURS else ""


def _draw_line(
    line: Line, scale: _Scale, across: Callable[[float], float], kind: str
) -> Iterator[str]:
    band = [(across(place), low, high) for place, low, high in line.band]
    if band:
        there = [f"{_round(x)} {scale.down(high)}" for x, _, high in band]
        back = [f"{_round(x)} {scale.down(low)}" for x, low, _ in reversed(band)]
        yield f'<path class="band" d="M{"L".join(there + back)}Z"/>'
    points = [f"{_round(across(x))} {scale.down(y)}" for x, y in line.points]
    if points:
        yield f'<path class="line{kind}" d="M{"L".join(points)}"/>'
    if points and len(points) <= _MOST_DOTS:
        # A line of length zero with round ends is a dot that is not stretched.
        dots = "".join(f"M{point}h0" for point in points)
        yield f'<path class="dots{kind}" d="{dots}"/>'


def _write_legend(chart: Chart) -> str:
    """Return which line is which; nothing for a single one without a name."""
    names = "".join(
        f'<li class="l{number % _COLOURS}{_dash(number)}">{html.escape(line.name)}</li>'
        for number, line in enumerate(chart.lines)
        if line.name
    )
    return f'<ul class="legend">{names}</ul>' if names else ""


def _values(chart: Chart) -> list[float]:
    return [
        *(y for line in chart.lines for _, y in line.points),
        *(y for line in chart.lines for _, low, high in line.band for y in (low, high)),
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
        f'<div class="places">{places}</div></div>{_write_legend(chart)}'
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
