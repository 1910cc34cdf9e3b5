"""Finds changes that cannot be saved: hooks, attributes of classes, scripts, shared memory.

Shared memory is among them if it belongs to several owners, or to tensors of overlapping storages.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from helios.core.generators import is_generator
from helios.core.memory import span_of
from helios.state_graph import unsupported_values as reasons
from helios.state_graph.graph import Graph
from helios.state_graph.memory_groups import layout_of
from helios.state_graph.object_names import ObjectNames, Outside
from helios.state_graph.registered_hooks import hooks_of
from helios.state_graph.scanning import ContentScanner
from helios.state_graph.values import Identities, attributes_of, is_plain_object
from helios.storage.checksums import array_sum, tensor_sum

Marks: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What is compared, by name, for each reason why it cannot be saved."""

_SharedMemory: TypeAlias = dict[str, tuple[Any, ...]]
"""By the name of a tensor or array, that of the one which it overlaps, and how."""

_SHARED = (reasons.SHARED_BY_OWNERS, reasons.OVERLAPPING)


def marks_of_unsavable(kinds: Collection[type], graph: Graph) -> Marks:
    """Return marks of what no checkpoint can hold, by reason and name.

    Args:
        kinds: classes of the user.
        graph: what the owner holds.
    """
    return {
        reasons.HOOK: hooks_of(graph.found),
        reasons.OF_CLASS: class_marks(kinds, graph.content),
        reasons.OF_SCRIPT: script_marks(graph.found, graph.content),
        reasons.SHARED_BY_OWNERS: _shared_between_owners(
            graph.layouts.tensors, graph.rules.outside
        ),
        reasons.OVERLAPPING: graph.layouts.overlapping,
    }


def unsavable_changes(before: Marks, now: Marks) -> dict[str, str]:
    """Return what has changed, with the reason why no checkpoint can hold it, by name."""
    lost: dict[str, str] = {}
    for reason, marks in now.items():
        old = before[reason]
        for name in sorted(old.keys() | marks.keys()):
            if old.get(name) != marks.get(name):
                partner = {**old, **marks}[name][0] if reason in _SHARED else ""
                lost[name] = reason.format(_without_number(partner))
    return lost


@final
class SharedValues:
    """Memory that values of an owner share with those of another one, which no checkpoint keeps.

    What setup shares is named once training lets it be shared otherwise. What training shares is
    named once it is written to in place: most is only kept to be read, such as a loss, and a
    resumed run has an equal copy of that. Of an array, which counts no writes, this is seen at the
    second save at which the same one is shared.

    Args:
        identities: numbers for what is compared by identity.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._made: _SharedMemory = {}
        self._seen: dict[int, _Seen] = {}

    def remember(self, graph: Graph) -> None:
        """Record what is shared now as what each start shares again."""
        self._made, self._seen = _shared_between_owners(graph.views, graph.rules.outside), {}

    def find(self, graph: Graph) -> dict[str, str]:
        """Return what is shared otherwise, with the reason why no checkpoint can hold it."""
        outside = graph.rules.outside
        made, now = self._made, _shared_between_owners(graph.views, outside)
        partners = {
            name: made[name][0]
            for name in made.keys() & graph.views.keys()
            if made[name] != now.get(name)
        }
        seen: dict[int, _Seen] = {}
        for name, mark in now.items():
            if mark != made.get(name):
                part = graph.views[name]
                who = (self._identities.number(outside.parts[mark[0]]), *mark[1:])
                number = self._identities.number(part)
                seen[number] = found = self._seen.get(number, _Seen()).after(part, who)
                partners |= {name: mark[0]} if found.is_written else {}
        self._seen = seen
        return {
            _without_number(name): reasons.SHARED_BY_OWNERS.format(_without_number(partners[name]))
            for name in sorted(partners)
        }


class _Seen(NamedTuple):
    """A tensor or array that shares memory with another owner's, as a save has found it.

    Attributes:
        who: the other one, and how they overlap.
        content: a checksum.
        is_written: whether it was written to in place.
    """

    who: tuple[Any, ...] = ()
    content: Any = None
    is_written: bool = False

    def after(self, part: Any, who: tuple[Any, ...]) -> _Seen:
        """Return how it is found now."""
        if isinstance(part, Tensor):
            content: Any = tensor_sum(part)
            is_written = not part.is_inference() and part._version > 0  # noqa: SLF001 - torch has no public counter
        else:
            content, is_written = array_sum(part), False
        if who == self.who:
            is_written |= self.is_written or content != self.content
        return _Seen(who, content, is_written)


def _without_number(name: str) -> str:
    """Return the path of a value; several views in it have numbers."""
    return name.partition("#")[0]


def _shared_between_owners(own: Mapping[str, Any], outside: Outside) -> _SharedMemory:
    """Return the tensors and arrays that overlap one of another owner."""
    shared: _SharedMemory = {}
    for name, part in own.items() if outside.parts else ():
        begin, end = span_of(part)
        if found := outside.find_overlap(begin, end):
            first, _, other = found
            shared[name] = other, begin - first, layout_of(part)
    return shared


_OF_GRAPHS = ("meta", "shape_env", "training", "graph")


def script_marks(found: ObjectNames, content: Callable[[], ContentScanner]) -> dict[str, bytes]:
    """Return a mark of each attribute of a ``ScriptModule`` or ``GraphModule``, by name.

    Args:
        found: networks by path.
        content: returns what compares values by content.
    """
    return {
        f"{path}.{name}.{key}" if name else f"{path}.{key}": content().mark(value)
        for path, module in found.modules().items()
        if any(
            issubclass(kind, ScriptModule | GraphModule) for kind in found.networks.of(module).kinds
        )
        for name, part in found.networks.of(module).modules
        for key, value in _attributes_of(part)
    }


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, ScriptModule):
        described: Any = vars(module).get("_concrete_type")
        for key in described.get_attributes() if described is not None else ():
            value = vars(module)["_c"].getattr(key)
            # Parameters, buffers and modes are saved.
            if not key.startswith("_") and key != "training" and not isinstance(value, Tensor):
                yield key, value
    elif isinstance(module, GraphModule):
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in _OF_GRAPHS:
                yield key, value


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
