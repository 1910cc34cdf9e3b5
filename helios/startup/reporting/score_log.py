"""What the log says of a training besides the banner: a line per validation, and how it ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.checkpoint.options import KeepBest
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


def format_scores(scores: Mapping[str, float]) -> str:
    """Return scores as text, in the order of the table."""
    return ", ".join(f"{name} {score:.4g}" for name, score in scores.items())


def format_seconds(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``; below a minute, in seconds.

    Example:
        >>> format_seconds(3.21), format_seconds(3723)
        ('3.2 s', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@dataclass(frozen=True)
class _Best:
    """The best validation so far."""

    value: float
    text: str
    place: str


class ScoreLog:
    """Logs the scores of validations.

    The best one is the first with the best value of the score that decides; without such a score,
    the last one for which ``Model.have_metrics_improved`` returned True.

    Args:
        rule: the score that decides; ``None`` for none.
        judges: whether the model says which validations are better.
    """

    def __init__(self, rule: KeepBest | None = None, *, judges: bool = False) -> None:
        self._rule = rule
        self._judges = judges
        self._last = ""
        self._best: _Best | None = None
        self._is_complete = True

    def recall(self, lines: Iterable[Mapping[str, Any]] | None) -> None:
        """Find the best validation before this start.

        Args:
            lines: ``iteration``, ``scores`` and ``improved`` of each validation, as
                :func:`helios.ledger.timing.read_timing` returns them; ``None`` if unknown.
        """
        self._is_complete = lines is not None
        for line in lines or ():
            place = f"iteration {line['iteration']}"
            self._judge(line["scores"], place, has_improved=bool(line.get("improved")))

    def _judge(self, scores: Mapping[str, float], place: str, *, has_improved: bool) -> None:
        if self._rule is None:
            if self._judges and has_improved:
                self._best = _Best(math.nan, format_scores(scores), place)
            return
        value = scores.get(self._rule.metric, math.nan)
        sign = 1 if self._rule.mode == "max" else -1
        if not math.isnan(value) and (self._best is None or sign * (value - self._best.value) > 0):
            self._best = _Best(value, format_scores({self._rule.metric: value}), place)

    def show(
        self,
        scores: Mapping[str, float],
        state: TrainingState,
        *,
        has_improved: bool,
        losses: Mapping[str, float],
    ) -> str:
        """Log the scores of a validation.

        Args:
            scores: those that are single numbers, by name; without any nothing is logged.
            state: the counters, after the validation was counted.
            has_improved: what ``have_metrics_improved`` returned.
            losses: those of the last training batch, likewise.

        Returns:
            The scores and the best ones, for the progress bar.
        """
        if not scores:
            return ""
        before = self._best
        place = f"iteration {state.global_iteration}"
        self._judge(scores, place, has_improved=has_improved)
        text = format_scores(scores)
        best = "the best so far" if self._best is not before else self._describe_best()
        training = format_scores({f"training {name}": loss for name, loss in losses.items()})
        place = f"epoch {state.global_epoch}, {place}"
        self._last = f"{text} ({place})"
        line = "; ".join(filter(None, (text, best, training)))
        _LOGGER.info("Validation %d (%s): %s.", state.validation_cycles, place, line)
        return f"{text} ({best})" if best else text

    def _describe_best(self) -> str:
        if self._best is None:
            return ""
        since = "" if self._is_complete else " since this start"
        return f"best{since}: {self._best.text} ({self._best.place})"

    def summarize(self) -> dict[str, str]:
        """Return the last and the best scores of the run, by label."""
        found = {"last scores": self._last} if self._last else {}
        if self._best is not None:
            since = "" if self._is_complete else ", since this start"
            found["best scores"] = f"{self._best.text} ({self._best.place}{since})"
        return found


def describe_progress(
    state: TrainingState,
    *,
    seconds: float,
    begun_at: int,
    scores: Mapping[str, str],
    newest: Path | None,
    has_report: bool,
) -> str:
    """Return how far a training has come, as lines below a message of the log.

    Args:
        state: the counters.
        seconds: the time of this start.
        begun_at: the iteration that this start continued from.
        scores: what :meth:`ScoreLog.summarize` returned.
        newest: the newest checkpoint; ``None`` without one.
        has_report: whether the run has written what ``helios report`` reads.
    """
    count = state.global_iteration - begun_at
    part = f"; this start: {count} iterations" if begun_at else ""
    place = f"epoch {state.global_epoch}, iteration {state.global_iteration}"
    facts = {"trained": f"until {place}{part} in {format_seconds(seconds)}", **scores}
    if newest is not None:
        facts["checkpoints"] = f"{newest.parent} (newest: {newest.name})"
        if has_report:
            facts["report"] = f"helios report {newest.parent}"
    width = max(map(len, facts))
    return "".join(f"\n  {label:<{width}}  {fact}" for label, fact in facts.items())
