"""Captures and restores the states of random number generators that objects hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch

from helios.errors import StateError

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_KINDS = {torch.Generator, random.Random, np.random.Generator, np.random.RandomState}


def is_generator(value: object) -> TypeGuard[Generator]:
    """Return whether a value is a generator whose state can be read and set."""
    # isinstance() takes several times as long: the metaclass of torch.Generator answers it.
    return not _KINDS.isdisjoint(type(value).__mro__) and not isinstance(value, random.SystemRandom)


def kind_of_generator(value: Generator) -> str:
    """Return the type that a state belongs to, including NumPy's bit generator."""
    if isinstance(value, torch.Generator):
        return "torch.Generator"
    if isinstance(value, random.Random):
        return "random.Random"
    if isinstance(value, np.random.Generator):
        return f"numpy.random.Generator({type(value.bit_generator).__name__})"
    return "numpy.random.RandomState"


def state_of_generator(value: Generator) -> Any:
    """Return a copy of a generator's state as plain values."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state(legacy=False)


def load_generator(value: Generator, state: Any) -> None:
    """Set the state of a generator in place, so that all references to it stay valid."""
    if isinstance(value, torch.Generator):
        value.set_state(state.cpu().clone())
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def make_generator(kind: str) -> Generator:
    """Create a generator of a kind that :func:`kind_of_generator` returned.

    Raises:
        StateError: if NumPy does not have the bit generator.
    """
    makers: dict[str, Callable[[], Generator]] = {
        "torch.Generator": torch.Generator,
        "random.Random": random.Random,
        "numpy.random.RandomState": np.random.RandomState,
    }
    if kind in makers:
        return makers[kind]()
    name = kind.removeprefix("numpy.random.Generator(").removesuffix(")")
    algorithms = {a.__name__: a for a in _ALGORITHMS}
    if name not in algorithms:
        raise StateError(
            f"The checkpoint contains a {kind}, which this version of NumPy does not have. Create "
            "the generator in setup(), or install the NumPy version that saved it."
        )
    return np.random.Generator(algorithms[name]())


_ALGORITHMS = (
    *(np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM),
    *(np.random.Philox, np.random.SFC64),
)
