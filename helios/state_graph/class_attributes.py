"""Detects changes to attributes of user classes, which no checkpoint can hold."""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
from torch import Tensor, nn

from helios.core.generators import is_generator
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.scanning import ContentScanner
from helios.state_graph.values import attributes_of, is_plain_object

_DATA = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, deque),
    *(Tensor, np.ndarray, np.generic),
)
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_OF_MEMBERS = ("_name_", "_value_", "_sort_order_", "__objclass__")
_LARGEST = 1 << 16
"""Maximum members of a container, or elements of a tensor, that is compared."""


def class_marks(kinds: Iterable[type], content: Callable[[], ContentScanner]) -> dict[str, bytes]:
    """Return a mark of each attribute of classes, and of each member of enums among them.

    Args:
        kinds: the classes.
        content: returns what compares values by content.
    """
    marks: dict[str, bytes] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            place = f"class {kind.__qualname__}.{name}"
            if isinstance(value, kind) and issubclass(kind, Enum):
                held = attributes_of(value).items()
                marks |= {
                    f"{place}.{key}": content().mark(part)
                    for key, part in held
                    if key not in _OF_MEMBERS
                }
            elif not issubclass(kind, Enum) and (is_generator(value) or _is_data(name, value)):
                marks[place] = content().mark(value)
    return marks


def user_classes(owner: object, found: ObjectNames, kinds: Iterable[type]) -> list[type]:
    """Return the classes of what an owner holds that are neither of Helios nor of a library.

    Args:
        owner: the owner, whose class counts too.
        found: the objects that it holds.
        kinds: the classes of values that it holds.
    """
    kinds = dict.fromkeys(base for kind in (type(owner), *kinds) for base in kind.__mro__)
    for part in (*found.objects.values(), *found.inner.values()):
        kinds_in: Collection[type] = {type(part)}
        if isinstance(part, nn.Module):
            kinds_in = found.networks.of(part).kinds
        for kind in kinds_in:
            kinds |= dict.fromkeys(kind.__mro__)
    return [kind for kind in kinds if _is_of_the_user(kind)]


def _is_of_the_user(kind: type) -> bool:
    """Return whether a class is neither of Helios nor of an installed library."""
    if kind.__module__.startswith("helios."):
        return False
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "abc" and getattr(module, kind.__name__, None) is not kind:
        # A class that is made by a call of type() gets the module of its metaclass.
        return True
    origin = getattr(module, "__file__", None)
    if origin is None:
        return kind.__module__ == "__main__"
    return not any(name in origin for name in (*_INSTALLED, _STANDARD_LIBRARY))


def _is_data(name: str, value: Any) -> bool:
    if name.startswith(("__", "_abc")) or isinstance(
        value, GetSetDescriptorType | MemberDescriptorType
    ):
        return False
    if not isinstance(value, _DATA):
        # A descriptor may hold values for all instances.
        return is_plain_object(type(value)) and _is_of_the_user(type(value))
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    if size is None:
        size = len(value) if isinstance(value, list | tuple | dict | set | deque) else 0
    return size <= _LARGEST
