"""Takes the settings that ``setup`` passes to optimizers and schedulers into a run under way.

A checkpoint holds the settings of the run, and loading restores them. Afterwards the groups of
optimizers and the schedulers get back what ``setup`` has made, and the schedulers step as often as
those of the run have: the next step has the settings of a run that has had the new ones from its
beginning.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.core.utils import read_signature
from helios.errors import RunMismatchError
from helios.model.schedulers import Schedulers, members_of

# What a plateau knows of the scores.
_SEEN = ("best", "num_bad_epochs", "last_epoch", "cooldown_counter")
_MOST = 1000
# A step with them needs state that steps without them do not make.
_WITH_STATE = ((Optimizer, "amsgrad"), (RMSprop, "centered"), (RMSprop, "momentum"))


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

    def apply(self, old_settings: Mapping[str, Any]) -> None:
        """Take the settings, after a checkpoint was loaded.

        Args:
            old_settings: those that the run began with, by name; empty if unknown.

        Raises:
            RunMismatchError: if the settings at this step cannot be known, or lack state.
        """
        counts = {path: _count(part) - self._begun[path] for path, part in self._schedulers.items()}
        plateaus = {
            path: part
            for path, part in self._schedulers.items()
            if isinstance(part, ReduceLROnPlateau) and counts[path]
        }
        followed = {path: count for path, count in counts.items() if path not in plateaus}
        reductions = {
            path: self._count_reductions(part, old_settings) for path, part in plateaus.items()
        }
        self._require_known_steps([path for path, count in followed.items() if count])
        for path, optimizer in self._optimizers.items():
            self._put_back(path, optimizer)
        for path, part in self._schedulers.items():
            seen = {name: vars(part)[name] for name in _SEEN} if path in plateaus else {}
            part.load_state_dict(self._states[path] | seen)
        with warnings.catch_warnings():
            # No optimizer steps in between, which PyTorch warns of.
            warnings.simplefilter("ignore")
            for number in range(max(followed.values(), default=0)):
                for path in followed:
                    if number < followed[path]:
                        self._schedulers[path].step()
        for path, plateau in plateaus.items():
            rates = _reduce(plateau, _rates(plateau), reductions[path])
            for group, rate in zip(plateau.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _require_known_steps(self, moved: Sequence[str]) -> None:
        """Refuse schedulers of one optimizer whose order is not stored."""
        for path, optimizer in self._optimizers.items():
            parts = [part for part in moved if self._schedulers[part].optimizer is optimizer]
            if {self._intervals[part] for part in parts} not in ({"step"}, {"epoch"}, set()):
                raise _refuse(f"it is unknown when {', '.join(parts)} of model.{path} have stepped")

    def _count_reductions(self, plateau: ReduceLROnPlateau, old: Mapping[str, Any]) -> int:
        """Return how often a scheduler has reduced the rates: its state does not say."""
        path = next(p for p, part in self._optimizers.items() if part is plateau.optimizer)
        numbers = range(len(plateau.optimizer.param_groups))
        held = [old.get(f"{path}.param_groups.{n}.lr", old.get(f"{path}.lr")) for n in numbers]
        begun = [math.nan if rate is None else rate for rate in held]
        now = _rates(plateau)
        count = next((n for n in range(_MOST) if _reduce(plateau, begun, n) == now), None)
        if count is None:
            raise _refuse(
                f"it is unknown how often {type(plateau).__name__} has reduced the learning rates, "
                f"which began at {begun} and are {now}"
            )
        return count

    def _put_back(self, path: str, optimizer: Optimizer) -> None:
        """Give groups what ``setup`` has made; those that training has added stay."""
        made = self._members[path]
        if _members(optimizer)[: len(made)] != made:
            raise _refuse(f"setup() puts the parameters of model.{path} into other groups")
        for group, settings in zip(optimizer.param_groups, self._groups[path], strict=False):
            for kind, name in _WITH_STATE:
                if isinstance(optimizer, kind) and settings.get(name) and not group[name]:
                    raise _refuse(f"the steps so far have no state for {name} of model.{path}")
            group.update(settings)


def setting_names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return which entries of a group are settings: some optimizers count there."""
    arguments = read_signature(type(optimizer).__init__).parameters
    counted = (*getattr(optimizer, "defaults", {}), "params", "param_names")
    return [name for name in group if name in {*arguments} - {"params"} or name not in counted]


def _copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: copy.deepcopy(group[name]) for name in setting_names(optimizer, group)}
        for group in optimizer.param_groups
    ]


def _members(optimizer: Optimizer) -> list[set[int]]:
    return [{*map(id, group["params"])} for group in optimizer.param_groups]


def _count(scheduler: LRScheduler) -> int:
    """Return how often a scheduler has stepped; of a chained one, its members have."""
    position = vars(scheduler).get("last_epoch")
    return _count(members_of(scheduler)[0]) if position is None else position


def _rates(plateau: ReduceLROnPlateau) -> list[float]:
    return [float(group["lr"]) for group in plateau.optimizer.param_groups]


def _reduce(plateau: ReduceLROnPlateau, rates: list[float], times: int) -> list[float]:
    for _ in range(times):
        lower = [max(r * plateau.factor, m) for r, m in zip(rates, plateau.min_lrs, strict=False)]
        rates = [x if r - x > plateau.eps else r for r, x in zip(rates, lower, strict=False)]
    return rates


def _refuse(reason: str) -> RunMismatchError:
    return RunMismatchError(
        f'allow_changes=("optimizer",) cannot take new settings: {reason}. Omit allow_changes, and '
        "assign the settings in on_training_resume, as docs/recipes/learning-rate.md shows."
    )
