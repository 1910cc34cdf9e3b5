"""The scores of validations as lines of the log: each one, and the last and the best at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


def _format(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {score:.4g}" for name, score in scores.items())


class ScoreLog:
    """Logs the scores of validations.

    The best validation is the last one for which ``Model.have_metrics_improved`` returned True.
    After a resume it is known again once the scores improve.
    """

    def __init__(self) -> None:
        self._last = ""
        self._best = ""

    def show(
        self, scores: Mapping[str, float], state: TrainingState, *, has_improved: bool
    ) -> None:
        """Log the scores of a validation.

        Args:
            scores: those that are single numbers, by name; without any nothing is logged.
            state: the counters, after the validation was counted.
            has_improved: what ``have_metrics_improved`` returned.
        """
        if not scores:
            return
        text = _format(scores)
        place = f"epoch {state.global_epoch}, iteration {state.global_iteration}"
        self._last = f"{text} ({place})"
        if has_improved:
            self._best = self._last
        _LOGGER.info("Validation %d (%s): %s.", state.validation_cycles, place, text)

    def show_end(self) -> None:
        """Log the last scores of the run, and the best ones where others are better."""
        if not self._last:
            return
        best = "" if self._best in ("", self._last) else f" Best: {self._best}."
        _LOGGER.info("Last validation: %s.%s", self._last, best)
