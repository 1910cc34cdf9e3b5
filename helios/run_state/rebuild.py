"""Converts plain values to the form of files and back: users' types, aliases, shared memory.

In a file, enum members and dataclasses are stored by the names of their types, and values that
share memory with a parameter or buffer by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from enum import Enum, Flag
from functools import cached_property, reduce
from operator import or_
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from helios.core.memory import (
    array_on,
    bytes_in,
    copied_together,
    extent_of,
    has_plain_bytes,
    overlapping,
    tensor_on,
)
from helios.errors import StateError
from helios.run_state.plain_values import (
    Identities,
    Surroundings,
    fields_of,
    flags_in,
    parts_in,
    tensors_in,
)
from helios.run_state.value_hash import Look
from helios.run_state.value_scan import look_at
from helios.run_state.walk_result import SlotKey, path_of
from helios.storage.user_types import Alias, NamedFields, NamedMember, type_name

Values: TypeAlias = dict[str, dict[Any, Any]]
_Memo: TypeAlias = dict[int, Any]


def substitute(values: Values, looks: Iterable[Look]) -> Values:
    """Return values with names in place of users' types and of objects that are saved elsewhere.

    Args:
        values: plain values by the path of their container and by key.
        looks: the scans of the values.
    """
    memo: _Memo = {}
    records: list[Any] = []
    for look in looks:
        memo.update((id(part), alias) for part, alias in look.aliases)
        records += look.records
    memo.update((id(record), _named(record)) for record in records)
    for part in parts_in(values):
        # Only containers are copied; the file must contain the current content of memory.
        if isinstance(part, Tensor | np.generic) or _is_memory(part):
            memo.setdefault(id(part), part)
    for record in records:
        if not isinstance(record, Enum):
            memo[id(record)].fields.update(copy.deepcopy(_fields_in(record), memo))
    return copy.deepcopy(values, memo)


def _is_memory(part: Any) -> bool:
    return type(part) is np.ndarray and not part.dtype.hasobject


def _fields_in(record: Any) -> dict[str, Any]:
    names = fields_of(type(record)) or ()
    return {name: object.__getattribute__(record, name) for name in names}


def _named(record: Any) -> NamedMember | NamedFields:
    name = type_name(type(record))
    if isinstance(record, Flag):
        return NamedMember(name, tuple(flags_in(record) or ()), is_flag=True)
    if isinstance(record, Enum):
        return NamedMember(name, (record.name,), is_flag=False)
    return NamedFields(name, {})


def rebuild(values: Values, devices: list[str], resolver: Resolver) -> Values:
    """Return copies of saved values, with the same aliases and shared memory.

    Args:
        values: what :func:`substitute` returned, or was read from a file.
        devices: the types of the devices that the tensors were on; empty if all on the host.
        resolver: builds what is stored by name.

    Raises:
        StateError: for an unknown type or tensor.
    """
    memo = _moved(values, devices)
    memo |= _copied_memory(part for part in parts_in(values) if id(part) not in memo)
    resolver.resolve(values, memo)
    return copy.deepcopy(values, memo)


def _moved(values: Values, devices: list[str]) -> _Memo:
    """Return copies of tensors on the device that they were on when they were saved."""
    there: _Memo = {}
    if devices and torch.accelerator.is_available():
        present = torch.accelerator.current_accelerator()
        for tensor, device in zip(tensors_in(values), devices, strict=True):
            if present is not None and present.type == device != tensor.device.type:
                moved = tensor.detach().to(device)
                there[id(tensor)] = moved.requires_grad_(tensor.requires_grad)
    return there


def _copied_memory(parts: Iterable[Any]) -> _Memo:
    """Return copies of arrays; those that share memory, with tensors too, share it again."""
    copies: _Memo = {}
    members = [part for part in parts if _is_memory(part) or _is_on_host(part)]
    extents = [extent_of(part) for part in members]
    for group in overlapping(extents):
        sharing = [members[number] for number in group]
        if len(group) == 1 or all(isinstance(part, Tensor) for part in sharing):
            continue
        _, twins = copied_together(sharing)
        copies.update(zip(map(id, sharing), twins, strict=True))
    for part in members:
        if not isinstance(part, Tensor) and not part.flags.writeable and id(part) not in copies:
            copies[id(part)] = part.copy(order="K")
            copies[id(part)].flags.writeable = False
    return copies


def _is_on_host(part: Any) -> bool:
    return isinstance(part, Tensor) and part.device.type == "cpu" and has_plain_bytes(part)


@final
class Resolver:
    """Builds what a file stores by name from what the owner has.

    Args:
        present: what setup has made at the saved paths; its types are known.
        surroundings: what is saved elsewhere.
        safe_types: other types that may be built.
    """

    def __init__(
        self,
        present: Mapping[SlotKey, Any],
        surroundings: Surroundings,
        safe_types: Iterable[Any] = (),
    ) -> None:
        self._present = present
        self._surroundings = surroundings
        self._safe_types = safe_types

    @cached_property
    def _types(self) -> dict[SlotKey, dict[str, type]]:
        identities = Identities()
        return {
            where: {
                type_name(kind): kind
                for kind in look_at(value, self._surroundings, identities).types
            }
            for where, value in self._present.items()
        }

    @cached_property
    def _all_types(self) -> dict[str, type]:
        known: dict[str, type] = {}
        for types in self._types.values():
            known |= types
        return known | {
            type_name(kind): kind for kind in self._safe_types if isinstance(kind, type)
        }

    def resolve(self, values: Values, memo: dict[int, Any]) -> None:
        """Build all parts of values that have names.

        Args:
            values: values by the path of their container and by key.
            memo: copies by the id of the original, for :func:`copy.deepcopy`; the built parts are
                added.
        """
        empty: list[tuple[Any, dict[str, Any]]] = []
        for parent, members in values.items():
            for key, value in members.items():
                for part in parts_in(value):
                    if id(part) not in memo:
                        self._resolve(part, (parent, key), memo, empty)
        # A dataclass may refer to any other. None of their methods run, and frozen ones are filled.
        for record, fields in empty:
            for name, content in fields.items():
                object.__setattr__(record, name, copy.deepcopy(content, memo))

    def _resolve(
        self,
        part: Any,
        where: SlotKey,
        memo: dict[int, Any],
        empty: list[tuple[Any, dict[str, Any]]],
    ) -> None:
        if isinstance(part, Alias):
            memo[id(part)] = self._look_at_target(part, where)
        elif isinstance(part, NamedMember):
            memo[id(part)] = self._member(part, where)
        elif isinstance(part, NamedFields):
            kind = self._type(part.type, where)
            _check_fields(kind, part, where)
            memo[id(part)] = object.__new__(kind)
            empty.append((memo[id(part)], part.fields))

    def _type(self, name: str, where: SlotKey) -> type:
        kind = self._types.get(where, {}).get(name) or self._all_types.get(name)
        if kind is None:
            raise StateError(
                f"{path_of(*where)} was saved with a {name}, which is not known here: types come "
                "from the values that setup() makes, never from a file. Create such a value in "
                "setup(), or return the type from types_for_safe_load()."
            )
        return kind

    def _member(self, part: NamedMember, where: SlotKey) -> Enum:
        kind = cast("type[Enum]", self._type(part.type, where))
        unknown = [name for name in part.names if name not in kind.__members__]
        if unknown:
            raise StateError(
                f"{path_of(*where)} was saved as {part.type}.{unknown[0]}, which that enum no "
                f"longer has. Add the member {unknown[0]}."
            )
        members = [kind[name] for name in part.names]
        return reduce(or_, members, kind(0)) if part.is_flag else members[0]

    def _look_at_target(self, part: Alias, where: SlotKey) -> Any:
        target = self._surroundings.storages.tensor(part.target)
        if target is None:
            raise StateError(
                f"{path_of(*where)} shared its memory with {part.target}, which does not exist "
                "now. Build it in setup() as it was when the state was saved."
            )
        if part.way == "itself":
            return target
        try:
            return _on_target(part, target)
        except (ValueError, RuntimeError, TypeError) as error:
            raise StateError(
                f"{path_of(*where)} was a view of {part.target} that no longer fits: {error}. "
                "Build it in setup() as it was when the state was saved."
            ) from error


def _on_target(part: Alias, target: Tensor) -> Any:
    storage = target.untyped_storage()
    begin = target.data_ptr() - storage.data_ptr() + part.offset
    if part.way == "array":
        if target.device.type != "cpu":
            raise ValueError(f"a NumPy array cannot be a view of a tensor on {target.device}")
        dtype = np.lib.format.descr_to_dtype(part.dtype)
        memory = bytes_in((storage.data_ptr(), storage.data_ptr() + storage.nbytes()), [target])
        array = array_on(memory.numpy(), dtype, part.shape, part.strides, begin)
        array.flags.writeable = part.flag
        return array
    size = part.dtype.itemsize
    reach = sum((n - 1) * step for n, step in zip(part.shape, part.strides, strict=True))
    # torch refuses an offset before the storage, but would enlarge the storage at its end.
    if begin % size or (reach + 1) * size + begin > storage.nbytes():
        raise ValueError(f"it extends beyond the {storage.nbytes()} bytes of the storage")
    twin = tensor_on(storage, part.dtype, part.shape, part.strides, begin // size)
    return twin.requires_grad_(part.flag)


def _check_fields(kind: type, part: NamedFields, where: SlotKey) -> None:
    names = set(fields_of(kind) or ())
    if names != part.fields.keys():
        raise StateError(
            f"{path_of(*where)} was saved with the fields {sorted(part.fields)} of {part.type}, "
            f"which has {sorted(names)} now. Restore the fields that it had."
        )
