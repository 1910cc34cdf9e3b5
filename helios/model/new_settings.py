"""Takes the settings that ``setup`` passes to optimizers and schedulers into a run under way.

A checkpoint holds the settings of the run, and loading restores them. Afterwards the groups of
optimizers and the schedulers get back what ``setup`` has made, and the schedulers step as often as
those of the run have, in the same order: the next step has the settings of a run that has had the
new ones from its beginning.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.core.utils import parameters_of, read_signature
from helios.errors import RunMismatchError
from helios.model.schedulers import Schedulers

_KEPT_OF_PLATEAU = ("last_epoch", "cooldown_counter")
_JUDGED_BY_MODE = ("best", "num_bad_epochs")
_REMEDY = (
    "Omit allow_changes, and assign the settings in on_training_resume, as "
    "docs/recipes/learning-rate.md shows."
)


@dataclass(frozen=True)
class _OfOptimizer:
    """What ``setup`` has made of an optimizer."""

    path: str
    optimizer: Optimizer
    groups: list[dict[str, Any]]
    members: list[set[int]]


class NewSettings:
    """The settings of optimizers and schedulers as ``setup`` made them; make it before a load.

    Args:
        optimizers: by path.
        schedulers: those of the model.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        schedulers: Schedulers,
    ) -> None:
        self._optimizers = [_copy_settings(path, part) for path, part in optimizers.items()]
        self._schedulers = schedulers
        self._states = {
            path: copy.deepcopy(part.state_dict()) for path, part in schedulers.outermost.items()
        }
        self._begun = {path: _count(part) for path, part in schedulers.outermost.items()}

    def apply(
        self, old_settings: Mapping[str, Any] | None, steps_at_end: Callable[[int], float] | None
    ) -> None:
        """Take the settings, after a checkpoint was loaded.

        Args:
            old_settings: those that the run began with, by name; ``None`` if unknown.
            steps_at_end: returns how many steps the first epochs have, given their number; ``None``
                if that is unknown.

        Raises:
            RunMismatchError: if the settings at this step cannot be known.
        """
        outermost = self._schedulers.outermost
        counts = {path: _count(part) - self._begun[path] for path, part in outermost.items()}
        plateaus = {
            path: part for path, part in outermost.items() if isinstance(part, ReduceLROnPlateau)
        }
        reductions = {
            path: self._count_reductions(part, old_settings) if counts[path] else 0
            for path, part in plateaus.items()
        }
        judged = {path: dict(vars(part)) for path, part in plateaus.items()}
        for each in self._optimizers:
            _put_back(each)
        for path, part in outermost.items():
            part.load_state_dict(self._states[path])
        with warnings.catch_warnings():
            # No optimizer steps in between, which PyTorch warns of.
            warnings.simplefilter("ignore")
            for path in self._order(counts, steps_at_end):
                outermost[path].step()
        for path, part in plateaus.items():
            _reduce(part, reductions[path])
            _keep_judgement(part, judged[path])

    def _order(
        self, counts: Mapping[str, int], steps_at_end: Callable[[int], float] | None
    ) -> Iterator[str]:
        """Yield the schedulers in the order in which those of the run have stepped."""
        outermost, intervals = self._schedulers.outermost, self._schedulers.intervals
        followed = [path for path in counts if not isinstance(outermost[path], ReduceLROnPlateau)]
        by_epoch = [path for path in followed if intervals[path] == "epoch"]
        by_step = [path for path in followed if intervals[path] == "step"]
        unknown = [path for path in followed if path not in (*by_epoch, *by_step) and counts[path]]
        if unknown:
            raise RunMismatchError(
                f'allow_changes=("optimizer",) cannot take new settings for model.{unknown[0]}, '
                f"which follows scores that are not stored. {_REMEDY}"
            )
        num_epochs = max((counts[path] for path in by_epoch), default=0)
        num_steps = max((counts[path] for path in by_step), default=0)
        if steps_at_end is None:
            steps_at_end = lambda epochs: epochs * num_steps / max(num_epochs, 1)  # noqa: E731
        epoch = 0
        for step in range(1, num_steps + 1):
            yield from (path for path in by_step if counts[path] >= step)
            while epoch < num_epochs and steps_at_end(epoch + 1) <= step:
                epoch += 1
                yield from (path for path in by_epoch if counts[path] >= epoch)
        for late in range(epoch + 1, num_epochs + 1):
            yield from (path for path in by_epoch if counts[path] >= late)

    def _count_reductions(
        self, plateau: ReduceLROnPlateau, old_settings: Mapping[str, Any] | None
    ) -> int:
        """Return how often a scheduler of the run has reduced the rate: its state does not say."""
        optimizer = plateau.optimizer
        path = next((each.path for each in self._optimizers if each.optimizer is optimizer), None)
        others = [
            part
            for part in self._schedulers.outermost.values()
            if part is not plateau and part.optimizer is optimizer
        ]
        found = []
        for number, group in enumerate(optimizer.param_groups):
            names = (f"{path}.param_groups.{number}.lr", f"{path}.lr")
            known = old_settings or {}
            old = next((known[name] for name in names if name in known), None)
            count = None if old is None or others else _find_count(plateau, number, float(old))
            if count is None:
                raise RunMismatchError(
                    'allow_changes=("optimizer",) cannot take new settings, because how often '
                    f"{type(plateau).__name__} has reduced the learning rate of group {number} is "
                    f"unknown: the rate began at {old} and is {float(group['lr'])}, or something "
                    f"else has set it, too. {_REMEDY}"
                )
            found.append(count)
        return max(found)


