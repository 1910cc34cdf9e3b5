"""Compares what a start was given with what its checkpoint says: parameters, arguments, settings.

The options of a checkpoint hold ``params``, the declared values of ``Trainer(params=...)``, and
``params_history``, a section for each time from which other values held; a checkpoint of an earlier
release has neither. Another value stops a resume.

Nothing else has to be declared, and no difference of it stops a resume: arguments of the model and
the data module are taken. Settings of optimizers and schedulers are part of their state, so the run
keeps those that it has, unless ``allow_changes`` names the optimizer. Attributes do not say what
they were given: a scheduler changes the groups of its optimizer, and keeps only a part of its own
arguments. So while ``setup`` runs, the constructors note it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.checkpoint.record import Record
from helios.core.declared_values import bind_arguments, describe_given
from helios.core.stored_values import ABSENT, ValueChange, compare_values, show_value, stored_params
from helios.errors import RunMismatchError
from helios.schedule import find_limit
from helios.startup.run_identity import is_extended, is_shortened
from helios.startup.trainer_options import PARAMS, Options, allows
from helios.state import Cursor, TrainingState
from helios.text import tuple_text

_LOGGER = logging.getLogger(__name__)

_KEY, _HISTORY = "params", "params_history"
_MOST_LISTED = 3


@dataclass(frozen=True)
class DeclaredParams:
    """The parameters of a start, compared with those of its checkpoint.

    Attributes:
        options: what the next checkpoints hold of them.
        changes: other values that the user has allowed.
        one_sided: names that only the run or only this start has.
    """

    options: dict[str, Any]
    changes: tuple[ValueChange, ...] = ()
    one_sided: tuple[ValueChange, ...] = ()

    @property
    def named(self) -> tuple[ValueChange, ...]:
        """All changes that the log names."""
        return (*self.changes, *self.one_sided)

    def report(self) -> list[str]:
        """Log what differs; returns the allowed changes as text, to be recorded."""
        texts = [f"{PARAMS}{each.name}: {each.values}" for each in self.changes]
        for text in texts:
            _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
        if self.one_sided:
            _LOGGER.info("Trainer(params=...) %s.", _describe_one_sided(self.one_sided))
        return texts


def _describe_one_sided(changes: Sequence[ValueChange]) -> str:
    new = [f"{each.name}={show_value(each.after)}" for each in changes if each.before is ABSENT]
    gone = [f"{each.name}={show_value(each.before)}" for each in changes if each.after is ABSENT]
    parts = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("adds", new), ("no longer has", gone))
        if names
    ]
    return " and ".join(parts)


def begin_params(params: Mapping[str, Any]) -> DeclaredParams:
    """Return the parameters of a new run."""
    return DeclaredParams({_KEY: dict(params), _HISTORY: [_section(params, None)]})


def compare_params(
    params: Mapping[str, Any],
    record: Record,
    options: Options,
    *,
    name: str,
    path: Path,
    is_finished: bool,
) -> DeclaredParams:
    """Compare the parameters of a start with those of its checkpoint.

    Args:
        params: those of this start.
        record: the checkpoint.
        options: says how far this start trains, and which changes are allowed.
        name: the name of the run.
        path: the file of the checkpoint.
        is_finished: whether the run has ended there.

    Raises:
        RunMismatchError: for other values that are not allowed; if nothing is left to train, none
            are, because the run would be labelled with what it was not trained with.
    """
    stored = record.options
    if _KEY not in stored:
        return DeclaredParams({_KEY: dict(params), _HISTORY: [_section(params, record)]})
    is_done = is_finished or has_ended(options, record)
    before = _params_at(options, stored) if is_done else stored_params(stored)
    found = compare_values(before, params)
    changes = tuple(each for each in found if each.is_contradiction)
    one_sided = tuple(each for each in found if not each.is_contradiction)
    if is_done:
        if changes:
            raise _refuse_relabelling(changes, name, path)
        return DeclaredParams({key: stored[key] for key in (_KEY, _HISTORY)}, (), one_sided)
    refused = [
        each
        for each in changes
        if not any(allows(known, each.name) for known in options.allow_changes)
    ]
    if refused:
        names = [f"{PARAMS}{each.name}" for each in refused]
        if len(names) > _MOST_LISTED:
            names = [PARAMS.removesuffix(".")]
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{_named(refused)}. Undo the change, or allow it with "
            f"Trainer(allow_changes={tuple_text(names)}) for a run that goes on with it. For a run "
            "of its own, pass another save_name."
        )
    history = list(stored[_HISTORY])
    if found:
        history = [each for each in history if not _is_here(each, record)]
        history.append(_section(params, record))
    return DeclaredParams({_KEY: dict(params), _HISTORY: history}, changes, one_sided)


def _named(changes: Sequence[ValueChange]) -> str:
    return "; ".join(f"{PARAMS}{each.name}: {each.values}" for each in changes)


def _refuse_relabelling(changes: Sequence[ValueChange], name: str, path: Path) -> RunMismatchError:
    return RunMismatchError(
        f"Nothing is left to train for the run {name!r} in {path.parent}, and it was trained with "
        f"other parameters: {_named(changes)}. Its weights and scores belong to the old values "
        f"({path.name}). Give a run with new values its own save_name, pass resume='never' to "
        "start this one again, or undo the change."
    )


def has_ended(options: Options, record: Record) -> bool:
    """Whether nothing is left to train, also if a kill has prevented the mark that says so."""
    state, cursor = TrainingState(**record.training_state), Cursor(**record.cursor)
    is_stopped = cursor.stop_reason and not is_extended(options, record.options)
    return bool(is_stopped or find_limit(options.schedule, state, cursor))


def _params_at(options: Options, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with which the run has reached the end of this start."""
    if not is_shortened(options, stored):
        return stored_params(stored)
    unit = "epoch" if options.schedule.is_by_epoch else "step"
    first, *later = stored[_HISTORY]
    held = [first, *(each for each in later if each[unit] < options.total_steps)]
    return stored_params(held[-1])


