"""The values of the matrix: how each is made, changed and read."""

from __future__ import annotations

import io
import random
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, final

import numpy as np
import torch

ATTRIBUTE, PARTNER = "precious", "partner"
"""Names of the attributes that hold a value, and what it shares memory with."""


class Stage(Enum):
    """Five stages, one after another."""

    A = 1
    B = 2
    C = 3
    D = 4
    E = 5


@dataclass
class Stats:
    total: int = 0
    names: list[str] = field(default_factory=list)


class Tally:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Bare:
    """An object without one."""

    def __init__(self) -> None:
        self.count = 0


class Slotted:
    """An object of slots, which takes no weak reference."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Hiding(Bare):
    """An object that tells pickle nothing of what it holds."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Replay:
    """An object that can be iterated over, and is no iterator."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class Value(ABC):
    """A kind of value, as an attribute of an owner; what is not savable must be named."""

    is_savable = True

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Return what setup puts there, by name of the attribute."""

    @abstractmethod
    def change(self, owner: Any) -> None:
        """Change it as training would."""

    @abstractmethod
    def read(self, owner: Any) -> Any:
        """Return what can be compared: bits, and which objects are one."""


@final
class Alone(Value):
    def __init__(
        self,
        make: Callable[[], Any],
        advance: Callable[[Any], Any],
        read: Callable[[Any], Any],
        *,
        is_savable: bool = True,
    ) -> None:
        self._make, self._advance, self._read = make, advance, read
        self.is_savable = is_savable

    def attributes(self) -> dict[str, Any]:
        return {ATTRIBUTE: self._make()}

    def change(self, owner: Any) -> None:
        before = getattr(owner, ATTRIBUTE)
        after = self._advance(before)
        if after is not None and after is not before:
            setattr(owner, ATTRIBUTE, after)

    def read(self, owner: Any) -> Any:
        value = getattr(owner, ATTRIBUTE)
        return type(value).__name__, self._read(value)


@final
class View(Value):
    """A part of another attribute's memory."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def attributes(self) -> dict[str, Any]:
        base = self._make(6)
        return {PARTNER: base, ATTRIBUTE: base[1:4]}

    def change(self, owner: Any) -> None:
        part = getattr(owner, ATTRIBUTE)
        part += 1

    def read(self, owner: Any) -> Any:
        base, part = getattr(owner, PARTNER), getattr(owner, ATTRIBUTE)
        found = base.tolist(), part.tolist(), str(base.dtype)
        base[2] += 100
        is_one = part.tolist() != found[1]
        base[2] -= 100
        return *found, is_one


@final
class Alias(Value):
    """Another name of a list."""

    def attributes(self) -> dict[str, Any]:
        items = [0]
        return {PARTNER: items, ATTRIBUTE: items}

    def change(self, owner: Any) -> None:
        getattr(owner, ATTRIBUTE).append(1)

    def read(self, owner: Any) -> Any:
        first, second = getattr(owner, PARTNER), getattr(owner, ATTRIBUTE)
        return list(first), list(second), first is second


@final
class Choice(Value):
    """One of several lists: which of them is what changes."""

    def attributes(self) -> dict[str, Any]:
        items = [[number] for number in range(5)]
        return {PARTNER: items, ATTRIBUTE: items[0]}

    def change(self, owner: Any) -> None:
        items = getattr(owner, PARTNER)
        setattr(owner, ATTRIBUTE, items[(self._place(owner) + 1) % len(items)])

    def read(self, owner: Any) -> Any:
        return self._place(owner), getattr(owner, PARTNER)

    def _place(self, owner: Any) -> int:
        known = [item is getattr(owner, ATTRIBUTE) for item in getattr(owner, PARTNER)]
        return known.index(True) if True in known else -1


def _opened() -> Any:
    return tempfile.TemporaryFile("w+")


def _returns(number: int) -> Callable[[], int]:
    return lambda: number


def _add(value: Any, number: int) -> None:
    value += number


def _draw(generator: torch.Generator) -> None:
    torch.rand(1, generator=generator)


def _next_stage(stage: Stage) -> Stage:
    return Stage(stage.value % 5 + 1)


def _count(value: Any) -> None:
    value.count += 1


def _advance_stats(stats: Stats) -> None:
    stats.total += 1
    stats.names.append(f"name-{stats.total}")


def _insert(table: dict[str, int]) -> None:
    table[f"key-{9 - len(table)}"] = len(table)


def _with_bits(value: Any) -> Any:
    return value.tolist(), str(value.dtype)


VALUES: dict[str, Value] = {
    "int": Alone(lambda: 0, lambda value: value + 1, int),
    "list": Alone(lambda: [0], lambda value: value.append(len(value)), list),
    "dict": Alone(lambda: {"key": 0}, _insert, lambda value: list(value.items())),
    "deque": Alone(
        lambda: deque([0], maxlen=3),
        lambda value: value.append(value[-1] + 1),
        lambda value: (list(value), value.maxlen),
    ),
    "set": Alone(lambda: {0}, lambda value: value.add(len(value)), sorted),
    "enum": Alone(lambda: Stage.A, _next_stage, lambda value: value is Stage[value.name] and value),
    "dataclass": Alone(Stats, _advance_stats, lambda value: (value.total, value.names)),
    "array": Alone(lambda: np.zeros(3), lambda value: _add(value, 1), _with_bits),
    "view of an array": View(np.zeros),
    "tensor": Alone(lambda: torch.zeros(3), lambda value: _add(value, 1), _with_bits),
    "view of a tensor": View(torch.zeros),
    "alias": Alias(),
    "choice": Choice(),
    "torch.Generator": Alone(
        lambda: torch.Generator().manual_seed(3), _draw, lambda value: value.get_state().tolist()
    ),
    "random.Random": Alone(
        lambda: random.Random(3), lambda value: value.random() and None, random.Random.getstate
    ),
    "numpy Generator": Alone(
        lambda: np.random.default_rng(3),
        lambda value: value.normal() and None,
        lambda value: str(value.bit_generator.state),
    ),
    "numpy RandomState": Alone(
        lambda: np.random.RandomState(3),
        lambda value: value.normal() and None,
        lambda value: str([str(part) for part in value.get_state()]),
    ),
    "object with state_dict": Alone(Tally, _count, lambda value: value.count),
    "object without state_dict": Alone(Bare, _count, lambda value: value.count),
    "object of slots": Alone(Slotted, _count, lambda value: value.count),
    "object that hides": Alone(Hiding, _count, lambda value: value.count),
    "replay buffer": Alone(Replay, lambda value: value.items.append(len(value.items)), list),
    "partial": Alone(
        lambda: partial(_add, [0]), lambda value: value([1]), lambda value: list(value.args[0])
    ),
    "iterator": Alone(
        lambda: (number for number in range(1, 100)),
        lambda value: next(value) and None,
        next,
        is_savable=False,
    ),
    "lambda": Alone(
        lambda: _returns(0),
        lambda value: _returns(value() + 1),
        lambda value: value(),
        is_savable=False,
    ),
    "file handle": Alone(
        _opened,
        lambda value: value.write("x") and None,
        lambda value: value.tell(),
        is_savable=False,
    ),
}


def attributes_of(value: str) -> dict[str, Any]:
    return VALUES[value].attributes()


def close(owner: Any) -> None:
    """Close the file that an owner may hold."""
    value = vars(owner).get(ATTRIBUTE)
    if isinstance(value, io.IOBase):
        value.close()