def setting_names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return which entries of a group are settings: some optimizers count there."""
    arguments = read_signature(type(optimizer).__init__).parameters
    counted = (*getattr(optimizer, "defaults", {}), "params", "param_names")
    return [name for name in group if name in {*arguments} - {"params"} or name not in counted]


def _copy_settings(path: str, optimizer: Optimizer) -> _OfOptimizer:
    groups = [
        {name: copy.deepcopy(group[name]) for name in setting_names(optimizer, group)}
        for group in optimizer.param_groups
    ]
    members = [set(map(id, group["params"])) for group in optimizer.param_groups]
    return _OfOptimizer(path, optimizer, groups, members)


def _put_back(made: _OfOptimizer) -> None:
    """Give the groups of an optimizer what ``setup`` has made; groups that training added stay."""
    now = [set(map(id, group["params"])) for group in made.optimizer.param_groups]
    if now[: len(made.members)] != made.members:
        raise RunMismatchError(
            f'allow_changes=("optimizer",) needs the groups of model.{made.path} as they were, but '
            f"its {len(parameters_of(made.optimizer))} parameters are in other groups, or in "
            f"another order. Build them in setup() in a fixed order. {_REMEDY}"
        )
    for group, settings in zip(made.optimizer.param_groups, made.groups, strict=False):
        group.update(settings)


def _count(scheduler: LRScheduler) -> int:
    """Return how often a scheduler has stepped; of a chained one, its members have."""
    members = vars(scheduler).get("_schedulers")
    if "last_epoch" not in vars(scheduler) and members:
        return _count(members[0])
    return int(vars(scheduler).get("last_epoch", 0))


def _find_count(plateau: ReduceLROnPlateau, number: int, rate: float) -> int | None:
    """Return how many reductions lead from a rate to that of a group; ``None`` if none do."""
    present = float(plateau.optimizer.param_groups[number]["lr"])
    count = 0
    while rate != present:
        lower = max(rate * plateau.factor, plateau.min_lrs[number])
        if not rate - lower > plateau.eps:
            return None
        rate, count = lower, count + 1
    return count


def _reduce(plateau: ReduceLROnPlateau, times: int) -> None:
    for _ in range(times):
        for group, least in zip(plateau.optimizer.param_groups, plateau.min_lrs, strict=True):
            rate = float(group["lr"])
            lower = max(rate * plateau.factor, least)
            if rate - lower > plateau.eps:
                _assign_rate(group, lower)


def _assign_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], float | int):
        group["lr"] = rate
    else:
        group["lr"].fill_(rate)


def _keep_judgement(plateau: ReduceLROnPlateau, before: Mapping[str, Any]) -> None:
    """Let a scheduler know the scores that it has seen, unless it judges them otherwise now."""
    is_alike = plateau.mode == before["mode"]
    names = (*_KEPT_OF_PLATEAU, *(_JUDGED_BY_MODE if is_alike else ()))
    vars(plateau).update({name: before[name] for name in names})
    rates = [float(group["lr"]) for group in plateau.optimizer.param_groups]
    vars(plateau).update(_last_lr=rates)


def steps_of_epochs(
    num_batches: int | None, num_in_window: int, *, is_by_epoch: bool
) -> Callable[[int], float] | None:
    """Return what returns the number of steps in the first epochs of a run.

    Args:
        num_batches: length of an epoch; ``None`` if unknown.
        num_in_window: batches in an accumulation window.
        is_by_epoch: whether a window ends with its epoch.
    """
    if num_batches is None:
        return None
    if is_by_epoch:
        return lambda epochs: epochs * math.ceil(num_batches / num_in_window)
    return lambda epochs: epochs * num_batches // num_in_window
