"""Represents values of users' types in files: by the name of the type, with plain contents.

Loading a file creates no instance of a type that it names. The caller resolves these values
against known types; nothing is imported, and no constructor runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

_OF_SCRIPT, _OF_STARTED_RANK = "__main__.", "__mp_main__."


def type_name(kind: type) -> str:
    """Return the full name of a type, as files contain it: the same in every process of a run."""
    return in_every_process(f"{kind.__module__}.{kind.__qualname__}")


def in_every_process(name: str) -> str:
    """Return the full name of a type as the script has it, also if a rank that it started wrote it.

    Python imports the script again in such a rank, as a module of another name.
    """
    is_of_rank = name.startswith(_OF_STARTED_RANK)
    return _OF_SCRIPT + name.removeprefix(_OF_STARTED_RANK) if is_of_rank else name


def names_of_global(kind: type) -> list[str]:
    """Return the names under which a pickle of any process of a run refers to a type."""
    name = type_name(kind)
    if not name.startswith(_OF_SCRIPT):
        return [name]
    return [name, _OF_STARTED_RANK + name.removeprefix(_OF_SCRIPT)]


def step_to(key: Any) -> str:
    """Return the step of a path to a member, such as ``.history`` or ``[3]``."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


@dataclasses.dataclass(frozen=True)
class NamedMember:
    """A member of an enum, or a combination of flags.

    Attributes:
        type: the full name of the enum.
        names: the name of the member, or of each flag that is set.
        is_flag: whether it is a combination of flags.
    """

    type: str
    names: tuple[str, ...]
    is_flag: bool


@dataclasses.dataclass(eq=False)
class NamedFields:
    """An instance of a dataclass.

    Attributes:
        type: the full name of the dataclass.
        fields: the values of its fields, by name.
    """

    type: str
    fields: dict[str, Any]


class Reference(NamedTuple):
    """Another node of a saved graph, or an object that is saved elsewhere.

    Attributes:
        name: its name.
    """

    name: str


class HeldTensor(NamedTuple):
    """A tensor or array of a saved graph, which several nodes may refer to.

    Attributes:
        name: its name there.
    """

    name: str


class Alias(NamedTuple):
    """A tensor or array that shares its memory with a saved tensor.

    Attributes:
        target: the name of the saved tensor.
        way: ``"itself"`` for the saved tensor object, ``"tensor"`` for another tensor, ``"array"``
            for a NumPy array.
        dtype: the type of its elements: torch's, or NumPy's in the form of ``.npy`` files.
        shape: its shape.
        strides: in elements for tensors, in bytes for arrays.
        offset: in bytes, from the first element of the target.
        flag: whether the tensor requires a gradient, or the array is writable.
    """

    target: str
    way: str
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flag: bool


@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A sharded tensor, whose rows are in other files.

    Attributes:
        name: its name there.
    """

    name: str
