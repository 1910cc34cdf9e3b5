"""When schedulers step in automatic mode, and how an existing run takes new settings of ``setup``.

A checkpoint holds the settings of optimizers and schedulers, and loading restores them.
:class:`NewSettings` then restores the settings of ``setup``, and steps the schedulers as often as
those of the run: the next step has the settings of a run that had the new ones from its beginning.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.best import Mode
from helios.core.utils import read_signature
from helios.errors import ArgumentError, RunMismatchError, UsageError

_VALIDATION = "validation:"
# A step with them needs state that steps without them do not make.
_WITH_STATE = ((Optimizer, "amsgrad"), (RMSprop, "centered"), (RMSprop, "momentum"))
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
        num_epochs: length of the run. A longer period counts steps; without a length, all are
            unknown.
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
                "Model.scheduler_interval must be a dict {scheduler: interval}, got "
                f"{intervals!r}. Set it to {dict.fromkeys(self._schedulers, 'epoch')!r}."
            )
        unknown = sorted(set(intervals) - set(self._schedulers))
        if unknown:
            raise ArgumentError(
                f"Model.scheduler_interval must name schedulers of the model "
                f"({sorted(self._schedulers)}), got {unknown}. Pass names of "
                "attributes, or attribute.member for a scheduler in a list or dict."
            )
        self._intervals = {path: intervals.get(path, "step") for path in self._schedulers}
        for path, interval in self._intervals.items():
            self._check_interval(path, interval)
        self._positions: dict[str, Any] = {}
        self._moved: set[str] = set()
        self._is_checked = False
        self.remember()

    def _check_interval(self, path: str, interval: str) -> None:
        is_metric = str(interval).startswith(_VALIDATION) and interval != _VALIDATION
        if not is_metric and interval not in ("step", "epoch"):
            raise ArgumentError(
                f'Model.scheduler_interval[{path!r}] must be "step", "epoch" or '
                f'"validation:<metric>", got {interval!r}. Pass one of these.'
            )
        scheduler = self._schedulers[path]
        if is_metric and not _takes_metric(scheduler):
            raise ArgumentError(
                f'Model.scheduler_interval[{path!r}] must be "step" or "epoch" for a '
                f"{type(scheduler).__name__}, which takes no metric, got {interval!r}. Pass one "
                "of these."
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
                        f"the validation scores are {sorted(map(str, scores))}. Log the metric "
                        "with self.log in valid_step, or name one of these."
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


class NewSettings:
    """The settings of optimizers and schedulers as ``setup`` made them; make it before a load.

    Args:
        optimizers: by path.
        schedulers: those of the model.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Schedulers) -> None:
        self._optimizers = optimizers
        self._groups = {path: _copy_groups(part) for path, part in optimizers.items()}
        self._members = {path: _members(part) for path, part in optimizers.items()}
        self._intervals = schedulers.intervals
        self._schedulers = schedulers.outermost
        self._states = {
            path: copy.deepcopy(part.state_dict()) for path, part in self._schedulers.items()
        }
        self._begun = {path: _count(part) for path, part in self._schedulers.items()}

    def apply(self) -> None:
        """Take the settings, after a checkpoint was loaded.

        Raises:
            RunMismatchError: if the settings at this step are unknown, or lack state.
        """
        counts = {path: _count(part) - self._begun[path] for path, part in self._schedulers.items()}
        for path, optimizer in self._optimizers.items():
            self._require_known_steps(optimizer, counts)
            self._put_back(path, optimizer)
        for path, part in self._schedulers.items():
            part.load_state_dict(self._states[path])
        with warnings.catch_warnings():
            # No optimizer steps in between, which PyTorch warns of.
            warnings.simplefilter("ignore")
            for number in range(max(counts.values(), default=0)):
                for path, part in self._schedulers.items():
                    if number < counts[path]:
                        part.step()

    def _require_known_steps(self, optimizer: Optimizer, counts: Mapping[str, int]) -> None:
        """Refuse schedulers whose steps nothing tells, such as those that follow scores."""
        followed: dict[str, str] = {}
        for path, part in self._schedulers.items():
            if counts[path] and part.optimizer is optimizer:
                is_plateau = isinstance(part, ReduceLROnPlateau)
                followed[path] = "scores" if is_plateau else self._intervals[path]
        if {*followed.values()} not in ({"step"}, {"epoch"}, set()):
            names = ", ".join(f"model.{path}" for path in followed)
            raise _refuse(f"it is unknown when {names} would have stepped")

    def _put_back(self, path: str, optimizer: Optimizer) -> None:
        """Give groups what ``setup`` has made; those that training has added stay."""
        made = self._members[path]
        if _members(optimizer)[: len(made)] != made:
            raise _refuse(f"setup() puts the parameters of model.{path} into other groups")
        for group, settings in zip(optimizer.param_groups, self._groups[path], strict=False):
            for kind, name in _WITH_STATE:
                if isinstance(optimizer, kind) and settings.get(name) and not group.get(name):
                    raise _refuse(f"the steps so far have no state for {name} of model.{path}")
            group.update(settings)


def setting_names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return which entries of a group are settings: some optimizers count there."""
    arguments = read_signature(type(optimizer).__init__).parameters
    counted = (*getattr(optimizer, "defaults", {}), "params", "param_names")
    return [name for name in group if name in {*arguments} - {"params"} or name not in counted]


def _copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    own = [{name: each[name] for name in setting_names(optimizer, each)} for each in groups]
    # At once, since groups may share a tensor.
    return copy.deepcopy(own)


def _members(optimizer: Optimizer) -> list[set[int]]:
    return [{*map(id, group["params"])} for group in optimizer.param_groups]


def _count(scheduler: LRScheduler) -> int:
    """Return how often a scheduler has stepped; of a chained one, its members have."""
    position = vars(scheduler).get("last_epoch")
    return _count(members_of(scheduler)[0]) if position is None else position


def _refuse(reason: str) -> RunMismatchError:
    return RunMismatchError(
        f'allow_changes=("optimizer",) cannot take new settings: {reason}. Omit allow_changes, and '
        "assign the settings in on_training_resume, as docs/recipes/learning-rate.md shows."
    )
