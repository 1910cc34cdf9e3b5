"""Files with the rows of sharded tensors that one process holds, in the layout of safetensors.

Such a file is a number of eight bytes, a header in JSON of this length, and the bytes of the
tensors, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from helios.errors import StateError
from helios.storage import files
from helios.storage.digest import BlockHasher

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ALIGNMENT = 8
_SMALL_BYTES = 1 << 18
_METADATA = {"format": "pt", "written_by": "helios"}


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """A file that was written.

    Attributes:
        size: its size in bytes.
        begins: where the bytes of each tensor begin, by name.
        digests: of its blocks; none without hashes.
    """

    size: int
    begins: dict[str, int]
    digests: list[str]


def dtype_code(dtype: torch.dtype, *, name: str) -> str:
    """Return the name of a type in files.

    Raises:
        StateError: if the layout has none for it.
    """
    if dtype not in _CODES:
        raise StateError(
            f"{name} cannot be saved sharded: its type {dtype} is not one of "
            f"{', '.join(_CODES.values())}. Convert it, or name the attribute in `unsaved`."
        )
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Return the type that :func:`dtype_code` has named; raises KeyError for another name."""
    return _DTYPES[code]


def write_shard_file(path: Path, tensors: Mapping[str, Tensor], *, hashes: bool) -> ShardFile:
    """Write tensors on the CPU into a file, and return when its bytes are on the disk.

    Args:
        path: the file; an old one is emptied first.
        tensors: contiguous tensors by name.
        hashes: whether to compute the digests of its blocks.

    Raises:
        OSError: if the disk fails.
    """
    header, begins = _make_header(tensors)
    with files.create(path) as handle:
        writer = _Writer(handle, BlockHasher() if hashes else None)
        writer.write(memoryview(header))
        for tensor in tensors.values():
            writer.write(tensor_bytes(tensor))
        writer.flush()
        files.fsync(handle)
    return ShardFile(writer.size, begins, writer.digests())


def _make_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    table: dict[str, Any] = {"__metadata__": _METADATA}
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        code = dtype_code(tensor.dtype, name=name)
        table[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        offsets[name] = begin
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in offsets.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class _Writer:
    """Writes and hashes; small pieces are written together."""

    def __init__(self, handle: BinaryIO, hasher: BlockHasher | None) -> None:
        self._handle = handle
        self._hasher = hasher
        self._small = bytearray()
        self.size = 0

    def write(self, data: memoryview) -> None:
        self.size += len(data)
        if self._hasher is not None:
            self._hasher.update(data)
        if len(data) < _SMALL_BYTES:
            self._small += data
            if len(self._small) >= _SMALL_BYTES:
                self.flush()
            return
        self.flush()
        files.write(self._handle, data)

    def flush(self) -> None:
        small, self._small = self._small, bytearray()
        files.write(self._handle, memoryview(small))

    def digests(self) -> list[str]:
        return [] if self._hasher is None else self._hasher.finish()
