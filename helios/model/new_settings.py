"""Takes the settings that ``setup`` passes to optimizers and schedulers into a run under way.

A checkpoint holds the settings of the run, and loading restores them. Afterwards the groups of
optimizers and the schedulers get back what ``setup`` has made, and the schedulers step as often as
those of the run have: the next step has the settings of a run that has had the new ones from its
beginning.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from helios.core.utils import read_signature
from helios.errors import RunMismatchError
from helios.model.schedulers import Schedulers, members_of

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

    def apply(self) -> None:
        """Take the settings, after a checkpoint was loaded.

        Raises:
            RunMismatchError: if the settings at this step cannot be known, or lack state.
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
