"""Codes of a whole payload, in which tensors stay plain tensors, as PyTorch's own files hold them.

A network's state in a file is what ``torch.load`` returns, without a tag. Values of users' types
are pickled, if loading may create them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import is_
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from helios.core.generators import is_generator
from helios.core.memory import has_plain_bytes, memory_in, span_of, tensor_on
from helios.storage.building import Builder
from helios.storage.codes import NO_VALUE, TAG, Coder, Codes, Unsavable
from helios.storage.memory_layout import View
from helios.storage.type_converters import ShardedValue, type_name

FindSharded: TypeAlias = Callable[[str], Any]

_SHARDED = "sharded"


class PayloadCoder(Coder):
    """One walk over a payload.

    Args:
        safe_types: users' types that loading may create.
        check_object: called with each object of such a type; raises if it could not be loaded.

    Attributes:
        has_live_objects: whether the code contains users' objects themselves, not copies.
    """

    def __init__(self, safe_types: Iterable[Any], check_object: Callable[[Any], None]) -> None:
        super().__init__()
        self._safe = frozenset(kind for kind in safe_types if isinstance(kind, type))
        self._check_object = check_object
        # The tensor is kept with its code, since an id is unique only while the object exists.
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._replaced: dict[int, dict[str, Any]] = {}
        self.has_live_objects = False

    def encode(self, tree: Any) -> Any:
        """Return the code of a payload.

        Raises:
            Unsavable: if a value has none.
        """
        code = self.code("", tree)
        self.place_views()
        if not self._replaced:
            return code
        return replace_in(code, lambda value: self._replaced.get(id(value), value))

    def code_other(self, path: str, value: Any) -> Any:
        """Return the code of what a walk has written, or of a value of a user's type."""
        kind = type(value)
        if kind is Codes:
            self.tensors[path] = value.tensors
            return {TAG: "codes", "value": dict(value)}
        if kind is ShardedValue:
            return {TAG: _SHARDED, "name": value.name}
        if kind is torch.nn.Parameter:
            return self._plain_tensor(path, value)
        is_own = kind in self._safe
        if kind is int or is_generator(value) or (is_own and isinstance(value, Enum | tuple)):
            return super().code_other(path, value)
        if not is_own:
            raise Unsavable(
                path,
                f"{NO_VALUE.format(type_name(kind))}. Add the type to the model's "
                "types_for_safe_load(), name the attribute in `unsaved`, or give its owner a "
                "state_dict of plain values.",
            )
        try:
            self._check_object(value)
        except Exception as error:
            raise Unsavable(
                path,
                f"its type {type_name(kind)} is a safe type, but its contents could not be loaded "
                f"({error}). Give its owner a state_dict, or name the attribute in `unsaved`.",
            ) from error
        self.has_live_objects = True
        return value

    def keep_plain(self, views: Sequence[View]) -> bool:
        """Return whether views are tensors that torch saves with the memory that they share."""
        tensors = [view.part for view in views if isinstance(view.part, Tensor)]
        homes = {(part.untyped_storage().data_ptr(), part.dtype) for part in tensors}
        if len(tensors) == len(views) and len(homes) == 1:
            self.tensors[views[0].path] = tensors
            return True
        self._replaced |= {id(v.part): v.code for v in views if isinstance(v.part, Tensor)}
        return False

    def _plain_tensor(self, path: str, value: Tensor) -> Tensor:
        if id(value) in self._tensors:
            return self._tensors[id(value)][1]
        code = value.detach()
        is_dense = has_plain_bytes(code)
        if not is_dense or code.is_conj() or code.is_neg():
            # The storage alone does not define its values.
            code = code.clone()
        if type(value) is Tensor and value.is_leaf:
            code.requires_grad_(value.requires_grad)
        self._tensors[id(value)] = value, code
        if is_dense:
            self.views[path] = View(path, code, {TAG: "tensor", "grad": code.requires_grad})
        return code

    makers: ClassVar = {**Coder.makers, Tensor: _plain_tensor}


def compact(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Move tensors away from storages that would be written for a small part only, in place.

    A storage that several tensors use stays whole, as torch writes it once.

    Args:
        tensors: detached tensors.

    Returns:
        The tensors, grouped by their storages.
    """
    found: dict[tuple[str, int, torch.dtype], list[Tensor]] = {}
    for part in tensors:
        storage = part.untyped_storage()
        if storage.nbytes():
            found.setdefault((str(part.device), storage.data_ptr(), part.dtype), []).append(part)
    taken: set[tuple[str, int]] = set()
    for (device, address, dtype), group in found.items():
        size = group[0].untyped_storage().nbytes()
        is_small = len(group) == 1 and size > group[0].nbytes
        # torch writes a storage with elements of one type, and reads whole elements only.
        if is_small or size % dtype.itemsize or (device, address) in taken:
            _move(group)
        taken.add((device, address))
    return [*found.values()]


def _move(group: Sequence[Tensor]) -> None:
    if len(group) == 1:
        group[0].data = group[0].detach().clone()
        return
    spans = [span_of(part) for part in group]
    begin, end = min(spans)[0], max(span[1] for span in spans)
    storage = memory_in((begin, end), group).clone().untyped_storage()
    for part in group:
        first = (part.data_ptr() - begin) // part.element_size()
        part.data = tensor_on(storage, part.dtype, part.shape, part.stride(), first)


class PayloadBuilder(Builder):
    """Builds a payload from its code.

    Args:
        safe_types: the types that may be created; no others are looked up.
        find_sharded: returns the tensor that stands for a sharded one, by name.
    """

    def __init__(
        self, safe_types: Iterable[Any] = (), find_sharded: FindSharded | None = None
    ) -> None:
        super().__init__(safe_types)
        self._find_sharded = find_sharded or ShardedValue

    def build_other(self, path: str, code: dict[str, Any]) -> Any:
        """Return the value of a code that only payloads have."""
        tag = code[TAG]
        if tag == _SHARDED:
            return self._find_sharded(code["name"])
        if tag == "codes":
            return Codes(code["value"])
        return super().build_other(path, code)


def fill_sharded(code: Any, find_sharded: FindSharded) -> Any:
    """Put the tensors that stand for sharded ones into a code, in place, without decoding it.

    Args:
        code: what an encoder or anybody else has made.
        find_sharded: returns such a tensor, by name.
    """

    def swap(value: Any) -> Any:
        is_sharded = isinstance(value, dict) and value.get(TAG) == _SHARDED
        return find_sharded(str(value.get("name"))) if is_sharded else value

    return replace_in(code, swap)


def replace_in(code: Any, swap: Callable[[Any], Any]) -> Any:
    """Replace values in a code, in place.

    Args:
        code: what an encoder or anybody else has made.
        swap: returns what stands in place of a value, or the value.
    """
    waiting: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> Any:
        found = swap(value)
        if found is not value:
            return found
        if type(value) is tuple:
            members = tuple(map(visit, value))
            return value if all(map(is_, members, value)) else members
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            waiting.append(value)
        return value

    code = visit(code)
    while waiting:
        holder = waiting.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            holder[key] = visit(holder[key])
    return code
