"""When schedulers move in automatic mode: per step, per epoch, or after a validation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.errors import ArgumentError, UsageError

_VALIDATION = "validation:"


def _members(scheduler: LRScheduler) -> tuple[Any, ...]:
    return tuple(vars(scheduler).get("_schedulers", ()))


@contextmanager
def _no_false_alarm() -> Iterator[None]:
    # PyTorch takes a scheduler that moves first after a resume at an epoch's end for one that moves
    # before its optimizer: it looks for a step in this process. The loop keeps the order anyway.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


class Schedulers:
    """The schedulers of a model, by attribute path, with the moment at which each moves.

    Args:
        schedulers: by path, as discovery finds them; those inside a chained or sequential one are
            left to it.
        intervals: ``{path: "step" | "epoch" | "validation:<metric>"}``, default ``"step"``.

    Raises:
        ArgumentError: for an interval of an unknown scheduler, an unknown interval, or a plateau
            scheduler without a metric.
    """

    def __init__(self, schedulers: Mapping[str, LRScheduler], intervals: Mapping[str, str]) -> None:
        inner = {id(member) for outer in schedulers.values() for member in _members(outer)}
        self._schedulers = {
            path: scheduler for path, scheduler in schedulers.items() if id(scheduler) not in inner
        }
        self._check_names(intervals)
        self._intervals = {path: intervals.get(path, "step") for path in self._schedulers}
        for path, interval in self._intervals.items():
            self._check_interval(path, interval)
        self._positions: dict[str, Any] = {}
        self._moved: set[str] = set()
        self.remember()

    def _check_names(self, intervals: Mapping[str, str]) -> None:
        unknown = sorted(set(intervals) - set(self._schedulers))
        if unknown:
            raise ArgumentError(
                f"Model.scheduler_interval must name schedulers of the model "
                f"({sorted(self._schedulers)}), got {unknown}. Correct the names: an attribute's "
                "name, or attribute.member for one in a list or dict."
            )

    def _check_interval(self, path: str, interval: str) -> None:
        is_validation = interval.startswith(_VALIDATION) and len(interval) > len(_VALIDATION)
        if not is_validation and interval not in ("step", "epoch"):
            raise ArgumentError(
                f'Model.scheduler_interval[{path!r}] must be "step", "epoch" or '
                f'"validation:<metric>", got {interval!r}.'
            )
        if isinstance(self._schedulers[path], ReduceLROnPlateau) and not is_validation:
            raise ArgumentError(
                f"Model.scheduler_interval[{path!r}] must name a metric for a ReduceLROnPlateau, "
                f'got {interval!r}. Set scheduler_interval = {{{path!r}: "validation:<metric>"}} '
                "with a key of the validation scores."
            )

    @property
    def has_intervals_but_step(self) -> bool:
        """Whether anything was asked for that manual stepping ignores."""
        return any(interval != "step" for interval in self._intervals.values())

    def remember(self) -> None:
        """Note where the schedulers stand, after they were built or loaded."""
        for path, scheduler in self._schedulers.items():
            self._positions[path] = vars(scheduler).get("last_epoch")

    def after_step(self) -> None:
        """Move the schedulers that count optimizer steps."""
        for path, interval in self._intervals.items():
            if interval == "step":
                self._move(path)

    def after_epoch(self) -> None:
        """Move the schedulers that count epochs."""
        for path, interval in self._intervals.items():
            if interval == "epoch":
                self._move(path)

    def after_validation(self, scores: Mapping[str, Any]) -> None:
        """Move the schedulers that follow a metric.

        Raises:
            UsageError: if the scores lack the metric.
        """
        for path, interval in self._intervals.items():
            if interval.startswith(_VALIDATION):
                metric = interval[len(_VALIDATION) :]
                if metric not in scores:
                    raise UsageError(
                        f"Model.scheduler_interval[{path!r}] follows the metric {metric!r}, but "
                        f"the validation scores hold {sorted(map(str, scores))}. Put the metric "
                        "into self._val_scores, or correct its name."
                    )
                self._move(path, float(scores[metric]))

    def _move(self, path: str, *metric: float) -> None:
        scheduler = self._schedulers[path]
        found = vars(scheduler).get("last_epoch")
        if found != self._positions[path]:
            raise UsageError(
                f"The scheduler model.{path} was moved outside of the training loop (it stood at "
                f"{self._positions[path]}, now {found}). When train_step returns a loss, Helios "
                "moves the schedulers: remove your call of step(), or set Model.scheduler_interval."
            )
        with _no_false_alarm() if path not in self._moved else nullcontext():
            scheduler.step(*metric)  # type: ignore[arg-type]
        self._moved.add(path)
        self._positions[path] = vars(scheduler).get("last_epoch")
