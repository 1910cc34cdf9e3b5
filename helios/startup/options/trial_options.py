"""Options of quick trials: a sanity check before training, and short passes over data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helios.errors import ArgumentError
from helios.plugins.plugin import Plugin
from helios.startup.options.validators import refusal
from helios.state import Phase


@dataclass(frozen=True)
class TrialOptions:
    """How much of the data is used; see ``Trainer`` for the meaning of each field.

    Attributes:
        batch_limits: a dictionary once checked, empty for no limits.
    """

    sanity_steps: int
    batch_limits: Any

    def __post_init__(self) -> None:
        if type(self.sanity_steps) is not int or self.sanity_steps < 0:
            rule = "a non-negative int"
            raise refusal("sanity_steps", rule, self.sanity_steps, "Pass 0 for no check.")
        limits = {} if self.batch_limits is None else self.batch_limits
        is_table = isinstance(limits, Mapping) and all(isinstance(key, Phase) for key in limits)
        if not is_table or not all(map(_is_limit, limits.values())):
            rule = "None, or phases with a positive int each"
            remedy = "Pass e.g. {Phase.TRAINING: 10}."
            raise refusal("batch_limits", rule, self.batch_limits, remedy)
        object.__setattr__(self, "batch_limits", dict(limits))

    def limit_of(self, phase: Phase, plugins: Mapping[str, Plugin]) -> int | None:
        """Return the maximum number of batches of a pass, as set by the option or a plugin.

        Raises:
            ArgumentError: if a plugin sets anything but a positive int.
        """
        limits = [self.batch_limits[phase]] if phase in self.batch_limits else []
        for name, plugin in plugins.items():
            limit = plugin.batch_limits.get(phase)
            if limit is None:
                continue
            if not _is_limit(limit):
                raise ArgumentError(
                    f"Plugin {name!r}: batch_limits[{phase}] must be a positive int, got "
                    f"{limit!r}. Omit the phase for no limit."
                )
            limits.append(limit)
        return min(limits, default=None)


def _is_limit(value: object) -> bool:
    return type(value) is int and value >= 1
