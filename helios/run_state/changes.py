"""Which plain values training has changed since setup, and how they are put back.

All values that are saved lie in one payload, so that two attributes that name one list still do
after a resume; what is an alias of a saved value is therefore saved too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from helios.run_state.found import Container, Found, Slot, SlotKey
from helios.run_state.values import (
    LIMIT,
    Digest,
    Identities,
    Surroundings,
    plain_parts,
    take_digest,
    tensors_in,
)


class _Value(NamedTuple):
    """A plain value, its digest and the addresses of its mutable parts."""

    slot: Slot
    digest: Digest
    parts: set[int]


@dataclass(frozen=True)
class Changes:
    """What training has changed.

    Attributes:
        values: what is saved: ``changed`` values by the path of their container and by key,
            ``deleted`` keys by that path, and ``devices``, the device types of the tensors among
            them where not all lie on the CPU.
        large: plain values beyond the limit.
        others: what no checkpoint can hold.
    """

    values: dict[str, Any]
    large: list[Slot]
    others: list[Slot]


def digests_of(
    found: Found, surroundings: Surroundings, identities: Identities
) -> dict[SlotKey, Digest]:
    """Return a digest of everything that is no object with a state."""
    digests = {}
    for where, slot in found.slots.items():
        is_plain = slot.is_settable and plain_parts(slot.value, surroundings) is not None
        digests[where] = take_digest(slot.value, surroundings, identities, is_plain=is_plain)
    return digests


def changes_since(
    baseline: dict[SlotKey, Digest],
    found: Found,
    surroundings: Surroundings,
    identities: Identities,
    ignored: frozenset[str],
) -> Changes:
    """Compare with the digests of a baseline.

    Args:
        baseline: what :func:`digests_of` returned after setup.
        found: what is there now.
        surroundings: what is saved on its own account.
        identities: those that the baseline was taken with.
        ignored: paths of others that were reported before and need no digest.
    """
    changed: list[_Value] = []
    unchanged: list[_Value] = []
    others: list[Slot] = []
    for where, slot in found.slots.items():
        parts = plain_parts(slot.value, surroundings) if slot.is_settable else None
        if parts is None and slot.path in ignored:
            continue
        digest = take_digest(slot.value, surroundings, identities, is_plain=parts is not None)
        known = baseline.get(where)
        has_changed = known is None or known[:2] != digest[:2]
        if parts is not None and digest.is_plain:
            (changed if has_changed else unchanged).append(_Value(slot, digest, parts))
        elif has_changed:
            others.append(slot)
    kept, large = _within_limit(_with_aliases(changed, unchanged))
    return Changes(_payload(kept, _deleted(found, baseline)), large, others)


def _payload(kept: list[Slot], deleted: dict[str, list[Any]]) -> dict[str, Any]:
    values: dict[str, dict[Any, Any]] = {}
    for slot in kept:
        values.setdefault(slot.parent, {})[slot.key] = slot.value
    devices = [tensor.device.type for tensor in tensors_in(values)]
    has_moved = bool(set(devices) - {"cpu"})
    return {"changed": values, "deleted": deleted, "devices": devices if has_moved else []}


def _with_aliases(changed: list[_Value], unchanged: list[_Value]) -> list[_Value]:
    """Add the values that share a list, dict, array or tensor with one that is saved."""
    group = list(changed)
    waiting = [value for value in unchanged if value.parts]
    shared: set[int] = set().union(*(value.parts for value in group))
    while joining := [value for value in waiting if value.parts & shared]:
        group += joining
        waiting = [value for value in waiting if not value.parts & shared]
        shared.update(*(value.parts for value in joining))
    return group


def _within_limit(values: list[_Value]) -> tuple[list[Slot], list[Slot]]:
    """Return what is saved, and what is too large; the smallest values come first."""
    kept: list[Slot] = []
    large: list[Slot] = []
    counted: set[int] = set()
    total = 0
    for value in sorted(values, key=lambda value: (value.digest.size, value.slot.path)):
        is_counted = bool(value.parts) and value.parts <= counted
        size = 0 if is_counted else value.digest.size
        if total + size > LIMIT:
            large.append(value.slot)
            continue
        total += size
        counted |= value.parts
        kept.append(value.slot)
    return sorted(kept, key=_place), sorted(large, key=_place)


def _place(slot: Slot) -> tuple[str, int, str]:
    """Order slots by path, those of a list by number: they are restored in this order."""
    return slot.parent, slot.key if isinstance(slot.key, int) else 0, slot.path


def _deleted(found: Found, baseline: dict[SlotKey, Digest]) -> dict[str, list[Any]]:
    """Return the keys that containers no longer have, in the baseline's order."""
    deleted: dict[str, list[Any]] = {}
    for parent, key in baseline:
        container = found.containers.get(parent)
        if container is None or (parent, key) in found.slots:
            continue
        if not _holds(container, key):
            deleted.setdefault(parent, []).append(key)
    return deleted


def places_in(values: dict[str, Any]) -> list[SlotKey]:
    """Return the places that saved values are of, those that were deleted too."""
    return [
        (parent, key)
        for kind in ("changed", "deleted")
        for parent, keys in values[kind].items()
        for key in keys
    ]


def restore_values(
    values: dict[str, Any], found: Found, may_set: Callable[[str, Any], bool]
) -> None:
    """Put back copies of saved values, and remove what training had removed.

    Args:
        values: :attr:`Changes.values`.
        found: what is there now.
        may_set: whether a key of the container at a path may get a value.
    """
    changed = _copied(values["changed"], values["devices"])
    for parent, members in changed.items():
        for key, value in members.items():
            if may_set(parent, key):
                _put(found.containers[parent], key, value)
    for parent, keys in values["deleted"].items():
        for key in reversed(keys):
            if (parent, key) in found.slots:
                _remove(found.containers[parent], key)


def _holds(container: Container, key: Any) -> bool:
    if isinstance(container, nn.Module):
        return key in vars(container) or key in dict(container.named_buffers(recurse=False))
    return key < len(container) if isinstance(container, list) else key in container


def _remove(container: Container, key: Any) -> None:
    if isinstance(container, nn.Module):
        delattr(container, key)
    else:
        del container[key]


def _put(container: Container, key: Any, value: Any) -> None:
    if isinstance(container, nn.Module):
        setattr(container, key, value)
    elif isinstance(container, list) and key >= len(container):
        container.append(value)
    else:
        container[key] = value


def _copied(values: dict[str, Any], devices: list[str]) -> dict[str, Any]:
    """Return a copy with the same aliases, its tensors where they were when they were saved."""
    there: dict[int, Any] = {}
    if devices and torch.accelerator.is_available():
        present = torch.accelerator.current_accelerator()
        for tensor, device in zip(tensors_in(values), devices, strict=True):
            if present is not None and present.type == device != tensor.device.type:
                moved = tensor.detach().to(device)
                there[id(tensor)] = moved.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(values, there)
