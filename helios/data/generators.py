"""Generators of its own that a sampler draws from, and that no ``state_dict`` saves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import Sampler

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_DEEPEST = 8


def find_generators(sampler: Any) -> dict[str, Generator]:
    """Return the generators that a sampler holds, or a sampler inside it, by path.

    PyTorch's default one is left out: the trainer seeds it.
    """
    return dict(_walk(sampler, "", _DEEPEST))


def _walk(sampler: Any, path: str, depth: int) -> Iterator[tuple[str, Generator]]:
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, Generator) and value is not torch.default_generator:
            yield f"{path}{name}", value
        elif isinstance(value, Sampler) and depth:
            yield from _walk(value, f"{path}{name}.", depth - 1)


@final
class OwnGenerators:
    """The state of a sampler that has none but its generators'.

    Args:
        generators: by path.
    """

    def __init__(self, generators: dict[str, Generator]) -> None:
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator, by path."""
        return {path: _state_of(generator) for path, generator in self._generators.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set each generator that has a state here; another kind of generator is left alone."""
        for path, generator in self._generators.items():
            kind, state = state_dict.get(path, (None, None))
            if kind == type(generator).__name__:
                _set_state(generator, state)


def _state_of(generator: Generator) -> tuple[str, Any]:
    state: Any
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    else:
        state = generator.get_state(legacy=False)
    return type(generator).__name__, state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
