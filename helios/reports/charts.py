"""Reads the curves of runs, and draws them with matplotlib: as SVG, or over each other."""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from helios.errors import ArgumentError
from helios.ledger import book
from helios.ledger.line import read_float
from helios.ledger.run_file import RunFacts
from helios.ledger.verification import LedgerStatus, verify
from helios.storage import files

MOST_CHARTS = 24
"""The most charts of each kind of curves."""
# Stands for the text's colour, which the page gives; see _inline.
_INK = "#010203"
_PIXELS = 600
_MOST_DOTS = 60
# Larger numbers are no points: ends of their scale would not be finite.
_MOST = 1e200
_DECADES = 100.0
_DASHES: Any = ("-", "--", ":")
_STYLE: Any = {
    "font.size": 9,
    "text.usetex": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "helios",
    "path.simplify": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "lines.linewidth": 1.2,
}
_THEMED: Any = {
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}


Curve: TypeAlias = tuple["array[float]", "array[float]"]
"""Iterations, and the number of each."""


@dataclass
class RunCurves:
    """The curves of a run, by name.

    Attributes:
        losses, scores, rates: ``rates`` are those that steps have used.
        status: the result of verifying the ledger; ``None`` without one.
        at: the epoch, iteration and step of the last line.
    """

    losses: dict[str, Curve] = field(default_factory=dict)
    scores: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, Curve] = field(default_factory=dict)
    status: LedgerStatus | None = None
    at: tuple[int, int, int] = (0, 0, 0)

    def list_curves(self, most: int) -> dict[str, Curve]:
        """Return the curves by title, at most so many of each kind."""
        found = (
            {f"loss: {name}": curve for name, curve in self.losses.items()},
            {f"score: {name}": curve for name, curve in self.scores.items()},
            self.rates,
        )
        return {title: each[title] for each in found for title in islice(each, most)}


def read_curves(run: RunFacts) -> RunCurves:
    """Read all curves of a run; lines of its ledger that are not good are left out.

    Raises:
        LedgerError: if the ledger cannot be read.
    """
    found = RunCurves()

    def add_line(line: dict[str, Any]) -> None:
        found.at = line["at"]
        iteration = found.at[1]
        for name, digits in line.get("loss", {}).items():
            _add_point(found.losses, name, iteration, digits)
        rates = line.get("lr", ())
        for number, rate in enumerate(rates, 1):
            name = "learning rate" + f", group {number}" * (len(rates) > 1)
            _add_point(found.rates, name, iteration, rate)

    if book.FILE_NAME not in run.missing:
        found.status = verify(run.folder / book.FILE_NAME, watch=add_line)
    for line in run.validations:
        for name, score in line["scores"].items():
            _add_point(found.scores, name, line["iteration"], score)
    return found


def _add_point(curves: dict[str, Curve], name: str, place: int, number: Any) -> None:
    if number is not None:
        places, numbers = curves.setdefault(name, (array("d"), array("d")))
        value = read_float(number) if isinstance(number, str) else number
        places.append(place)
        numbers.append(value)


