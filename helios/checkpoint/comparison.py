"""Compares the tensors of two checkpoints by name, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.checkpoint.outline import find_tensors
from helios.checkpoint.status import look_into
from helios.core.sharded_tensors import value_of
from helios.errors import ArgumentError

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints do not have in common.

    Attributes:
        path: its path in the file.
        what: what differs: ``"values"``, ``"type or shape"``, or ``"only in"`` one of the files.
        num_elements: elements whose bits differ.
        size: all elements.
        max_ulp: the largest distance of two elements, in units of the last place (the number of
            floating-point numbers from one to the other); ``None`` for other types.
    """

    path: str
    what: str = "values"
    num_elements: int = 0
    size: int = 0
    max_ulp: int | None = None

    def __str__(self) -> str:
        if self.what != "values":
            return f"{self.path}: {self.what}"
        distance = "" if self.max_ulp is None else f", by at most {self.max_ulp} ulp"
        return f"{self.path}: {self.num_elements} of {self.size} elements{distance}"


@dataclass
class CheckpointDifference:
    """The result of :func:`compare_checkpoints`.

    Attributes:
        first, second: the two files.
        num_tensors: tensors that were compared.
        tensors: those that differ, in the order of the first file.
    """

    first: Path
    second: Path
    num_tensors: int = 0
    tensors: list[TensorDifference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether both files have the same tensors."""
        return not self.tensors


def compare_checkpoints(first: Path, second: Path) -> CheckpointDifference:
    """Compare all tensors of two checkpoints; nothing in the files is executed.

    Raises:
        ArgumentError: if one of them cannot be read.
    """
    tables = [find_tensors(_read(path)) for path in (first, second)]
    found = CheckpointDifference(first, second)
    for path in {**tables[0], **tables[1]}:
        one, other = (table.get(path) for table in tables)
        if one is None or other is None:
            found.tensors.append(
                TensorDifference(path, f"only in {first if other is None else second}")
            )
            continue
        found.num_tensors += 1
        difference = _compare_tensors(path, value_of(one), value_of(other))
        if difference is not None:
            found.tensors.append(difference)
    return found


def _read(path: Path) -> Any:
    status, tree = look_into(path)
    if tree is None:
        raise ArgumentError(f"{path} cannot be compared: {status.reason}")
    return tree


def _compare_tensors(path: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return TensorDifference(path, "type or shape")
    bits = [_bits_of(tensor) for tensor in (one, other)]
    differs = bits[0] != bits[1]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    count = int(differs.sum())
    if not count:
        return None
    max_ulp = None
    if one.is_floating_point():
        keys = [_ranks_of(part[differs]) for part in bits]
        max_ulp = int((np.maximum(*keys) - np.minimum(*keys)).max())
    return TensorDifference(path, num_elements=count, size=one.numel(), max_ulp=max_ulp)


def _bits_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bits of each element; a row of bytes for elements of other sizes."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_quantized:
        dense = dense.int_repr()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy()
    size = flat.element_size()
    return data.view(_UNSIGNED[size]) if size in _UNSIGNED else data.reshape(-1, size)


def _ranks_of(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the place of floating-point numbers among all of their type, from the smallest."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)