def _section(params: Mapping[str, Any], record: Record | None) -> dict[str, Any]:
    if record is None:
        place = {"iteration": 0, "epoch": 0, "step": 0}
    else:
        place = {
            "iteration": record.place[1],
            "epoch": record.cursor["epoch"],
            "step": record.training_state["current_iteration"],
        }
    return {**place, _KEY: dict(params)}


def _is_here(section: Mapping[str, Any], record: Record) -> bool:
    """Whether nothing was trained with the values of a section."""
    return bool(section["iteration"] >= record.place[1])


KEY = "found"
"""The entry of the options of a checkpoint that holds the values."""
OPTIMIZER = "optimizer"
"""The name in ``allow_changes`` that takes new settings of optimizers and schedulers."""

_ARGUMENTS, _SETTINGS = "arguments", "settings"
_OF_GROUP = re.compile(r"(.+)\.param_groups\.[0-9]+\.(.+)")


@dataclass(frozen=True)
class GivenValues:
    """What constructors were given at this start, compared with what the run has.

    Attributes:
        arguments: of the model and the data module, by name.
        settings: those of optimizers and schedulers that hold in the run.
        new_arguments: arguments that differ from those of the checkpoint.
        new_settings: settings that differ.
        adopts_settings: whether the run takes new settings.
        old_settings: those of the checkpoint; ``None`` if it says nothing of them.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    new_arguments: tuple[ValueChange, ...] = ()
    new_settings: tuple[ValueChange, ...] = ()
    adopts_settings: bool = False
    old_settings: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the next checkpoints hold of them."""
        return {KEY: {_ARGUMENTS: self.arguments, _SETTINGS: self.settings}}

    @property
    def all(self) -> dict[str, Any]:
        """All values that hold, by name."""
        return self.arguments | self.settings

    @property
    def named(self) -> tuple[ValueChange, ...]:
        """All changes that the log names."""
        return (*self.new_settings, *self.new_arguments)

    @property
    def changes(self) -> str:
        """All that differs, as text."""
        return _list(self.named)

    @property
    def are_settings_adopted(self) -> bool:
        """Whether this start takes settings of optimizers and schedulers from ``setup``."""
        return self.adopts_settings and (bool(self.new_settings) or self.old_settings is None)

    def report(self) -> list[str]:
        """Log what differs; returns taken settings as text, to be recorded."""
        if self.new_arguments:
            _LOGGER.info("Changed since the run began: %s.", _list(self.new_arguments))
        if self.are_settings_adopted:
            texts = [f"{each.name}: {each.values}" for each in self.new_settings]
            texts = texts or ["the settings of optimizers and schedulers, which were not stored"]
            _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", "; ".join(texts))
            return texts
        if not self.new_settings:
            return []
        shown = "; ".join(
            f"{each.name}: setup() has {show_value(each.after)}, the run keeps "
            f"{show_value(each.before)}"
            for each in self.new_settings
        )
        one = "value" if len(self.new_settings) == 1 else "values"
        _LOGGER.warning('%s; allow_changes=("%s",) takes the new %s', shown, OPTIMIZER, one)
        return []


