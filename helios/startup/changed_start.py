"""Compares this start with the one that wrote its checkpoint: what is declared, and what is found.

``Trainer(params=...)`` declares; another value stops a start. Found is what both have made, read
right after ``setup`` and before anything is loaded: plain values (attributes of the model, the data
module and plugins, settings of optimizers and schedulers) and digests of the methods that a
training calls. It is the entry ``found`` in the options of a checkpoint; see docs/state.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded
from helios.core.code_digest import (
    digest_function,
    digest_methods,
    own_classes,
    python_version,
)
from helios.core.plain_values import plain_values
from helios.core.stored_values import ValueChange, compare_values, show_value, stored_params
from helios.data.datamodule import DataModule
from helios.errors import RunMismatchError
from helios.ledger.run_file import without_secrets
from helios.model.model import Model
from helios.model.new_settings import setting_names
from helios.plugins.plugin import Plugin
from helios.startup.run_identity import is_shortened
from helios.startup.signal_policy import is_interactive
from helios.startup.trainer_options import PARAMS, Options, allows
from helios.state_graph.owner_states import internals_of
from helios.state_graph.values import attributes_of
from helios.text import tuple_text

_LOGGER = logging.getLogger(__name__)

PARAMS_KEY = "params"
"""The entry of the options of a checkpoint that holds what is declared."""
KEY = "found"
"""The entry of the options of a checkpoint that holds what was found."""
OPTIMIZER = "optimizer"
"""The name in ``allow_changes`` that takes new settings of optimizers and schedulers."""

_MOST_LISTED = 3
_SCHEDULERS = "schedulers"
# Attributes of ours that users set to choose how a model trains.
_CHOSEN = {"scheduler_interval", "train_mode"}
# The guarantee says that they change no bit.
_HARMLESS = {"num_workers", "pin_memory", "prefetch_factor", "persistent_workers"}
# What a scheduler computes from the groups of its optimizer, and where it is.
_POSITION = {"base_lrs", "_last_lr", "last_epoch", "_step_count"}


@dataclass(frozen=True)
class FreshStart:
    """What a start has made before anything is loaded.

    Attributes:
        values: plain attributes, by name.
        settings: of optimizers and schedulers, by name.
        code: a digest of each method, by owner and name.
        classes: of the owners of methods.
    """

    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)


def read_fresh(
    model: Model,
    datamodule: DataModule,
    plugins: Mapping[str, Plugin],
    owners: Mapping[str, object],
) -> FreshStart:
    """Read what ``setup`` has made.

    Args:
        model: the model.
        datamodule: the data module.
        plugins: by id.
        owners: what else has methods that a training calls, by name.
    """
    holders: dict[str, Any] = {"model": model, "data": datamodule}
    holders |= {f"plugins.{name}": plugin for name, plugin in plugins.items()}
    values = {
        name: each for prefix, part in holders.items() for name, each in _values(prefix, part)
    }
    called = {"model": model, "model.batch_processor": model.batch_processor, **owners}
    classes = {name: type(part) for name, part in called.items()}
    code = {name: digest_methods(kind) for name, kind in classes.items()}
    code[_SCHEDULERS] = dict(_functions(model))
    settings = dict(_settings(model))
    return FreshStart(
        without_secrets(values),
        without_secrets(settings),
        {name: methods for name, methods in code.items() if methods},
        classes,
    )


def _values(prefix: str, part: Any) -> Iterator[tuple[str, Any]]:
    left_out = (internals_of(part) - _CHOSEN) | {"unsaved"} | _HARMLESS
    declared = tuple(part.unsaved)
    members: dict[str, Any] = {}
    for kind in reversed([*own_classes(type(part))]):
        members |= {
            name: each
            for name, each in vars(kind).items()
            if not name.startswith("__") and not isinstance(each, FunctionType)
        }
    for name, value in (members | attributes_of(part)).items():
        if name not in left_out:
            for path, each in plain_values(name, value):
                if not any(f"{path}.".startswith(f"{other}.") for other in declared):
                    yield f"{prefix}.{path}", each


def _settings(model: Model) -> Iterator[tuple[str, Any]]:
    for path, optimizer in model.discovery.optimizers().items():
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            prefix = path if len(groups) == 1 else f"{path}.param_groups.{number}"
            for name in setting_names(optimizer, group):
                if name != "initial_lr":
                    # A scheduler has changed it already.
                    value = group.get("initial_lr", group[name]) if name == "lr" else group[name]
                    yield from plain_values(f"{prefix}.{name}", _item(value))
    for path, scheduler in _schedulers(model):
        for name, value in vars(scheduler).items():
            if name not in _POSITION:
                plain = sorted(value.elements()) if isinstance(value, Counter) else _item(value)
                yield from plain_values(f"{path}.{name.strip('_')}", plain)


def _functions(model: Model) -> Iterator[tuple[str, str]]:
    """Yield a digest of each function that a scheduler calls, such as those of ``LambdaLR``."""
    for path, scheduler in _schedulers(model):
        for name, value in vars(scheduler).items():
            for number, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, FunctionType | partial):
                    yield f"{path}.{name}.{number}", digest_function(each)


def _schedulers(model: Model) -> Iterator[tuple[str, LRScheduler]]:
    """Yield all schedulers by path; one that is inside another one, below it."""
    found = model.discovery.schedulers()
    inner = {id(each) for part in found.values() for each in _members(part)}
    waiting = [(path, part) for path, part in found.items() if id(part) not in inner]
    while waiting:
        path, part = waiting.pop(0)
        yield path, part
        waiting += ((f"{path}.schedulers.{n}", each) for n, each in enumerate(_members(part)))


def _members(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    found: Sequence[LRScheduler] = vars(scheduler).get("_schedulers", ())
    return found


def _item(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if is_number else value


@dataclass(frozen=True)
class StartChanges:
    """What differs between two starts.

    Attributes:
        options: what the next checkpoints hold of this one.
        params: declared values that differ.
        values: attributes that differ.
        settings: settings of optimizers and schedulers that differ from those of the run.
        repeated: names of those that the last start had already, and the run did not take.
        code: methods that differ, each with what is known of it.
        has_new_functions: whether functions of schedulers are among them.
        adopts: whether the run takes settings of ``setup``, because the user allows it.
        old_settings: settings that the run has had so far; ``None`` if they are unknown.
        is_over: whether nothing is left to train.
    """

    options: dict[str, Any] = field(default_factory=dict)
    params: Sequence[ValueChange] = ()
    values: tuple[ValueChange, ...] = ()
    settings: tuple[ValueChange, ...] = ()
    repeated: frozenset[str] = frozenset()
    code: tuple[str, ...] = ()
    has_new_functions: bool = False
    adopts: bool = False
    old_settings: dict[str, Any] | None = None
    is_over: bool = False

    @property
    def all_values(self) -> dict[str, Any]:
        """All values that hold, by name."""
        found = self.options.get(KEY, {})
        return {**found.get("settings", {}), **found.get("kept", {}), **found.get("values", {})}

    @property
    def are_settings_adopted(self) -> bool:
        """Whether this start takes settings of optimizers and schedulers from ``setup``."""
        is_other = bool(self.settings) or self.has_new_functions
        return self.adopts and (is_other or self.old_settings is None)

    def report(self) -> list[str]:
        """Warn of all that differs; returns what takes effect, to be recorded."""
        named = (*self.params, *self.settings, *self.values)
        lines = [*map(self._line, _joined(named)), *self.code]
        if lines:
            begin = "Changed since the checkpoint"
            if self.is_over:
                begin = "The run was trained with other values or other code"
            _LOGGER.warning("%s:%s", begin, "".join(f"\n  {line}" for line in lines))
        kept = () if self.adopts else self.settings
        taken = [f"{each.name}: {each.values}" for each in named if each not in kept]
        return [] if self.is_over else [*taken, *self.code]

    def _line(self, changes: Sequence[ValueChange]) -> str:
        text, is_setting = _text(changes), any(each in self.settings for each in changes)
        if is_setting and not self.adopts and not self.is_over:
            return (
                f"{text} in setup(); the run keeps {show_value(changes[0].before)} "
                f'(allow_changes=("{OPTIMIZER}",) takes the new one)'
            )
        is_param = changes[0] in self.params and changes[0].is_contradiction
        return f"{text}, as allowed" if is_param or (is_setting and self.adopts) else text


def _text(changes: Sequence[ValueChange]) -> str:
    return f"{', '.join(each.name for each in changes)}: {changes[0].values}"


def _joined(changes: Sequence[ValueChange]) -> list[list[ValueChange]]:
    """Join changes of the same two numbers: an argument, and the settings that follow from it."""
    found: dict[str, list[ValueChange]] = {}
    for each in changes:
        numbers = (each.before, each.after)
        is_plain = all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers)
        found.setdefault(repr(numbers) if is_plain else each.name, []).append(each)
    return [*found.values()]


def compare_fresh(
    fresh: FreshStart,
    record: Record | None,
    params: Sequence[ValueChange],
    allowed: Sequence[str],
    *,
    is_over: bool,
) -> StartChanges:
    """Compare what a start has made with what is known of the one that wrote its checkpoint.

    Args:
        fresh: what this start has made.
        record: the checkpoint; ``None`` for a new run.
        params: declared values that differ.
        allowed: what ``allow_changes`` names.
        is_over: whether nothing is left to train, so that nothing is taken.
    """
    adopts = OPTIMIZER in allowed and not is_over
    before = None if record is None else record.options.get(KEY)
    if record is None or before is None:
        adopts &= record is not None
        return StartChanges(_as_options(fresh, {}), params, adopts=adopts, is_over=is_over)
    held = {**before["settings"], **before["kept"]}
    # Other versions of a library have other settings, and nobody has changed anything.
    settings = [each for each in compare_values(held, fresh.settings) if each.is_contradiction]
    kept = {} if adopts else {each.name: each.before for each in settings}
    state = _names_of_state(record)
    values = [
        each
        for each in compare_values(before["values"], fresh.values)
        if not any(f"{each.name}.".startswith(name) for name in state)
    ]
    code = before["code"] if before["python"] == python_version() else {}
    return StartChanges(
        _as_options(fresh, kept),
        params,
        tuple(values),
        tuple(settings),
        frozenset(
            each.name for each in settings if before["settings"].get(each.name) == each.after
        ),
        tuple(_compare_code(code, fresh)),
        bool(code) and code.get(_SCHEDULERS) != fresh.code.get(_SCHEDULERS),
        adopts=adopts,
        old_settings=held,
        is_over=is_over,
    )


def _as_options(fresh: FreshStart, kept: Mapping[str, Any]) -> dict[str, Any]:
    found = {"values": fresh.values, "settings": fresh.settings, "kept": dict(kept)}
    return {KEY: {**found, "code": fresh.code, "python": python_version()}}


def _names_of_state(record: Record) -> set[str]:
    """Return the attributes that training has changed: the checkpoint has them."""
    states: dict[str, Any] = {"model": record.model}
    for name, state in record.owners.items():
        plugin = name.removeprefix("plugin ")
        states[name if plugin == name else f"plugins.{plugin[1:-1]}"] = state
    found: set[str] = set()
    for prefix, state in states.items():
        values = state.get("values") if isinstance(state, Mapping) else None
        nodes = values.get("nodes", {}) if isinstance(values, Mapping) else {}
        names = [*nodes, *nodes.get("", {}).get("set", {})]
        found |= {f"{prefix}.{name.partition('.')[0]}." for name in names if name}
    return found


def _compare_code(before: Mapping[str, Mapping[str, str]], fresh: FreshStart) -> Iterator[str]:
    for owner, methods in fresh.code.items():
        kind, old = fresh.classes.get(owner, object), before.get(owner, methods)
        is_cell = is_interactive() and kind.__module__ == "__main__"
        for name in dict.fromkeys([*old, *methods]):
            if old.get(name) != methods.get(name):
                text = name if owner == _SCHEDULERS else f"{kind.__name__}.{name}()"
                what = "is new" if name not in old else "has other code"
                what = what if name in methods else "is gone"
                yield f"{text} {what}{', in an edited cell' if is_cell else ''}"


def compare_params(
    params: Mapping[str, Any],
    loaded: Loaded,
    options: Options,
    *,
    name: str,
    is_over: bool,
) -> list[ValueChange]:
    """Return in what ``Trainer(params=...)`` differs from its checkpoint.

    Args:
        params: those of this start.
        loaded: the checkpoint.
        options: says how far this start trains, and which changes are allowed.
        name: the name of the run.
        is_over: whether nothing is left to train.

    Raises:
        RunMismatchError: for other values that are not allowed. If nothing is left to train, none
            are, but for a start that the run has passed, as a script in stages has them.
    """
    stored = loaded.record.options
    if PARAMS_KEY not in stored:
        return []
    tables = [
        {f"{PARAMS}{key}": value for key, value in table.items()}
        for table in (stored_params(stored), params)
    ]
    found = compare_values(*tables)
    changes = [each for each in found if each.is_contradiction]
    refused = [
        each
        for each in changes
        if not any(allows(known, each.name) for known in options.allow_changes)
    ]
    if is_over and (refused or (changes and not is_shortened(options, stored))):
        raise _refuse_relabelling(map(_text, _joined(changes)), name, loaded.path)
    if refused:
        names = [each.name for each in refused] if len(refused) <= _MOST_LISTED else [PARAMS_KEY]
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{'; '.join(_text([each]) for each in refused)}. Undo the change, or allow it with "
            f"Trainer(allow_changes={tuple_text(names)}) for a run that goes on with it. For a run "
            "of its own, pass another save_name."
        )
    return [each for each in found if not (is_over and each.is_contradiction)]


def refuse_other_values(changes: StartChanges, name: str, path: Path) -> None:
    """Refuse a start that trains nothing, and differs from the run whose scores it would show.

    Args:
        changes: what differs.
        name: the name of the run.
        path: the file of its last checkpoint.

    Raises:
        RunMismatchError: if values differ, except those that only one of both has, and paths; in an
            interactive session, where somebody has just edited it, also if code does.
    """
    values = [
        each
        for each in (*changes.settings, *changes.values)
        if each.is_contradiction
        and each.name not in changes.repeated
        and not _are_paths(each)
        # Many of them only watch.
        and not each.name.startswith("plugins.")
    ]
    code = changes.code if is_interactive() else ()
    if values or code:
        texts = [*map(_text, _joined(values)), *code]
        raise _refuse_relabelling(texts, name, path)


def _refuse_relabelling(texts: Iterable[str], name: str, path: Path) -> RunMismatchError:
    return RunMismatchError(
        f"Nothing is left to train for the run {name!r} in {path.parent}, and it was trained with "
        f"something else: {'; '.join(texts)}. Its weights and scores belong to the old values "
        f"({path.name}). Give a run with new ones its own save_name, pass resume='never' to start "
        "this one again, or undo the change. An attribute that does not matter can be declared: "
        "unsaved = (...,)."
    )


def _are_paths(change: ValueChange) -> bool:
    """Whether a folder was only moved: another machine may have it elsewhere."""
    both = (change.before, change.after)
    return all(isinstance(each, str) and Path(each).is_absolute() for each in both)
