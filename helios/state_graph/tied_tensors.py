"""Finds parameters and buffers of networks that are the same tensor or share memory.

Optimizers identify parameters by identity, so if training ties a parameter to another one or unties
it, ``setup`` cannot rebuild that. Shared memory and shared buffers are restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.core.memory import has_plain_bytes, span_of, storage_of
from helios.state_graph.module_state import Parameters
from helios.state_graph.network_parts import NamedTensor
from helios.state_graph.object_names import ObjectNames

_Tie: TypeAlias = tuple[str, bool]
"""The name of the first tensor in the same memory, and whether it is the same object."""


@dataclass(frozen=True)
class Ties:
    """Which tensors share memory.

    Attributes:
        names: all parameters and persistent buffers.
        tied: those that have exactly the same elements as an earlier one.
        overlapping: the storages in which tensors overlap otherwise.
        mingled: tensors whose storages overlap, with the other one and the distance in bytes: they
            were created from arrays that share memory, which torch does not know.
    """

    names: frozenset[str]
    tied: dict[str, _Tie]
    overlapping: frozenset[int]
    mingled: dict[str, tuple[str, int]]


def ties_of(found: ObjectNames, parameters: Parameters) -> Ties:
    """Return the current ties of tensors of all networks and of parameters outside of them."""
    first: dict[int, list[tuple[str, Tensor]]] = {}
    tied: dict[str, _Tie] = {}
    places = _places(found)
    for name, place in places.items():
        group = first.setdefault(_address(place.tensor), [])
        known = next((entry for entry in group if _see_the_same(entry[1], place.tensor)), None)
        if known is None:
            group.append((name, place.tensor))
        else:
            tied[name] = known[0], known[1] is place.tensor
    for name, tensor in parameters.loose.items():
        group = first.setdefault(_address(tensor), [])
        if not any(_see_the_same(known, tensor) for _, known in group):
            group.append((name, tensor))
    dense = [(place, *entry) for place, group in first.items() if place > 0 for entry in group]
    return Ties(frozenset(places), tied, *_overlapping(dense))


def _overlapping(
    tensors: Iterable[tuple[int, str, Tensor]],
) -> tuple[frozenset[int], dict[str, tuple[str, int]]]:
    """Return the storages in which tensors overlap, and which tensors overlap across storages.

    Args:
        tensors: dense tensors, with the address of their first element and their name.
    """
    shared: set[int] = set()
    mingled: dict[str, tuple[str, int]] = {}
    reached = 0
    last: tuple[str, Tensor] | None = None
    for begin, name, tensor in sorted(tensors, key=itemgetter(0)):
        if last is not None and begin < reached:
            shared.add(storage_of(tensor))
            if storage_of(tensor) != storage_of(last[1]):
                mingled[name] = last[0], begin - last[1].data_ptr()
        end = begin + tensor.nbytes if tensor.is_contiguous() else span_of(tensor)[1]
        if end > reached:
            reached, last = end, (name, tensor)
    return frozenset(shared), mingled


def changed_ties(
    before: Ties, now: Ties, found: ObjectNames
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ties that differ from those after setup.

    Args:
        before: the ties after setup.
        now: the current ties.
        found: what the owner holds now.

    Returns:
        The tie of each tensor whose memory is shared differently, ``None`` for one that has its
        own; and the parameters that are other objects than those of setup, with what has changed.
    """
    changed: dict[str, Any] = {}
    misfits: dict[str, str] = {}
    places = _places(found) if now.tied != before.tied else {}
    for name in sorted(before.names & now.names & (before.tied.keys() | now.tied.keys())):
        old, new = before.tied.get(name), now.tied.get(name)
        if old == new:
            continue
        is_same = any(tie is not None and tie[1] for tie in (old, new))
        if is_same and isinstance(places[name].tensor, nn.Parameter):
            misfits[name] = f"it was {_text(old)}, now {_text(new)}"
        else:
            changed[name] = new
    return changed, misfits


def restore_ties(changed: Mapping[str, Any], found: ObjectNames) -> None:
    """Share and separate memory as training has done, before values are loaded."""
    places = _places(found.anew()) if changed else {}
    known = {name: tie for name, tie in changed.items() if name in places}
    for name, tie in known.items():
        if tie is None or tie[0] not in places:
            _put(places[name], places[name].tensor.detach().clone())
    places = _places(found.anew()) if changed else {}
    for name, tie in known.items():
        if tie is not None and tie[0] in places:
            first, is_same = places[tie[0]].tensor, tie[1]
            _put(places[name], first if is_same else first.detach())


def _put(place: NamedTensor, tensor: Tensor) -> None:
    if isinstance(place.tensor, nn.Parameter):
        # Optimizers know the parameter by identity.
        place.tensor.data = tensor.detach()
    else:
        place.module._buffers[place.key] = tensor  # noqa: SLF001 - setattr would refuse a parameter


def _address(tensor: Tensor) -> int:
    """Return the address of the first element; a negative number of its own if there is none."""
    if is_lazy(tensor) or not has_plain_bytes(tensor) or not tensor.numel():
        return -id(tensor)
    return tensor.data_ptr()


def _see_the_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors with the same first element have exactly the same elements."""
    return one is other or (
        (one.device, one.dtype, one.shape) == (other.device, other.dtype, other.shape)
        and one.stride() == other.stride()
    )


def _text(tie: _Tie | None) -> str:
    if tie is None:
        return "a tensor of its own"
    return tie[0] if tie[1] else f"another tensor in the memory of {tie[0]}"


def tensors_of_networks(found: ObjectNames) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by name, those of each module once."""
    return ((name, place.tensor) for name, place in _walk(found))


def _places(found: ObjectNames) -> dict[str, NamedTensor]:
    return dict(_walk(found))


def _walk(found: ObjectNames) -> Iterator[tuple[str, NamedTensor]]:
    """Yield the tensors by name, each module once, under the first path that leads to it."""
    seen: set[int] = set()
    for path, part in found.all_modules().items():
        network = found.networks.of(part)
        for place in network.tensors:
            if id(place.module) not in seen:
                yield f"{path}.{place.name}", place
        seen.update(id(module) for _, module in network.modules)
