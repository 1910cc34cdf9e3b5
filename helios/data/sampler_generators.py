"""Finds and saves the generators of samplers that have no ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from helios.core.generators import (
    Generator,
    is_generator,
    kind_of_generator,
    load_generator,
    state_of_generator,
)
from helios.core.utils import unsaved_of
from helios.protocols import Stateful

_DEEPEST = 8
_MANY = 100


def find_generators(sampler: Any) -> dict[str, Generator]:
    """Return the generators that a sampler, or a sampler inside it, holds, by path.

    PyTorch's default generator, which the trainer seeds, and attributes that a sampler's class
    declares as ``unsaved`` are left out.
    """
    return dict(_walk(sampler, "", _DEEPEST))


def _walk(part: Any, path: str, depth: int) -> Iterator[tuple[str, Generator]]:
    for name, value in _members_of(part):
        if is_generator(value) and value is not torch.default_generator:
            yield f"{path}{name}", value
        elif depth:
            yield from _walk(value, f"{path}{name}.", depth - 1)


def _members_of(part: Any) -> list[tuple[Any, Any]]:
    """Return what may hold a generator: members of short containers, attributes of objects."""
    if isinstance(part, dict | list | tuple):
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        return list(pairs) if len(part) < _MANY else []
    # A data set has generators of its own; those of networks and the like are saved by their owner.
    if isinstance(part, type | ModuleType | Dataset | Tensor | Stateful):
        return []
    unsaved, table = unsaved_of(part), getattr(part, "__dict__", {})
    return [(name, value) for name, value in table.items() if name not in unsaved]


@final
class OwnGenerators:
    """The state of a sampler's own generators.

    Args:
        generators: the generators by path.
    """

    def __init__(self, generators: dict[str, Generator]) -> None:
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator, by path."""
        return {
            path: (kind_of_generator(part), state_of_generator(part))
            for path, part in self._generators.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore each generator with a saved state of the same kind."""
        for path, generator in self._generators.items():
            kind, state = state_dict.get(path, (None, None))
            if kind == kind_of_generator(generator):
                load_generator(generator, state)
