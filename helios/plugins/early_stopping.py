"""``EarlyStopping``: end a run when a validation score no longer improves.

The trainer's ``early_stop_cycles`` relies on ``have_metrics_improved``; this plugin needs no method
of the model, and several of them can watch several scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from helios.best import NO_MODE, Mode, check_mode, is_better
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

_LOGGER = logging.getLogger(__name__)


@PLUGIN_REGISTRY.register
class EarlyStopping(Plugin):
    """Ends the run regularly when a validation score no longer improves.

    The score is read after each validation of a training, from the model's ``metrics``, after the
    model's own ``on_validation_end``; that of rank 0 decides in all processes. One that equals the
    best score counts as no improvement, and so does one that is not finite; both are logged. Sanity
    checks and ``Trainer.validate`` do not count.

    If you extend a run that this plugin has ended, its patience starts over, and the best score
    stays; if the run ended for another reason, the count continues.

    Args:
        metric: name of the score.
        mode: ``"min"`` if small scores are good, ``"max"`` if large ones are; required.
        patience: end the run after that many validations in a row without improvement.
        min_delta: an improvement is a score that is better by more than this than the last
            improvement. It only counts patience: any better score is the best one.
        threshold: end the run as soon as the score is at least as good as this; ``None`` for never.
        stop_on_nan: end the run at a score that is not finite.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a value outside its range (a ``ValueError``).
        ArgumentTypeError: for a metric that is not a name.

    Example:
        >>> EarlyStopping("loss", mode="min", patience=3).best is None
        True
    """

    _internals: ClassVar[str] = (
        "_best _count _has_stopped _is_training _metric _min_delta _mode _patience _reference "
        "_sign _stop_on_nan _threshold"
    )

    monitor = True

    def __init__(
        self,
        metric: str,
        mode: Mode = NO_MODE,
        *,
        patience: int,
        min_delta: float = 0.0,
        threshold: float | None = None,
        stop_on_nan: bool = False,
        plug_id: str = "early-stopping",
    ) -> None:
        super().__init__(plug_id)
        if not isinstance(metric, str) or not metric:
            raise ArgumentTypeError(
                f"EarlyStopping(metric=...) must be the name of a validation score, got {metric!r}."
                ' Pass e.g. "loss".'
            )
        call = f'EarlyStopping("{metric}", mode={{}}, patience={patience})'
        check_mode(mode, "EarlyStopping", call)
        if type(patience) is not int or patience < 1:
            raise _fail("patience", "a positive int", patience, "It counts validations.")
        if not _is_finite(min_delta) or min_delta < 0:
            raise _fail("min_delta", "a number of 0 or more", min_delta, "Pass 0 for any gain.")
        if threshold is not None and not _is_finite(threshold):
            raise _fail("threshold", "a finite number or None", threshold, "Pass None for never.")
        self._metric = metric
        self._mode: Mode = mode
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._min_delta = float(min_delta)
        self._threshold = threshold
        self._stop_on_nan = bool(stop_on_nan)
        self._is_training = False
        self._forget()

    @property
    def monitored(self) -> tuple[str, Mode]:
        """The name of the score, and whether small or large ones are good."""
        return self._metric, self._mode

    @property
    def best(self) -> float | None:
        """The best finite score so far, whatever ``min_delta`` is; ``None`` before there is one."""
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
            UsageError: if the score is missing, or not a number.
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
        if score == self._best:
            _LOGGER.info(
                "The validation score %r equals its best value, %s: plugin %r counts it as no "
                "improvement, and the earlier one stays the best.",
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
        if not math.isfinite(score):
            if self._stop_on_nan:
                return f"{name} is {score}"
        elif self._threshold is not None and self._sign * (score - self._threshold) <= 0:
            return f"{name} has reached {score} (threshold {self._threshold})"
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
        owner: what was given the name, for messages.

    Raises:
        UsageError: if the score is missing, or not a number.
    """
    if metric not in scores:
        raise UsageError(
            f"{owner}(metric={metric!r}) must name a validation score; there are "
            f"{sorted(scores) or 'none'}. Return it from valid_step, put it into "
            "self.val_scores, or correct the name."
        )
    score = scores[metric]
    if isinstance(score, Tensor) and score.numel() == 1:
        score = score.item()
    if not isinstance(score, int | float):
        raise UsageError(
            f"The validation score {metric!r} must be a number for {owner}, got "
            f"{score!r}. Put a single number into self.val_scores."
        )
    return float(score)


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _fail(option: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"EarlyStopping({option}=...) must be {rule}, got {value!r}. {remedy}")
