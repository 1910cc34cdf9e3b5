"""Saves references to objects, and the order of keys, where training has changed them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from helios.run_state.object_names import KeyedByObjects
from helios.run_state.walk_result import Container, SlotKey, WalkResult, path_of

IN_NEW = "in a list, dict or object that setup() does not create: create that in setup()"
_OF_TUPLE = "another object in a tuple: keep objects that change in a list"


def changed_aliases(
    before: Mapping[SlotKey, str], found: WalkResult, new: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return references to objects that differ from those after setup.

    Args:
        before: the names of objects after setup, by slot.
        found: what the owner holds now.
        new: the paths of containers that setup does not create.

    Returns:
        ``set``: names of objects by the path of the container and by key, ``deleted``: removed
        keys by that path, ``lengths``: those of lists with changed members; and the paths that
        cannot be restored, with the reason.
    """
    changed: dict[str, dict[Any, str]] = {}
    lost: dict[str, str] = {}
    for (parent, key), name in found.aliases.items():
        if before.get((parent, key)) == name or _is_primary(parent, key, name, before):
            continue
        if parent in new:
            lost[path_of(parent, key)] = IN_NEW
        elif parent in found.containers:
            changed.setdefault(parent, {})[key] = name
        else:
            lost[path_of(parent, key)] = _OF_TUPLE
    deleted = _deleted(before, found)
    lists = {
        path: len(found.containers[path])  # type: ignore[arg-type]
        for path in changed.keys() | deleted.keys()
        if isinstance(found.containers[path], list)
    }
    return {"set": changed, "deleted": deleted, "lengths": lists}, lost


def _is_primary(parent: str, key: Any, name: str, before: Mapping[SlotKey, str]) -> bool:
    """Return whether a new slot gives an object its path, which is reported elsewhere."""
    return (parent, key) not in before and path_of(parent, key) == name


def _deleted(before: Mapping[SlotKey, str], found: WalkResult) -> dict[str, list[Any]]:
    """Return the slots that referred to an object and no longer exist."""
    deleted: dict[str, list[Any]] = {}
    for parent, key in before:
        container = found.containers.get(parent)
        is_named = container is None or (parent, key) in found.aliases
        if container is not None and not is_named and not holds(container, key):
            deleted.setdefault(parent, []).append(key)
    return deleted


def homes_of_generators(found: WalkResult, new: Collection[str]) -> dict[str, SlotKey]:
    """Return, by path, a slot of each generator that a resume can restore.

    Args:
        found: what the owner holds now.
        new: the paths of containers that setup does not create.
    """
    homes: dict[str, SlotKey] = {}
    for (parent, key), name in found.aliases.items():
        is_open = isinstance(found.containers.get(parent), dict | nn.Module)
        if name in found.generators and is_open and parent not in new:
            homes.setdefault(name, (parent, key))
    return homes


def changed_orders(before: Mapping[str, list[Any]], found: WalkResult) -> dict[str, list[Any]]:
    """Return the keys of dicts and ``ModuleDict`` whose order has changed since setup."""
    return {path: keys for path, keys in found.orders.items() if before.get(path) != keys}


def restore_aliases(
    aliases: Mapping[str, Any],
    containers: Mapping[str, Container],
    find: Callable[[str], object | None],
) -> None:
    """Restore the saved references to objects.

    Args:
        aliases: what :func:`changed_aliases` returned.
        containers: the current containers, by path.
        find: returns the current object of a name.
    """
    for parent, members in aliases["set"].items():
        for key, name in sorted(members.items(), key=lambda item: str(item[0]).zfill(20)):
            value = find(name)
            if value is not None and parent in containers:
                put(containers[parent], key, value)
    for parent, keys in aliases["deleted"].items():
        container = containers.get(parent)
        if container is not None and not isinstance(container, list):
            for key in filter(partial(holds, container), keys):
                remove(container, key)
    for parent, length in aliases["lengths"].items():
        container = containers.get(parent)
        if isinstance(container, list):
            del container[length:]


def restore_orders(orders: Mapping[str, list[Any]], containers: Mapping[str, Container]) -> None:
    """Restore the saved order of keys of dicts and ``ModuleDict``."""
    for path, keys in orders.items():
        container = containers.get(path)
        if isinstance(container, nn.ModuleDict):
            _reorder(vars(container)["_modules"], keys)
        elif isinstance(container, KeyedByObjects):
            container.reorder(keys)
        elif isinstance(container, dict):
            _reorder(container, keys)


def _reorder(table: dict[Any, Any], keys: list[Any]) -> None:
    known = [key for key in keys if key in table]
    if list(table) != known:
        for key in known:
            table[key] = table.pop(key)


def put(container: Container, key: Any, value: Any) -> None:
    """Set a member of a container. One beyond the end of a list is appended."""
    if isinstance(container, nn.Module):
        setattr(container, key, value)
    elif isinstance(container, list) and key >= len(container):
        # The members before it may be objects, which are put there later.
        container += [None] * (key - len(container))
        container.append(value)
    else:
        container[key] = value


def holds(container: Container, key: Any) -> bool:
    """Return whether a container has a key."""
    if isinstance(container, nn.Module):
        return key in vars(container) or key in dict(container.named_buffers(recurse=False))
    return key < len(container) if isinstance(container, list) else key in container


def remove(container: Container, key: Any) -> None:
    """Remove a key from a container."""
    if isinstance(container, nn.Module):
        delattr(container, key)
    else:
        del container[key]
