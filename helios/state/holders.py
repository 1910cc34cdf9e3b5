"""Gives holders their saved values: the owner, modules, optimizers, functions and other objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.state.anchors import path_of
from helios.state.walk import PARTS, Walk
from helios.storage.building import Builder
from helios.storage.codes import HOLE, TAG, path_to
from helios.storage.plain_objects import delete_attribute, refill, set_attribute, table_of

GONE: Final[dict[str, Any]] = {TAG: "gone"}
"""The code of an attribute that training has deleted."""


def set_values(walk: Walk, values: Mapping[str, Mapping[Any, Any]], builder: Builder) -> None:
    """Set what was saved, attribute by attribute.

    Args:
        walk: what is there now.
        values: codes by holder and key.
        builder: builds their values.
    """
    for name, table in values.items():
        holder = walk.holders.get(name)
        holder = walk.find(name) if holder is None else holder
        for key, code in table.items():
            if key == PARTS or code == HOLE:
                continue
            if code == GONE:
                delete_attribute(holder, key)
            else:
                _set(holder, key, builder.build(path_of(name, key), code))


def _set(holder: Any, key: Any, value: Any) -> None:
    """Set what a holder has under a key, without running a method of its class."""
    table = table_of(holder)
    if isinstance(holder, nn.Module):
        buffers = table.get("_buffers", {})
        (buffers if key in buffers else table)[key] = value
    elif isinstance(holder, Optimizer) and key == "state":
        refill(holder.state, list(value.items()))
    elif isinstance(holder, Optimizer) and key == "param_groups":
        for group, saved in zip(holder.param_groups, value, strict=True):
            refill(group, list(saved.items()))
    elif type(holder) is partial and key in ("func", "args", "keywords"):
        called = {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
        holder.__setstate__((*(called | {key: value}).values(), table))  # type: ignore[attr-defined]
    elif isinstance(holder, Tensor) or key in table or not isinstance(holder, MethodType):
        # What a method is bound to was filled in place.
        set_attribute(holder, key, value)


def without_declared(path: str, code: Any, is_declared: Callable[[str], bool]) -> Any:
    """Return a code in which members that are declared as unsaved by now are left as they are."""
    if type(code) is not dict:
        return code
    held = code["fields"] if code.get(TAG) == "object" else code
    if TAG in held:
        return code
    members = {
        key: HOLE
        if is_declared(path_to(path, key))
        else without_declared(path_to(path, key), each, is_declared)
        for key, each in held.items()
    }
    return members if held is code else code | {"fields": members}


def types_in(code: Any) -> Iterator[str]:
    """Yield the names of the classes in a code."""
    waiting = [code]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if each.get(TAG) in ("object", "enum", "flag", "tuple"):
                yield each["type"]
            waiting += each.values()
        elif type(each) in (list, tuple):
            waiting += each
