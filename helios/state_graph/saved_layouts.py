"""Saves and restores the forms of tensors, and the memory that several of them share.

``load_state_dict`` casts to the type that ``setup`` built, rejects another shape, and knows nothing
of memory. What training has changed of that is made again before values are loaded, and filled
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.core.memory import is_expanded, storage_bytes, storage_of, tensor_on
from helios.errors import StateError
from helios.state_graph.changes import Changes
from helios.state_graph.graph import Graph
from helios.state_graph.layouts import (
    Form,
    Layouts,
    around,
    form_of,
    geometries_of,
    memory_mark,
    registrations_of,
    written,
)
from helios.state_graph.module_state import storages_of
from helios.state_graph.network_parts import NamedTensor, Network
from helios.state_graph.object_names import ObjectNames

_SHOWN = 3


def changed_layouts(
    graph: Graph,
    changes: Changes,
    forms: Mapping[str, Form | None],
    marks: Mapping[str, Any],
    *,
    limit: int,
) -> dict[str, Any]:
    """Return forms that differ from those of setup, and memory that several tensors share.

    Args:
        graph: what the owner holds now.
        changes: of values, with the storages of which they see more than a tensor; shared memory
            that is too large is reported there instead.
        forms: those of setup.
        marks: what :func:`memory_marks` returned after setup.
        limit: maximum bytes of plain values.

    Returns:
        ``forms``, the names of tensors that have others; ``homes``, by the name of the tensor
        through which plain values find the memory: ``members``, the shape, strides and offset of
        each tensor in it, by name; and the whole ``memory``, with the ``tail`` of bytes that do not
        fill an element, or ``None`` if training has changed nothing but these tensors.
    """
    layouts = graph.layouts
    names = [
        name
        for name, form in layouts.forms.items()
        if form is not None and (name not in forms or forms[name] not in (None, form))
    ]
    homes: dict[str, Any] = {}
    room = changes.room
    for anchor, members in layouts.homes(lambda: graph.storages, changes.reached.keys()).items():
        places = changes.reached.get(storage_of(members[anchor]), [])
        mark = marks.get(anchor)
        is_changed = mark is None or mark != memory_mark(members, mark)
        memory = tail = None
        if is_changed:
            size = sum(piece.numel() for piece in around(members)) if places else 0
            if size > room:
                changes.refuse(places, limit)
                continue
            room -= size
            memory, tail = _content(members[anchor])
        homes[anchor] = {"members": geometries_of(members), "memory": memory, "tail": tail}
    return {"forms": names, "homes": homes}


def _content(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the memory of a tensor, as elements of its type and the remaining bytes."""
    whole = storage_bytes(part)
    length, left = divmod(len(whole), part.element_size())
    memory = tensor_on(part.untyped_storage(), part.dtype, (length,), (1,), 0)
    return memory, whole[len(whole) - left :].clone()


@final
class SavedLayouts:
    """Gives tensors the forms and the memory that they had.

    Args:
        section: what :func:`changed_layouts` returned.
        live: what setup has made, with the parts that networks had.
        state: the captured state, which contains the tensors.
    """

    def __init__(self, section: Mapping[str, Any], live: Graph, state: Mapping[str, Any]) -> None:
        self._live = live
        self._forms = set(section["forms"])
        self._homes: Mapping[str, Any] = section["homes"]
        self._slots = registrations_of(live.found)
        self._loose = live.parameters.loose
        self._kept: dict[str, Tensor] = {}
        self._saved = state

    def make(self) -> None:
        """Give tensors their forms, and memory of their own to those that overlap, to load them."""
        for name in self._forms & self._loose.keys() & self._saved["parameters"].keys():
            _reform(self._loose[name], self._saved["parameters"][name])
        if self._forms:
            self._reform_networks()
        self._part()
        tensors = self._tensors()
        self._slots = {
            name: slot._replace(tensor=tensors[name])
            for name, slot in self._slots.items()
            if name in tensors
        }

    def _reform_networks(self) -> None:
        names = self._live.found.names
        twins: dict[int, tuple[Tensor, Tensor]] = {}
        for path, module in self._live.found.all_modules().items():
            saved = tensors_in(self._saved).get(path, {})
            for slot in Network(module).tensors:
                if slot.name not in saved or names.get(id(slot.tensor)) not in self._forms:
                    continue
                if is_lazy(slot.tensor) or form_of(slot.tensor) == form_of(saved[slot.name]):
                    continue
                if isinstance(slot.tensor, nn.Parameter):
                    _reform(slot.tensor, saved[slot.name])
                else:
                    # Others may go on with the tensor of setup; setattr would refuse a view.
                    twin = _empty_like(saved[slot.name], slot.tensor.device)
                    _, twin = twins.setdefault(id(slot.tensor), (slot.tensor, twin))
                    vars(slot.module)["_buffers"][slot.key] = twin

    def _tensors(self) -> dict[str, Tensor]:
        """Return what is registered now, of what setup has made."""
        now = {name: _registered(slot) for name, slot in self._slots.items()}
        return {**{name: part for name, part in now.items() if part is not None}, **self._loose}

    def _part(self) -> None:
        """Part what overlaps, but what lies as it was, and what is expanded."""
        now = Layouts({}, self._tensors())
        storages = storages_of(self._live.found.anew(), self._live.parameters)
        parted = {name for name, part in now.tensors.items() if is_expanded(part)}
        wanted = (now.tensors[name] for name in self._homes if name in now.tensors)
        for anchor, members in now.homes(lambda: storages, set(map(storage_of, wanted))).items():
            home = self._homes.get(anchor)
            if home and (home["memory"] is not None or home["members"] == geometries_of(members)):
                self._kept[anchor] = members[anchor].detach()
                if home["memory"] is None:
                    continue
            parted |= members.keys() - {anchor}
        for name in parted:
            now.tensors[name].data = now.tensors[name].detach().clone()

    def put_back(self) -> None:
        """Let networks hold the tensors of setup again, where loading has assigned others."""
        put_back(self._slots)

    def fill(self) -> None:
        """Let tensors view the memory again that they had, after they were loaded."""
        tensors = self._tensors() if self._homes else {}
        for anchor, home in self._homes.items():
            members = {name: place for name, place in home["members"].items() if name in tensors}
            if anchor not in members:
                continue
            if home["memory"] is not None:
                kept = self._kept.get(anchor)
                whole = _filled(home, members[anchor][2], tensors[anchor], kept)
            elif anchor in self._kept:
                whole = storage_bytes(self._kept[anchor])
            else:
                # Setup gives them another layout now.
                continue
            for name, place in members.items():
                view = tensor_on(whole.untyped_storage(), tensors[name].dtype, *place)
                if home["memory"] is None and storage_of(view) != storage_of(tensors[name]):
                    steps = view.stride()
                    written(view, steps).copy_(written(tensors[name].detach(), steps))
                tensors[name].data = view


