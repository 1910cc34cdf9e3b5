"""Preserves memory that tensors and arrays of a tree share when the tree is saved and loaded.

torch writes each storage once, as a whole. Arrays that share memory with other arrays or with
tensors are encoded as views of one storage, other arrays by value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from helios.core.memory import (
    Array,
    address_of,
    copied_together,
    extent_of,
    is_foreign,
    overlapping,
    tensor_on,
)
from helios.errors import StateError


@final
class SharedStorages:
    """The tensors and arrays of one tree.

    Args:
        encode_array: encodes an array that shares no memory; gets the code to fill and the array.
        encode_view: encodes an array that is a view of a storage; gets the code to fill, the
            array, a tensor of the whole storage, and the offset in bytes.
    """

    def __init__(
        self,
        encode_array: Callable[[dict[str, Any], Array], None],
        encode_view: Callable[[dict[str, Any], Array, Tensor, int], None],
    ) -> None:
        self._encode_array = encode_array
        self._encode_view = encode_view
        self._storages: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
        self._arrays: list[tuple[str, Array, dict[str, Any]]] = []

    @property
    def groups(self) -> list[list[Tensor]]:
        """The tensors of the tree, grouped by their storages."""
        return [[code for _, code in group] for group in self._storages.values()]

    def add_tensor(self, where: str, code: Tensor) -> None:
        """Add a detached tensor of the tree."""
        place = (str(code.device), code.untyped_storage().data_ptr())
        self._storages.setdefault(place, []).append((where, code))

    def add_array(self, where: str, array: Array, code: dict[str, Any]) -> None:
        """Add an array of the tree, and the code that :meth:`fit` fills."""
        self._arrays.append((where, array, code))

    def fit(self) -> None:
        """Encode all arrays, and reduce storages to the part that is used.

        Raises:
            StateError: if tensors of several dtypes share memory.
        """
        alone = set(range(len(self._arrays)))
        for arrays, places in self._mixed():
            self._join(arrays, places)
            alone -= set(arrays)
        for number in sorted(alone):
            _, array, code = self._arrays[number]
            self._encode_array(code, array)
        for group in self._storages.values():
            _cut(group)

    def _mixed(self) -> list[tuple[list[int], list[tuple[str, int]]]]:
        """Return groups of arrays that share memory, with the storages that they share it with."""
        if not any(array.base is not None for _, array, _ in self._arrays) and not (
            self._arrays and any(is_foreign(group[0][1]) for group in self._storages.values())
        ):
            return []
        places = [place for place in self._storages if place[0] == "cpu"]
        extents = [extent_of(array) for _, array, _ in self._arrays]
        extents += [extent_of(self._storages[place][0][1]) for place in places]
        mixed = []
        for group in overlapping(extents):
            arrays = [number for number in group if number < len(self._arrays)]
            others = [places[n - len(self._arrays)] for n in group if n >= len(self._arrays)]
            if arrays and len(group) > 1:
                mixed.append((arrays, others))
        return mixed

    def _join(self, numbers: list[int], places: list[tuple[str, int]]) -> None:
        tensors = [entry for place in places for entry in self._storages.pop(place)]
        arrays = [self._arrays[number] for number in numbers]
        parts = [array for _, array, _ in arrays] + [code for _, code in tensors]
        block, copies = copied_together(parts)
        dtype = tensors[0][1].dtype if tensors else torch.uint8
        storage = block.untyped_storage()
        whole = tensor_on(storage, dtype, (block.numel() // dtype.itemsize,), (1,), 0)
        for (_, _, view), copy in zip(arrays, copies, strict=False):
            self._encode_view(view, copy, whole, address_of(copy) - storage.data_ptr())
        for (_, code), copy in zip(tensors, copies[len(arrays) :], strict=True):
            code.data = copy.data
        self._storages["cpu", storage.data_ptr()] = [(arrays[0][0], whole), *tensors]


def _cut(group: list[tuple[str, Tensor]]) -> None:
    """Reduce a storage that a single tensor uses in part, as torch.save writes whole storages.

    A storage of several tensors is kept, so that they still share it.
    """
    (where, first), *others = group
    for other, tensor in others:
        if tensor.dtype != first.dtype:
            raise StateError(
                f"{other} ({tensor.dtype}) cannot be saved: it shares its memory with {where} "
                f"({first.dtype}), which has another dtype. Save only one of them, or a clone."
            )
    size = first.element_size()
    needed = first.numel() * size
    if not others and first.untyped_storage().nbytes() > needed:
        first.data = first.detach().clone()
    elif first.untyped_storage().nbytes() % size:
        # torch.load rejects a storage whose size is not a multiple of the element size.
        storage = first.untyped_storage()
        length = storage.nbytes() // size
        whole = tensor_on(storage, first.dtype, (length,), (1,), 0).clone().untyped_storage()
        for _, tensor in group:
            place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            tensor.data = tensor_on(whole, tensor.dtype, *place)
