"""Notices what a user's sampler changes about itself while it is iterated over.

A counter, or a list that is shuffled in place, is lost at a resume, so the order would differ from
that of an uninterrupted run.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from typing import Any, final

from helios.core.utils import unsaved_of
from helios.protocols import Stateful

_LOGGER = logging.getLogger(__name__)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@final
class SamplerChanges:
    """Compares plain attributes of samplers at the beginning of the first pass with those after it.

    Later passes are not compared: a list may have millions of entries.

    Args:
        samplers: a sampler, and the one inside it; those with ``state_dict`` are left out.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._samplers = [part for part in samplers if not isinstance(part, Stateful)]
        self._before: list[dict[str, Hashable]] | None = None

    def begin_pass(self) -> None:
        """Record the attributes, once the epoch was set."""
        if self._before is None:
            self._before = [_plain_in(sampler) for sampler in self._samplers]

    def end_pass(self) -> None:
        """Warn of what has changed since the first pass began."""
        for sampler, before in zip(self._samplers, self._before or (), strict=False):
            after = _plain_in(sampler)
            changed = [name for name in after if name in before and after[name] != before[name]]
            if changed:
                _LOGGER.warning(
                    "%s changes %s while it is iterated over, which no checkpoint holds: it has no "
                    "state_dict. If the order of samples depends on that, a resumed run has "
                    "another order. Compute the order in __iter__ from set_epoch(epoch), or write "
                    "state_dict and load_state_dict. If it does not depend on it, declare that in "
                    "the class: unsaved = (%s,).",
                    type(sampler).__name__,
                    ", ".join(changed),
                    ", ".join(f'"{name}"' for name in changed),
                )
        if self._before is not None:
            self._before = []


def _plain_in(sampler: Any) -> dict[str, Hashable]:
    unsaved = unsaved_of(sampler)
    marks = {
        name: _mark(value)
        for name, value in getattr(sampler, "__dict__", {}).items()
        if name not in unsaved
    }
    return {name: mark for name, mark in marks.items() if mark is not None}


def _mark(value: Any) -> Hashable:
    """Return what is equal for equal plain values, and lists of them; ``None`` for others."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value):
        return type(value).__name__, len(value), hash(tuple(value))
    return None