def thin(curve: Curve, pixels: int = _PIXELS) -> tuple[Any, Any]:
    """Return iterations and numbers: of each pixel's span the minimum and the maximum.

    Args:
        curve: the curve; numbers that cannot be drawn are left out.
        pixels: the width.
    """
    places, numbers = (np.asarray(each) for each in curve)
    is_drawn = np.abs(numbers) <= _MOST
    places, numbers = places[is_drawn], numbers[is_drawn]
    if len(places) <= 2 * pixels:
        return places, numbers
    span = np.ptp(places) or 1.0
    columns = np.minimum((places - places.min()) * pixels // span, pixels - 1)
    order = np.lexsort((numbers, columns))
    begins = np.flatnonzero(np.diff(columns[order], prepend=-1.0))
    ends = np.append(begins[1:], len(order)) - 1
    kept = np.unique(np.concatenate([order[begins], order[ends], [0, len(order) - 1]]))
    return places[kept], numbers[kept]


def draw_svg(
    curve: Curve, *, resumes: Sequence[int] = (), best: tuple[int, float] | None = None
) -> str:
    """Return a chart of a curve as SVG for a page, in the colour of its text.

    Args:
        curve: the curve.
        resumes: iterations that the run was resumed from.
        best: the iteration and the score of the best validation.
    """
    with mpl.rc_context({**_STYLE, **_THEMED}):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        axes = figure.subplots()
        for place in resumes:
            axes.axvline(place, color=_INK, alpha=0.4, linestyle=":")
        drawn = thin(curve)
        axes.plot(*drawn, color="#3b82d0", marker=_marker(drawn), gid="curve")
        if best is not None:
            axes.plot(*best, marker="*", markersize=12, color="#e0612d", gid="best")
        _scale(axes, [drawn[1]])
        axes.set_xlabel("iteration")
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    return _inline(text.getvalue())


def _marker(drawn: tuple[Any, Any]) -> str | None:
    return "." if len(drawn[0]) <= _MOST_DOTS else None


def _inline(svg: str) -> str:
    """Return an SVG file as an element; names of groups, which repeat, become classes or go."""
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'<g id="(curve|best)"', r'<g class="\1"', svg)
    return re.sub(r'<g id="[^"]*"', "<g", svg)


def _scale(axes: Any, lines: Sequence[Any]) -> None:
    """Make the scale logarithmic if all numbers are positive and far apart."""
    ends = [end for line in lines if len(line) for end in (line.min(), line.max())]
    if ends and 1 / _MOST < min(ends) < max(ends) / _DECADES:
        axes.set_yscale("log")


def draw_over(curves: Mapping[str, Mapping[str, Curve]], target: Path) -> None:
    """Plot the curves of several runs over each other.

    Args:
        curves: by title, and by run.
        target: the file; its suffix sets the format.

    Raises:
        ArgumentError: for an unknown format.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 1 + 2.4 * len(curves)), layout="constrained")
        formats = figure.canvas.get_supported_filetypes()
        if target.suffix[1:] not in formats:
            raise ArgumentError(
                f"--plot takes a file that ends in one of .{', .'.join(formats)}, got {target}."
            )
        runs = list(dict.fromkeys(run for found in curves.values() for run in found))
        looks = {run: (f"C{n % 10}", _DASHES[n // 10 % 3]) for n, run in enumerate(runs)}
        for axes, (title, found) in zip(
            figure.subplots(len(curves), squeeze=False)[:, 0], curves.items(), strict=True
        ):
            lines = {run: thin(curve) for run, curve in found.items()}
            for run, line in lines.items():
                color, dash = looks[run]
                axes.plot(*line, color=color, linestyle=dash, marker=_marker(line), alpha=0.8)
            _scale(axes, [numbers for _, numbers in lines.values()])
            axes.set_title(title, loc="left", parse_math=False)
        axes.set_xlabel("iteration")
        _add_legend(figure, looks)
        with files.replacing(target) as partial:
            figure.savefig(partial, format=target.suffix[1:], dpi=150)


def draw_trials(
    scores: Mapping[str, Mapping[int, float]], best: Mapping[int, float], target: Path
) -> None:
    """Plot the scores of a sweep.

    Args:
        scores: of finished and of pruned trials, by these words and by number.
        best: the best score so far, by the number of the trial.
        target: its suffix says the format.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        for (name, found), marker in zip(scores.items(), "ox", strict=True):
            axes.plot([*found], [*found.values()], marker, label=name)
        axes.step([*best], [*best.values()], where="post", color="C7", label="best so far")
        _scale(axes, [np.asarray([*found.values()]) for found in scores.values()])
        axes.set_xlabel("trial")
        axes.set_ylabel("score")
        axes.legend()
        with files.replacing(target) as partial:
            figure.savefig(partial, format=target.suffix[1:], dpi=150)


def _add_legend(figure: Figure, looks: Mapping[str, tuple[str, Any]]) -> None:
    handles = [mpl.lines.Line2D([], [], color=c, linestyle=s) for c, s in looks.values()]
    # A label that begins with an underscore would be left out.
    legend = figure.legend(handles, [f" {run}" for run in looks], loc="outside lower left", ncols=3)
    for text in legend.get_texts():
        text.set_parse_math(False)
