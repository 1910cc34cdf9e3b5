"""Values of users' types as files hold them: by the name of the type, with plain contents.

Loading a file builds no type that it names. Who reads it resolves these against types that are
known already; nothing is imported, and no constructor runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


def type_name(kind: type) -> str:
    """Return the full name of a type, by which a file refers to it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def step_to(key: Any) -> str:
    """Return how a path says that it enters a member, as in ``model.history[3]``."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


@dataclasses.dataclass(frozen=True)
class NamedMember:
    """A member of an enum, or a combination of flags.

    Attributes:
        type: the full name of the enum.
        names: the name of the member; those of all flags that are set for a combination.
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
        fields: what its fields hold.
    """

    type: str
    fields: dict[str, Any]


class Alias(NamedTuple):
    """A tensor or array that shares its memory with one that is saved under a name.

    Attributes:
        target: that name.
        way: ``"itself"`` for that very tensor, ``"tensor"`` for another one, ``"array"`` for a
            NumPy array.
        dtype: the type of its elements: torch's, or NumPy's in the form of ``.npy`` files.
        shape: lengths.
        strides: in elements for tensors, in bytes for arrays.
        offset: bytes from the first element of the target.
        flag: whether a tensor requires a gradient, or an array can be written to.
    """

    target: str
    way: str
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flag: bool
