"""When schedulers step in automatic mode: per step, per epoch, or after a validation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.best import Mode
from helios.core.utils import read_signature
from helios.errors import ArgumentError, UsageError

_VALIDATION = "validation:"
_PERIODS = ("step_size", "milestones", "T_max", "T_0", "total_iters")


def members_of(scheduler: LRScheduler) -> tuple[Any, ...]:
    """Return the schedulers that one steps itself."""
    return tuple(vars(scheduler).get("_schedulers", ()))


def _inner(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    for member in members_of(scheduler):
        yield member
        yield from _inner(member)


def _position(scheduler: LRScheduler) -> Any:
    """Return the step count of a scheduler; for a chained one, those of its members."""
    position, members = vars(scheduler).get("last_epoch"), members_of(scheduler)
    return (position, *map(_position, members)) if members else position


def _takes_metric(scheduler: LRScheduler) -> bool:
    names = list(read_signature(scheduler.step).parameters)
    return bool(names) and names[0] != "epoch"


@contextmanager
def _no_false_alarm() -> Iterator[None]:
    # PyTorch warns about a scheduler that steps first after a resume at an epoch's end, because it
    # looks for an optimizer step in this process. The loop keeps the order anyway.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def find_epoch_like(
    schedulers: Mapping[str, LRScheduler], intervals: Mapping[str, str], num_epochs: float
) -> list[str]:
    """Return the schedulers without an interval whose periods look like numbers of epochs.

    Args:
        schedulers: by attribute path.
        intervals: those that the model sets.
        num_epochs: length of the run. A period that does not fit into it is one of steps; without
            an end, nothing can be said.
    """
    periods = {
        path: [number for name in _PERIODS for number in _numbers(vars(scheduler).get(name))]
        for path, scheduler in schedulers.items()
        if path not in intervals
    }
    return [
        path for path, found in periods.items() if found and max(found) <= num_epochs < math.inf
    ]


def _numbers(period: Any) -> list[float]:
    if isinstance(period, Mapping):  # the milestones of a MultiStepLR, each with its count
        return list(period)
    return [period] if isinstance(period, int | float) else []


class Schedulers:
    """The schedulers of a model, by attribute path, and when each of them steps.

    Args:
        schedulers: by path, as discovery finds them; those inside a chained or sequential one are
            stepped by it.
        intervals: ``{path: "step" | "epoch" | "validation:<metric>"}``, default ``"step"``.

    Raises:
        ArgumentError: for an interval of an unknown scheduler, an unknown interval, or a metric
            for a scheduler that takes none.

    Attributes:
        is_empty: whether there are no schedulers.
    """

    def __init__(self, schedulers: Mapping[str, LRScheduler], intervals: Mapping[str, str]) -> None:
        inner = {id(member) for outer in schedulers.values() for member in _inner(outer)}
        self._schedulers = {
            path: scheduler for path, scheduler in schedulers.items() if id(scheduler) not in inner
        }
        self.is_empty = not self._schedulers
        if not isinstance(intervals, Mapping):
            raise ArgumentError(
                "Model.scheduler_interval must say for each scheduler what it steps with, got "
                f"{intervals!r}. Set it to {dict.fromkeys(self._schedulers, 'epoch')!r}."
            )
        self._check_names(intervals)
        self._intervals = {path: intervals.get(path, "step") for path in self._schedulers}
        for path, interval in self._intervals.items():
            self._check_interval(path, interval)
        self._positions: dict[str, Any] = {}
        self._moved: set[str] = set()
        self._is_checked = False
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
        is_metric = str(interval).startswith(_VALIDATION) and interval != _VALIDATION
        if not is_metric and interval not in ("step", "epoch"):
            raise ArgumentError(
                f'Model.scheduler_interval[{path!r}] must be "step", "epoch" or '
                f'"validation:<metric>", got {interval!r}. Correct the interval.'
            )
        scheduler = self._schedulers[path]
        if is_metric and not _takes_metric(scheduler):
            raise ArgumentError(
                f'Model.scheduler_interval[{path!r}] must be "step" or "epoch" for a '
                f"{type(scheduler).__name__}, which takes no metric, got {interval!r}. Correct the "
                "interval."
            )

    def _check_plateaus(self) -> None:
        # Not before the first automatic step: a model that steps itself needs no interval.
        for path, interval in self._intervals.items():
            is_plateau = isinstance(self._schedulers[path], ReduceLROnPlateau)
            if is_plateau and interval in ("step", "epoch"):
                raise ArgumentError(
                    f"Model.scheduler_interval[{path!r}] must name a metric for a "
                    f"ReduceLROnPlateau, got {interval!r}. Set scheduler_interval = "
                    f'{{{path!r}: "validation:<metric>"}} with a key of the validation scores.'
                )

    def find_plateaus(self) -> Iterator[tuple[str, str, Mode]]:
        """Yield each ``ReduceLROnPlateau`` that follows a metric: its path, metric and mode."""
        for path, interval in self._intervals.items():
            scheduler = self._schedulers[path]
            if interval.startswith(_VALIDATION) and isinstance(scheduler, ReduceLROnPlateau):
                yield path, interval[len(_VALIDATION) :], scheduler.mode

    @property
    def outermost(self) -> Mapping[str, LRScheduler]:
        """The schedulers by path, without those that another one steps."""
        return self._schedulers

    @property
    def intervals(self) -> Mapping[str, str]:
        """When each of them steps in automatic mode."""
        return self._intervals

    @property
    def has_intervals_but_step(self) -> bool:
        """Whether an interval is set that has no effect in manual mode."""
        return any(interval != "step" for interval in self._intervals.values())

    def remember(self) -> None:
        """Record the step counts of the schedulers, after they were built or loaded."""
        for path, scheduler in self._schedulers.items():
            self._positions[path] = _position(scheduler)

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Step the schedulers that count optimizer steps.

        Args:
            optimizer: step only those of this optimizer, which has just stepped.

        Raises:
            ArgumentError: at the first step, for a plateau scheduler without a metric.
        """
        if not self._is_checked:
            self._check_plateaus()
            self._is_checked = True
        for path, interval in self._intervals.items():
            is_meant = optimizer is None or self._schedulers[path].optimizer is optimizer
            if interval == "step" and is_meant:
                self._move(path)

    def after_epoch(self) -> None:
        """Step the schedulers that count epochs."""
        for path, interval in self._intervals.items():
            if interval == "epoch":
                self._move(path)

    def after_validation(self, scores: Mapping[str, Any]) -> None:
        """Step the schedulers that follow a metric.

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
                        "into self.val_scores, or correct its name."
                    )
                self._move(path, float(scores[metric]))

    def _move(self, path: str, *metric: float) -> None:
        scheduler = self._schedulers[path]
        found = _position(scheduler)
        if found != self._positions[path]:
            raise UsageError(
                f"The scheduler model.{path} was stepped outside the training loop (its count was "
                f"{self._positions[path]}, now {found}). When train_step returns a loss, Helios "
                "steps the schedulers: remove your call of step(), or set Model.scheduler_interval."
            )
        with _no_false_alarm() if path not in self._moved else nullcontext():
            scheduler.step(*metric)  # type: ignore[arg-type]
        self._moved.add(path)
        self._positions[path] = _position(scheduler)
