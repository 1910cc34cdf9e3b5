"""The page about a run: its events, its curves and its settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template

from helios.ledger.run_file import RunFacts
from helios.reports.charts import MOST_CHARTS, Curve, RunCurves, draw_svg, read_curves
from helios.text import number_text, with_step
from helios.version import __version__

_TEMPLATE = Path(__file__).with_name("run_report.html")


def report_run(run: RunFacts) -> tuple[dict[str, Any], str]:
    """Return the report of a run, as plain values and as an HTML page.

    Raises:
        LedgerError: if its ledger cannot be read.
    """
    found = read_curves(run)
    curves = found.list_curves(MOST_CHARTS)
    facts: dict[str, Any] = {
        "name": run.name,
        "summary": dict(_summarize(run, found)),
        "missing": run.missing,
        "best": None if (best := run.best) is None else vars(best),
        "starts": [vars(start) for start in run.starts],
        "curves": {title: _describe(curve) for title, curve in curves.items()},
        "settings": run.settings,
    }
    resumes = [start.iteration for start in run.starts[1:] if start.iteration]
    scores = {} if best is None else best.scores
    bests = {f"score: {name}": (best.iteration, x) for name, x in scores.items() if best}
    charts = [
        {
            "title": title,
            "svg": draw_svg(curve, resumes=resumes, best=bests.get(title)),
            "note": _note(facts["curves"][title], bests.get(title)),
        }
        for title, curve in curves.items()
    ]
    template = Template(_TEMPLATE.read_text("utf-8"), autoescape=True, trim_blocks=True)
    rest = len(found.list_curves(sys.maxsize)) - len(curves)
    page = template.render(facts, charts=charts, rest=rest, version=__version__)
    return facts, page.encode("utf-8", "replace").decode()


def _summarize(run: RunFacts, found: RunCurves) -> Iterator[tuple[str, str]]:
    if found.status is not None:
        epoch, iteration, step = found.at
        end = "the run has ended" if found.status.has_ended else "the run has not ended"
        yield "Iterations", f"{with_step(iteration, step)}, epoch {epoch} ({end})"
    if run.best is not None:
        yield "Best validation", str(run.best)
    if run.starts:
        killed = sum(start.end == "killed" for start in run.starts)
        yield "Starts", f"{len(run.starts)} (killed: {killed}), the last one: {run.starts[-1].end}"
    if run.newest:
        yield "Command", shlex.join(map(str, run.newest["command"]))
        yield "Level", run.newest["level"]
    if found.status is not None:
        bad = f"{len(found.status.findings)} findings, the first: {found.status.findings[:1]}"
        yield "Ledger", "no problems found" if found.status.is_good else bad
        yield "Hash of the ledger's last line", found.status.hash


def _describe(curve: Curve) -> dict[str, Any]:
    """Return the ends of a curve, its extremes, and how many of its numbers are not finite."""
    places, numbers = (np.asarray(each) for each in curve)
    finite = numbers[np.isfinite(numbers)]
    is_bad = ~np.isfinite(numbers)
    return {
        "first": float(numbers[0]),
        "last": float(numbers[-1]),
        "min": float(finite.min()) if len(finite) else None,
        "max": float(finite.max()) if len(finite) else None,
        "iterations": [int(places[0]), int(places[-1])],
        "num_not_finite": int(is_bad.sum()),
        "first_not_finite": int(places[is_bad][0]) if is_bad.any() else None,
    }


def _note(known: Mapping[str, Any], best: tuple[int, float] | None) -> str:
    parts = [f"first {number_text(known['first'])}, last {number_text(known['last'])}"]
    if known["min"] is not None:
        parts.append(f"minimum {number_text(known['min'])}, maximum {number_text(known['max'])}")
    if known["num_not_finite"]:
        count, place = known["num_not_finite"], known["first_not_finite"]
        parts.append(f"{count} not finite, first at iteration {place}")
    if best is not None:
        parts.append(f"★ best validation: {number_text(best[1])} at iteration {best[0]}")
    return "; ".join(parts)