def put_back(slots: Mapping[str, NamedTensor], moved: Iterable[Tensor] = ()) -> None:
    """Let networks hold their tensors again, with the content of those that loading has assigned.

    Optimizers and attributes refer to the former ones.

    Args:
        slots: where tensors were registered before loading.
        moved: those that optimizers update now, which stay where they are.
    """
    known = {id(slot.tensor) for slot in slots.values()}.union(map(id, moved))
    for slot in slots.values():
        present = _registered(slot)
        if present is None or id(present) in known or is_lazy(slot.tensor):
            continue
        slot.tensor.data = present.detach()
        table = "_parameters" if slot.key in vars(slot.module)["_parameters"] else "_buffers"
        vars(slot.module)[table][slot.key] = slot.tensor


def _registered(slot: NamedTensor) -> Tensor | None:
    """Return the tensor that a slot holds now, which loading may have replaced."""
    table = vars(slot.module)
    found: Tensor | None = table["_parameters"].get(slot.key, table["_buffers"].get(slot.key))
    return found


def _filled(home: Mapping[str, Any], offset: int, anchor: Tensor, kept: Tensor | None) -> Tensor:
    """Return memory with the saved content; that of setup, if it fits."""
    memory, tail = home["memory"], home["tail"]
    if memory.dtype != anchor.dtype:
        memory, tail = memory.to(anchor.dtype), tail[:0]
    num_bytes = memory.nbytes + len(tail)
    whole = None if kept is None else storage_bytes(kept)
    # Values that view the memory of setup must find the content there.
    if whole is None or kept is None or len(whole) != num_bytes or kept.storage_offset() != offset:
        whole = torch.empty(num_bytes, dtype=torch.uint8, device=anchor.device)
    whole[: memory.nbytes].copy_(memory.view(torch.uint8))
    whole[memory.nbytes :].copy_(tail)
    return whole


def _empty_like(saved: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(saved, device=device, requires_grad=False)


def _reform(tensor: Tensor, saved: Tensor) -> None:
    # Optimizers know it by identity. Its gradient, of the old form, is in the state.
    tensor.grad = None
    tensor.data = _empty_like(saved, tensor.device)


def casts(found: ObjectNames, state: Mapping[str, Any]) -> list[str]:
    """Describe tensors of networks for which ``setup`` has built another type than was saved."""
    texts: list[str] = []
    for path, module in found.all_modules().items():
        saved = tensors_in(state).get(path, {})
        differing: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for slot in Network(module).tensors:
            before = saved.get(slot.name)
            if not isinstance(before, Tensor) or is_lazy(slot.tensor):
                continue
            if before.dtype != slot.tensor.dtype:
                names = differing.setdefault((before.dtype, slot.tensor.dtype), [])
                names.append(f"{path}.{slot.name}")
        for (old, new), names in differing.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            texts.append(f"{', '.join(names[:_SHOWN])}{more} ({old}, now {new})")
    return texts


def tensors_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state holds of networks, by path and bare name."""
    states = {**state["objects"], **state.get("inner", {})}
    for path, omitted in state.get("omitted", {}).items():
        states[path] = {**states.get(path, {}), **omitted["values"]}
    return states


def fill(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Fill a tensor in place, because optimizers know it by identity.

    Raises:
        StateError: if its shape is not the saved one.
    """
    if tensor.shape != saved.shape:
        raise StateError(
            f"{name}: the saved tensor has the shape {tuple(saved.shape)}, the current one "
            f"{tuple(tensor.shape)}. Build it in setup() as it was when the state was saved."
        )
    with torch.no_grad():
        tensor.copy_(saved)
