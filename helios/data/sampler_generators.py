"""Finds and saves the generators of samplers that have no ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import Sampler

from helios.core.generators import (
    Generator,
    is_generator,
    kind_of_generator,
    load_generator,
    state_of_generator,
)
from helios.core.utils import unsaved_of

_DEEPEST = 8


def find_generators(sampler: Any) -> dict[str, Generator]:
    """Return the generators that a sampler, or a sampler inside it, holds, by path.

    PyTorch's default generator, which the trainer seeds, and attributes that a sampler's class
    declares as ``unsaved`` are left out.
    """
    return dict(_walk(sampler, "", _DEEPEST))


def _walk(sampler: Any, path: str, depth: int) -> Iterator[tuple[str, Generator]]:
    unsaved = unsaved_of(sampler)
    for name, value in getattr(sampler, "__dict__", {}).items():
        if name in unsaved:
            continue
        if is_generator(value) and value is not torch.default_generator:
            yield f"{path}{name}", value
        elif isinstance(value, Sampler) and depth:
            yield from _walk(value, f"{path}{name}.", depth - 1)


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
