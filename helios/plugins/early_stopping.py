"""``EarlyStopping``: end a run when a validation score no longer improves.

The trainer's ``early_stop_cycles`` relies on ``have_metrics_improved``; this plugin needs no method
of the model, and several of them can watch several scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from helios.best import Mode, check_mode, is_better
from helios.errors import ArgumentError, UsageError
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

_LOGGER = logging.getLogger(__name__)


@PLUGIN_REGISTRY.register
class EarlyStopping(Plugin):
    """Finishes the run when a validation score no longer improves.

    The score is read from the model's ``metrics`` after each validation in ``fit``, after the
    model's own ``on_validation_end``; that of rank 0 decides in all processes. A score that equals
    the best one is no improvement, nor is one that is not finite, with a warning. Sanity checks and
    ``Trainer.validate`` do not count.

    If you extend a run that this plugin has ended, its patience starts over, and the best score is
    kept; if the run ended for another reason, the count continues.

    Args:
        metric: name of the score.
        mode: ``"min"`` if small scores are good, ``"max"`` if large ones are; required.
        patience: end the run after that many validations in a row without improvement.
        min_delta: how much better than the last improvement a score must be. It only affects
            patience: any better score is the best one.
        threshold: end the run as soon as the score is at least as good as this; ``None`` for never.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a mode or a patience outside its range (a ``ValueError``).

    Example:
        >>> EarlyStopping("loss", mode="min", patience=3).best is None
        True
    """

    _internals: ClassVar[str] = (
        "_best _count _has_stopped _is_training _metric _min_delta _mode _patience _reference "
        "_sign _threshold"
    )

    monitor = True

    def __init__(
        self,
        metric: str,
        mode: Mode,
        *,
        patience: int,
        min_delta: float = 0.0,
        threshold: float | None = None,
        plug_id: str = "early-stopping",
    ) -> None:
        super().__init__(plug_id)
        check_mode(mode, "EarlyStopping")
        if type(patience) is not int or patience < 1:
            raise ArgumentError(
                f"EarlyStopping(patience=...) must be a positive int, got {patience!r}. It counts "
                "validations."
            )
        self._metric = metric
        self._mode: Mode = mode
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._min_delta = min_delta
        self._threshold = threshold
        self._is_training = False
        self._forget()

    @property
    def monitored(self) -> tuple[str, Mode]:
        """The name of the score, and whether small or large ones are good."""
        return self._metric, self._mode

    @property
    def best(self) -> float | None:
        """The best finite score so far, regardless of ``min_delta``; ``None`` before the first."""
        return self._best

    @property
    def count(self) -> int:
        """Validations since the last improvement."""
        return self._count

    def _forget(self) -> None:
        self._best: float | None = None
        self._reference: float | None = None
        self._count = 0
        self._has_stopped = False

    def setup(self) -> None:
        """Start without a best score; a checkpoint restores it."""
        self._forget()

    def on_training_start(self) -> None:
        """Start watching: after a sanity check, and not in ``Trainer.validate``."""
        self._is_training = True

    def on_validation_end(self, validation_cycle: int) -> None:
        """Read the score, and request the end of the run if it is due.

        Raises:
            UsageError: if the score is missing.
        """
        if not self._is_training:
            return
        if self._has_stopped:
            _LOGGER.info(
                "Plugin %r has ended this run, but the run was extended: its patience starts over.",
                self.plug_id,
            )
            self._has_stopped = False
            self._count = 0
        own = read_score(self.context.model.metrics, self._metric, "EarlyStopping")
        score = self.context.gather(own)[0]
        if not math.isfinite(score):
            _LOGGER.warning(
                "The validation score %r is %s: plugin %r counts it as no improvement.",
                self._metric,
                score,
                self.plug_id,
            )
        if self._is_improvement(score):
            self._reference = score
            self._count = 0
        else:
            self._count += 1
        if is_better(score, self._best, self._mode):
            self._best = score
        if reason := self._find_reason(score):
            self._has_stopped = True
            self.context.request_stop(reason)

    def teardown(self) -> None:
        """Stop watching."""
        self._is_training = False

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, what patience counts from, and whether the run was ended."""
        return {
            "best": self._best,
            "reference": self._reference,
            "count": self._count,
            "has_stopped": self._has_stopped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._best = state_dict["best"]
        self._reference = state_dict["reference"]
        self._count = state_dict["count"]
        self._has_stopped = state_dict["has_stopped"]

    def _is_improvement(self, score: float) -> bool:
        if not math.isfinite(score):
            return False
        return self._reference is None or self._sign * (self._reference - score) > self._min_delta

    def _find_reason(self, score: float) -> str:
        """Return why the run should end now; empty if it should not."""
        name = f"{self.plug_id}: {self._metric}"
        threshold = self._threshold
        is_reached = threshold is not None and self._sign * (score - threshold) <= 0
        if is_reached and math.isfinite(score):
            return f"{name} has reached {score} (threshold {threshold})"
        if self._count >= self._patience:
            return (
                f"{name} has not improved on {self._reference} in {self._count} validations "
                f"(patience {self._patience})"
            )
        return ""


def read_score(scores: Mapping[str, Any], metric: str, owner: str) -> float:
    """Return a validation score as a number.

    Args:
        scores: the scores of the model, by name.
        metric: name of the score.
        owner: the argument that names it, for messages.

    Raises:
        UsageError: if the score is missing.
    """
    if metric not in scores:
        raise UsageError(
            f"{owner}(metric={metric!r}) must name a validation score. The scores are: "
            f"{', '.join(sorted(scores)) or 'none'}. Log it in valid_step: "
            f"self.log({metric!r}, value)."
        )
    return float(scores[metric])
