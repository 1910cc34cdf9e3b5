"""Detects changes to attributes of user classes, which no checkpoint can hold."""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
from torch import Tensor, nn

from helios.core.generators import is_generator, state_of_generator
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.scanning import ContentScanner

_DATA = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, deque),
    *(Tensor, np.ndarray, np.generic),
)
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LARGEST = 1 << 16
"""Maximum members of a container, or elements of a tensor, that is compared."""


def class_marks(
    owner: object, found: ObjectNames, content: Callable[[], ContentScanner]
) -> dict[str, bytes]:
    """Return a mark of each attribute of the classes of an owner's objects.

    Args:
        owner: the owner, whose class counts too.
        found: what it holds; classes of Helios and of libraries do not count.
        content: returns what compares values by content.
    """
    marks: dict[str, bytes] = {}
    for kind in _user_classes(owner, found):
        for name, value in vars(kind).items():
            held = state_of_generator(value) if is_generator(value) else value
            if is_generator(value) or _is_data(name, value):
                marks[f"class {kind.__qualname__}.{name}"] = content().mark(held)
    return marks


def _user_classes(owner: object, found: ObjectNames) -> Iterable[type]:
    kinds: dict[type, None] = dict.fromkeys(type(owner).__mro__)
    for part in (*found.objects.values(), *found.inner.values()):
        kinds_in = {type(part)}
        if isinstance(part, nn.Module):
            kinds_in = {type(member) for _, member in found.networks.of(part).modules}
        for kind in kinds_in:
            kinds |= dict.fromkeys(kind.__mro__)
    return [kind for kind in kinds if _is_of_the_user(kind)]


def _is_of_the_user(kind: type) -> bool:
    """Return whether a class is neither of Helios nor of an installed library."""
    if kind.__module__.startswith("helios."):
        return False
    origin = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if origin is None:
        return kind.__module__ == "__main__"
    return not any(name in origin for name in (*_INSTALLED, _STANDARD_LIBRARY))


def _is_data(name: str, value: Any) -> bool:
    if name.startswith(("__", "_abc")) or isinstance(
        value, GetSetDescriptorType | MemberDescriptorType
    ):
        return False
    if not isinstance(value, _DATA):
        return False
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    if size is None:
        size = len(value) if isinstance(value, list | tuple | dict | set | deque) else 0
    return size <= _LARGEST