def _list(changes: Sequence[ValueChange]) -> str:
    return ", ".join(f"{each.name} {each.values}" for each in changes)


def compare_given(
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    stored: Mapping[str, Any] | None,
    allowed: Sequence[str],
    *,
    is_over: bool,
) -> GivenValues:
    """Compare what constructors were given with what the checkpoint says.

    Args:
        arguments: those of the model and the data module.
        settings: those of optimizers and schedulers.
        stored: the options of the checkpoint; ``None`` for a new run.
        allowed: what ``allow_changes`` names.
        is_over: whether nothing is left to train, so that nothing is taken.
    """
    takes = OPTIMIZER in allowed and not is_over
    if stored is None or KEY not in stored:
        is_old = stored is not None
        return GivenValues(dict(arguments), dict(settings), adopts_settings=takes and is_old)
    before = stored[KEY]
    old = _with_groups(before[_SETTINGS], settings)
    new = _with_groups(settings, before[_SETTINGS])
    # Other versions of a library have other arguments, and nobody has changed anything.
    changed = [each for each in compare_values(old, new) if each.is_contradiction]
    kept = {} if takes else {each.name: each.before for each in changed}
    return GivenValues(
        dict(arguments),
        {**settings, **kept},
        tuple(compare_values(before[_ARGUMENTS], arguments)),
        tuple(changed),
        adopts_settings=takes,
        old_settings=dict(before[_SETTINGS]),
    )


def _with_groups(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of single groups that only the other side names apart."""
    found = dict(settings)
    for name in others.keys() - settings.keys():
        part = _OF_GROUP.fullmatch(name)
        if part is not None and f"{part[1]}.{part[2]}" in settings:
            found[name] = settings[f"{part[1]}.{part[2]}"]
    return found


_PARAMETERS = ("params", "param_names")


class ConstructorCalls:
    """What the constructors of optimizers and schedulers were given, by object."""

    def __init__(self) -> None:
        # With the objects, so that no other one gets their ids.
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._nested: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what all constructors are given in the block."""
        kinds: list[Any] = [*_find_kinds(Optimizer), *_find_kinds(LRScheduler)]
        with ExitStack() as stack:
            for kind in kinds:
                if "__init__" in vars(kind):
                    stack.callback(setattr, kind, "__init__", kind.__init__)
                    kind.__init__ = self._wrap(kind.__init__)
            yield

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def construct(part: Any, *args: Any, **kwargs: Any) -> None:
            # The constructor of a base is given what this class makes of its own arguments.
            is_outermost = id(part) not in self._given
            if is_outermost:
                given = bind_arguments(original, (part, *args), kwargs)
                self._given[id(part)] = part, self._describe(part, given)
            original(part, *args, **kwargs)
            if is_outermost and isinstance(part, Optimizer):
                self._add_groups(part)

        return construct

    def _describe(self, part: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments without the object, and what it moves: parameters or an optimizer."""
        num_left_out = 2 if isinstance(part, Optimizer) else 1
        own = dict(islice(given.items(), num_left_out, None))
        kept = {name: each for name, each in own.items() if not isinstance(each, Optimizer)}
        return describe_given(kept, self._convert)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            return value.item()
        if isinstance(value, LRScheduler) and id(value) in self._given:
            self._nested.add(id(value))
            return self._given[id(value)][1]
        return value

    def _add_groups(self, optimizer: Optimizer) -> None:
        """Add what single groups of parameters were given."""
        given = self._given[id(optimizer)][1]
        # A wrapper may have neither.
        defaults = getattr(optimizer, "defaults", {})
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            own = {
                name: value
                for name, value in group.items()
                if name not in _PARAMETERS and (name in given or name not in defaults)
            }
            described = describe_given(own, self._convert)
            common = {name: given[name] for name in described if name in given}
            for change in compare_values(common, described):
                given[f"param_groups.{number}.{change.name}"] = change.after

    def settings(self, parts: Mapping[str, object]) -> dict[str, Any]:
        """Return what optimizers and schedulers were given, as a flat table.

        Args:
            parts: the objects by path. What is inside another scheduler is found there.
        """
        return {
            f"{path}.{name}": value
            for path, part in parts.items()
            if id(part) in self._given and id(part) not in self._nested
            for name, value in self._given[id(part)][1].items()
        }

    def names_of(self, optimizer: Optimizer) -> set[str]:
        """Return the names of the arguments of an optimizer; none if it was made elsewhere."""
        _, given = self._given.get(id(optimizer), (None, {}))
        return {name.partition(".")[0] for name in given}


def _find_kinds(base: type) -> Iterator[type]:
    yield base
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield from _find_kinds(kind)
