"""Compares what constructors were given with what the checkpoint says, and says the differences.

Nothing of this has to be declared, and no difference stops a resume. Arguments of the model and the
data module are taken. Settings of optimizers and schedulers are part of their state, so the run
keeps those that it has, unless ``allow_changes`` names the optimizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helios.core.stored_values import ValueChange, compare_values, show_value

_LOGGER = logging.getLogger(__name__)

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
