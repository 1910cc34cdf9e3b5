"""The content of checkpoints for tools: tensors by path, plain values, and differences.

Works on trees as they are written, not decoded, of any origin: a group that is nested too deeply or
occurs again is not followed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.checkpoint.status import look_into
from helios.core.sharded_tensors import is_deferred, value_of
from helios.errors import ArgumentError
from helios.storage.codec import Unknown
from helios.storage.codes import TAG

_MAX_DEPTH = 50
_WITH_CONTENT = {"tensor": "value", "codes": "value", "object": "fields"}
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class TensorEntry:
    """A tensor of a tree.

    Attributes:
        path: the way to it, with dots.
        dtype: its type, such as ``"float32"``.
        shape: its shape.
        num_bytes: how many bytes it has in memory that no tensor before it has.
        note: whose memory it shares; its layout and device if they are unusual.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int = 0
    note: str = ""


def list_tensors(tree: Any) -> list[TensorEntry]:
    """Return what is known of the tensors of a tree, without reading them.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    storages: dict[int, str] = {}
    found = []
    for path, tensor in find_tensors(tree).items():
        entry = TensorEntry(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        size = tensor.numel() * tensor.element_size()
        if is_deferred(tensor):
            entry.num_bytes = size
        elif tensor.layout is not torch.strided or tensor.device.type == "meta":
            entry.note = f"{tensor.layout} on {tensor.device}".removeprefix("torch.")
        elif size:
            owner = storages.setdefault(tensor.untyped_storage().data_ptr(), path)
            entry.num_bytes = size if owner == path else 0
            entry.note = "" if owner == path else f"shares memory with {owner}"
        found.append(entry)
    return found


def find_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by path, in the order of the file.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # From the end of the list, so that the next one is the first of its group.
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        value = _content(value)
        if isinstance(value, torch.Tensor):
            found[".".join(keys)] = value
        elif len(keys) < _MAX_DEPTH and id(value) not in seen:
            inside = members(value) or []
            if inside:
                seen.add(id(value))
            waiting += [((*keys, key), item) for key, item in reversed(inside)]
    return found


def section(tree: Any, key: str) -> dict[str, Any]:
    """Return the values under one key of a tree: plain values unchanged, others as text.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
        key: a key of its root; nothing is returned if it is missing.
    """
    found = dict(members(tree) or ()).get(key)
    return {
        name: value if type(value) in _PLAIN else _WORDS.repr(value)
        for name, value in members(found) or ()
    }


class _Words(reprlib.Repr):
    """Formats values briefly, whatever their size: a file may contain endlessly nested lists."""

    def repr_instance(self, x: Any, level: int) -> str:
        """Return a placeholder as its class with its arguments, and other objects as their class.

        Args:
            x: the object.
            level: how many levels of it may be shown.
        """
        if isinstance(x, Unknown):
            return f"{x.name}{self.repr1(x.parts, level - 1) if level > 0 else '(...)'}"
        return repr(x) if isinstance(x, _PLAIN) else f"<{type(x).__qualname__}>"


_WORDS = _Words()
_WORDS.maxlevel, _WORDS.maxdict, _WORDS.maxstring = 3, 12, 200


def _content(value: Any) -> Any:
    """Return what a code stands for, if that is in it as it is."""
    tag = value.get(TAG) if isinstance(value, Mapping) else None
    return value.get(_WITH_CONTENT.get(tag), value) if isinstance(tag, str) else value


def members(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a group holds, by name; ``None`` for what is no group."""
    if isinstance(value, Unknown) and len(value.parts) == 1 and isinstance(value.parts[0], dict):
        # The state of an object is a dictionary, of which the members are what one looks for.
        value = value.parts[0]
    if isinstance(value, Mapping) and TAG in value:
        if isinstance(pairs := value.get("pairs"), list):
            parts = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
            return [(_name(key), item) for key, item in parts]
        value = value.get("items")
    if isinstance(value, Mapping):
        return [(_name(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        return [(str(number), item) for number, item in enumerate(value)]
    return None


def _name(key: Any) -> str:
    return key if isinstance(key, str) else _WORDS.repr(key)


# ---- two checkpoints, tensor by tensor

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
