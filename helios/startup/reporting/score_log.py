"""What the log says of a training besides the banner: a line per validation, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from helios.best import BestValidation
from helios.core.text import number_text, with_step
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


def format_scores(scores: Mapping[str, float]) -> str:
    """Return scores as text, in the order of the table."""
    return ", ".join(f"{name} {number_text(score, 4)}" for name, score in scores.items())


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


class ScoreLog:
    """Logs the scores of validations, and remembers the last ones."""

    def __init__(self) -> None:
        self._last = ""

    def show(
        self,
        scores: Mapping[str, float],
        state: TrainingState,
        *,
        best: BestValidation | None,
        losses: Mapping[str, float],
    ) -> str:
        """Log the scores of a validation.

        Args:
            scores: those that are single numbers, by name; without any nothing is logged.
            state: the counters, after the validation was counted.
            best: the best validation so far, which may be this one; ``None`` if there is none.
            losses: the mean training losses since the validation before, likewise.

        Returns:
            The scores and the best ones, for the progress bar.
        """
        if not scores:
            return ""
        text, rank = format_scores(scores), ""
        if best is not None:
            is_new = best.iteration == state.global_iteration
            rank = "the best so far" if is_new else _describe_best(best)
        training = format_scores({f"training {name}": loss for name, loss in losses.items()})
        place = _describe_position(state)
        self._last = f"{text} ({place})"
        line = "; ".join(filter(None, (text, rank, training)))
        _LOGGER.info("Validation %d (%s): %s.", state.validation_cycles, place, line)
        return f"{text} ({rank})" if rank else text

    def summarize(
        self, best: BestValidation | None, file_name: str | None = None
    ) -> dict[str, str]:
        """Return the last and the best scores of the run, by label.

        Args:
            best: the best validation; ``None`` if there is none.
            file_name: its checkpoint; empty if it has none, ``None`` if nothing was saved.
        """
        found = {"last scores": self._last} if self._last else {}
        if best is not None:
            since = f", since iteration {best.since}" if best.since else ""
            name = "" if file_name is None else f"; {file_name or 'without a checkpoint'}"
            place = with_step(best.iteration, best.step)
            text = f"{format_scores(best.deciding)} (iteration {place}{since}{name})"
            found["best scores"] = text
        return found


def _describe_position(state: TrainingState) -> str:
    """Return epoch and iteration, which files are named after."""
    iteration = with_step(state.global_iteration, state.global_step)
    return f"epoch {state.global_epoch}, iteration {iteration}"


def _describe_best(best: BestValidation) -> str:
    since = f" since iteration {best.since}" if best.since else ""
    place = with_step(best.iteration, best.step)
    return f"best{since}: {format_scores(best.deciding)} (iteration {place})"


def describe_progress(
    state: TrainingState,
    *,
    seconds: float,
    begun_at: int,
    scores: Mapping[str, str],
    nonfinite: str,
    newest: Path | None,
    has_report: bool,
) -> str:
    """Return how far a training has come, as lines below a message of the log.

    Args:
        state: the counters.
        seconds: the time of this start.
        begun_at: the iteration that this start continued from.
        scores: what :meth:`ScoreLog.summarize` returned.
        nonfinite: the first loss that was not finite; empty if all were.
        newest: the newest checkpoint; ``None`` without one.
        has_report: whether the run has written what ``helios report`` reads.
    """
    count = state.global_iteration - begun_at
    part = f"; this start: {count} iterations" if begun_at else ""
    place = _describe_position(state)
    facts = {"trained": f"until {place}{part} in {format_seconds(seconds)}", **scores}
    if nonfinite:
        facts["not finite"] = f"the first loss: {nonfinite}"
    if newest is not None:
        facts["checkpoints"] = f"{newest.parent} (newest: {newest.name})"
        if has_report:
            facts["report"] = f"helios report {newest.parent}"
    width = max(map(len, facts))
    return "".join(f"\n  {label:<{width}}  {fact}" for label, fact in facts.items())
