"""The charts of a report: losses, norms, learning rates, throughput and scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, final

from helios.best import BestValidation
from helios.core.text import number_text, with_step
from helios.ledger.summary.curves import Curve, LedgerCurves
from helios.ledger.summary.document import (
    MOST_ROWS,
    Block,
    Chart,
    Grid,
    Line,
    Text,
    shorten,
)
from helios.ledger.summary.run_facts import RunFacts

_MOST_CHARTS = 40
_MOST_DOTS = 60


@final
class Figures:
    """Draws what was read once, with more or fewer points.

    Args:
        run: what is known of the run.
        curves: those of its ledger; ``None`` without one.
        points: the most points of each line; 0 for charts without lines.
    """

    def __init__(self, run: RunFacts, curves: LedgerCurves | None, points: int) -> None:
        self._run = run
        self._curves = curves
        self._points = points
        self._marks = [
            (attempt.iteration, before.was_killed)
            for before, attempt in itertools.pairwise(run.attempts)
        ][:MOST_ROWS]

    def show_losses(self) -> Iterator[Block]:
        """Yield the blocks of the losses and of the norm of the gradients."""
        if self._curves is None:
            yield Text("There is no ledger, so the losses are unknown.")
            return
        losses = self._curves.losses
        if not losses:
            yield Text("The run has set no losses (loss_items).")
        if losses:
            yield Text(
                "The line is the mean of each group of iterations, the area around it their least "
                "and largest loss. Vertical lines mark starts that resumed; those in red follow a "
                "kill."
            )
        for name, curve in list(losses.items())[:_MOST_CHARTS]:
            yield self._draw(name, curve)
        if len(losses) > _MOST_CHARTS:
            rest = ", ".join(list(losses)[_MOST_CHARTS:])
            yield Text(shorten(f"Without a chart, because there are too many: {rest}."))
        if self._curves.norm is not None:
            yield self._draw("gradient norm before clipping", self._curves.norm)
        else:
            yield Text("No gradient norm: the training does not clip by norm (clip_norm).")

    def show_rates(self) -> Iterator[Block]:
        """Yield the blocks of the learning rates."""
        if self._curves is None:
            yield Text("There is no ledger, so the learning rates are unknown.")
            return
        rates = self._curves.rates
        if not rates:
            yield Text("The run has no optimizer with a learning rate.")
        elif not self._curves.has_used_rates:
            yield Text(
                "Some of these rates are those at the end of an iteration, because the run has not "
                "recorded which ones its updates have used: with a scheduler that steps after each "
                "update, they are those of the next one."
            )
        for number, curve in enumerate(rates[:_MOST_CHARTS]):
            name = "learning rate" if len(rates) == 1 else f"learning rate, group {number + 1}"
            yield self._draw(name, curve)
        if len(rates) > _MOST_CHARTS:
            yield Text(f"{len(rates) - _MOST_CHARTS} further groups have no chart here.")

    def _draw(self, name: str, curve: Curve) -> Chart:
        assert self._curves is not None
        buckets = curve.shrink(self._points)
        note = ""
        if curve.last is not None:
            iteration, number = curve.last
            note = (
                f"Last: {number_text(number)} at iteration {with_step(iteration, curve.last_step)}."
            )
        if curve.first_infinite is not None:
            place = with_step(curve.first_infinite, curve.first_infinite_step)
            note += (
                f" {curve.num_infinite:,} values are not finite, the first at iteration {place}."
            )
        has_band = any(bucket.low < bucket.high for bucket in buckets)
        line = Line(
            [(bucket.place, bucket.mean) for bucket in buckets],
            [(bucket.place, bucket.low, bucket.high) for bucket in buckets] if has_band else (),
        )
        return Chart(shorten(name), line, self._span, self._marks, note.strip(), curve.ends)

    @property
    def _span(self) -> tuple[float, float]:
        if self._curves is not None:
            return self._curves.begin, self._curves.end
        places = [line["iteration"] for line in (*self._run.times.lines, *self._run.times.scores)]
        return 1.0, max(places, default=1)

    def show_throughput(self) -> Iterator[Block]:
        """Yield the blocks of the throughput."""
        lines = [line for line in self._run.times.lines if _own_seconds(line) > 0]
        if not lines:
            yield Text("There are no times, so the throughput is unknown.")
            return
        curve = Curve()
        for line in lines:
            curve.add(line["iteration"], line["iterations"] / _own_seconds(line))
        mean = sum(line["iterations"] for line in lines) / sum(map(_own_seconds, lines))
        yield self._draw_points("iterations per second", curve)
        # Earlier versions did not note how long validations took.
        knows_pauses = all("run" in start for start in self._run.times.starts)
        what = "with saves, without validations" if knows_pauses else "with validations and saves"
        yield Text(
            f"On average {number_text(mean)} iterations per second, {what}. "
            "Vertical lines mark starts that resumed; those in red follow a kill."
        )

    def _draw_points(self, name: str, curve: Curve) -> Chart:
        found = [(bucket.place, bucket.mean) for bucket in curve.shrink(self._points)]
        line = Line(found, has_dots=len(found) <= _MOST_DOTS)
        return Chart(shorten(name), line, self._span, self._marks, ends=curve.ends)

    def show_scores(self) -> Iterator[Block]:
        """Yield the blocks of the scores of validations."""
        scores, best = self._run.find_scores(), self._run.find_best()
        if not scores:
            yield Text("The run has recorded no scores of validations.")
            return
        rows, steps = [], self._run.find_steps()
        for name, values in scores.items():
            iteration, last = values[-1]
            place = with_step(iteration, steps.get(iteration))
            row = [shorten(name), f"{number_text(last)} (iteration {place})"]
            if best is not None:
                score = best.scores.get(name)
                at = f" (iteration {with_step(best.iteration, best.step)})"
                row.append("-" if score is None else number_text(score) + at)
            rows.append(row)
        head = ["score", "last validation"]
        yield Grid(head if best is None else [*head, "best validation"], rows[:MOST_ROWS])
        if best is not None:
            yield Text(_explain(best))
        for name, values in list(scores.items())[:_MOST_CHARTS]:
            curve = Curve()
            for iteration, score in values:
                curve.add(iteration, score)
            yield self._draw_points(name, curve)


def _explain(best: BestValidation) -> str:
    """Return what decides which validation is the best."""
    if best.metric is None:
        text = "The best one is the last for which have_metrics_improved returned True"
    else:
        side = "smallest" if best.mode == "min" else "largest"
        text = f"The best one has the {side} finite {best.metric}, the earlier one at a tie"
    rest = f"; those until iteration {best.since} are unknown" if best.since else ""
    return f"{text}{rest}."


def _own_seconds(line: Mapping[str, Any]) -> float:
    """Return the time of the iterations of a stretch, without what paused them."""
    return float(line["seconds"] - line.get("paused", 0.0))
