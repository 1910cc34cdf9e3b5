"""Reports changes in training that no checkpoint can hold, by marks before and after."""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from helios.core.generators import is_generator
from helios.core.memory import has_plain_bytes, span_of, storage_of
from helios.state.values import PLAIN
from helios.state.walk import Snapshot
from helios.storage.plain_objects import attributes_of, is_plain_object

_LOGGER = logging.getLogger(__name__)

SHARED = (
    "its memory overlaps that of {} differently than after setup(): share it in setup(), or copy it"
)
PARTED = (
    "it shared memory after setup(), and no longer does: separate it in setup(), or copy values"
)
HOOK = (
    "a hook registered, removed or moved after the start: register it in setup(), or at each "
    "start in on_training_start()"
)
OF_CLASS = (
    "an attribute of a class, which no checkpoint can hold: make it an attribute of the instance"
)
OF_SCRIPT = "an attribute of a scripted network: make it a buffer, or an attribute of the model"

Marks: TypeAlias = dict[str, tuple[Any, str]]
"""By name, what is equal if nothing has changed, and why it cannot be saved."""


def marks_of(now: Snapshot, classes: Iterable[type]) -> Marks:
    """Return marks of everything in an owner that no checkpoint can hold."""
    walk = now.walk
    marks: Marks = {name: (now.mark(part), why) for name, (part, why) in walk.opaque.items()}
    marks |= {name: (mark, OF_CLASS) for name, mark in class_marks(classes, now).items()}
    for (name, table), hooks in walk.hooks.items():
        shown = f"{name} ({table.strip('_').replace('_', ' ').rstrip('s')})"
        marks[shown] = tuple(map(now.identities.number, hooks)), HOOK
    for name, (other, where) in walk.overlaps.items():
        marks[f"{name} (memory)"] = (other, where), SHARED.format(other)
    for name, (other, where) in _storages_of_networks(now).items():
        reason = SHARED.format(other) if other else PARTED
        marks[f"{name} (memory)"] = (other, where), reason
    for module in now.anchors.of_kind(nn.Module, with_inner=True).values():
        for _, part in now.anchors.network(module).modules:
            if isinstance(part, ScriptModule | GraphModule):
                marks |= _script_marks(now, part)
    return marks


def _script_marks(now: Snapshot, part: Any) -> Marks:
    name, table = now.anchors.names.get(id(part), ""), vars(part)
    found = {key: value for key, value in table.items() if key not in _OF_GRAPHS}
    if isinstance(part, ScriptModule):
        described = table.get("_concrete_type")
        keys = described.get_attributes() if described is not None else ()
        found = {key: table["_c"].getattr(key) for key in keys}
    return {
        f"{name}.{key}": (now.mark(value), OF_SCRIPT)
        for key, value in found.items()
        # Parameters, buffers and modes are saved.
        if not key.startswith("_") and key != "training" and not isinstance(value, Tensor)
    }


_OF_GRAPHS = frozenset(("training", "meta", "graph", "class_name", "shape_env"))


def _storages_of_networks(now: Snapshot) -> dict[str, tuple[str, Any]]:
    """Return with whom each tensor of a network shares its storage, if with anybody, and where."""
    own = _tensors_with_storage(now.anchors.parts)
    homes: dict[Any, tuple[str, Tensor]] = {}
    if own:
        for place, name, part in _tensors_with_storage(now.anchors.rules.outside.parts):
            homes.setdefault(place, (name, part))
    found: dict[str, tuple[str, Any]] = {}
    for place, name, part in own:
        first, home = homes.setdefault(place, (name, part))
        if first == name:
            found[name] = "", None
        elif has_plain_bytes(part) and has_plain_bytes(home):
            begin = span_of(home)[0]
            found[name] = first, tuple(each - begin for each in span_of(part))
    return found


def _tensors_with_storage(parts: Mapping[str, Any]) -> list[tuple[Any, str, Tensor]]:
    return [
        ((part.device, place), name, part)
        for name, part in parts.items()
        if isinstance(part, Tensor) and (place := storage_of(part))
    ]


def lost_since(before: Marks, now: Marks) -> dict[str, str]:
    """Return changes, each with the reason why no checkpoint can hold it."""
    lost = {
        name: why
        for name, (mark, why) in now.items()
        if (before[name][0] if name in before else None) != mark
        and not (why == PARTED and name not in before)
    }
    # What a value has replaced is saved. A hook or an attribute of a class that is gone is not.
    gone = {n: w for n, (_, w) in before.items() if n not in now and w in _COUNT_IF_GONE}
    return {name.removesuffix(" (memory)"): why for name, why in sorted((lost | gone).items())}


def report(owner: str, missing: Mapping[str, str], known: set[str]) -> None:
    """Warn of state that a resumed run will lack.

    Args:
        owner: the name of the owner.
        missing: the reasons, by path.
        known: the paths that were reported in this start; receives these.
    """
    new = {path: why for path, why in missing.items() if path not in known}
    known.update(missing)
    if new:
        _LOGGER.warning(
            "The state of the %s is incomplete. Training changed what cannot be saved: %s. A "
            "resumed run starts with the values of setup(). Declare what need not be saved: "
            "unsaved = (%s,) of the %s.",
            owner,
            "; ".join(f"{path} ({why})" for path, why in new.items()),
            ", ".join(f'"{path}"' for path in new),
            owner,
        )


_COUNT_IF_GONE = (HOOK, OF_CLASS)

# ---- attributes of classes

_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_OF_MEMBERS = frozenset(("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"))
_LARGEST = 1 << 16
"""Maximum members of a container, or elements of a tensor, that is compared."""


def classes_of(owner: object, now: Snapshot) -> list[type]:
    """Return the user's classes of the values that an owner holds."""
    kinds = dict.fromkeys(base for kind in (type(owner), *now.walk.kinds) for base in kind.__mro__)
    for part in now.objects.values():
        parts = part.modules() if isinstance(part, nn.Module) else (part,)
        kinds |= dict.fromkeys(base for each in parts for base in type(each).__mro__)
    return [kind for kind in kinds if _is_of_the_user(kind)]


def _is_of_the_user(kind: type) -> bool:
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


def class_marks(kinds: Iterable[type], now: Snapshot) -> dict[str, bytes]:
    """Return a mark of each attribute of classes, and of each member of enums among them."""
    marks: dict[str, bytes] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            place = f"class {kind.__qualname__}.{name}"
            if issubclass(kind, Enum):
                held = attributes_of(value).items() if isinstance(value, kind) else ()
                marks |= {f"{place}.{k}": now.mark(v) for k, v in held if k not in _OF_MEMBERS}
            elif is_generator(value) or _is_data(name, value):
                marks[place] = now.mark(value)
    return marks


def _is_data(name: str, value: Any) -> bool:
    if name.startswith(("__", "_abc")) or isinstance(
        value, GetSetDescriptorType | MemberDescriptorType
    ):
        return False
    if value is None or not isinstance(value, PLAIN):
        # A descriptor may hold values for all instances.
        return is_plain_object(type(value)) and _is_of_the_user(type(value))
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    if size is None:
        size = len(value) if isinstance(value, list | tuple | dict | set | deque) else 0
    return bool(size <= _LARGEST)
