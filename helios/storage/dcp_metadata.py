"""Reads the file ``.metadata`` of ``torch.distributed.checkpoint`` without running code in it.

PyTorch reads it with plain pickle, which calls whatever the file names. Here, a class that the file
may name is a stand-in, which only keeps what it is given; everything else is refused. PyTorch gets
new metadata that is made of checked numbers and names.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as md

from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError

METADATA_NAME = ".metadata"
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
# Operations of a pickle with a fixed number of bytes, but the last one and those of large indices.
_SIMPLE = re.compile(
    b"(?s:%b){,999}"
    % b"|".join(
        re.escape(each.code.encode("latin-1")) + b"." * size
        for each in pickletools.opcodes
        if (size := each.arg.n if each.arg else 0) >= 0 and each.name not in ("STOP", "LONG_BINPUT")
    )
)
_CLASSES: Mapping[str, Collection[str]] = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}


@dataclass(frozen=True)
class StoredChunk:
    """Where a part of a tensor is.

    Attributes:
        name: the name of the file.
        offset: where the part begins in it.
        length: its number of bytes there.
    """

    name: str
    offset: int
    length: int


def read_metadata(folder: Path) -> md.Metadata:
    """Return the metadata of a folder that holds tensors, each of them cut by rows.

    Raises:
        IncompatibleCheckpointError: if the file refers to anything but the classes of metadata; it
            is not called.
        DamagedCheckpointError: if the file does not describe whole tensors in files of the folder.
        OSError: if a file cannot be read.
    """
    path = folder / METADATA_NAME
    data = path.read_bytes()
    sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
    try:
        _refuse_large_memo(data)
        return _build(_Unpickler(path, data).load(), sizes)
    except (IncompatibleCheckpointError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: it does not describe the tensors of a checkpoint ({error}). "
            "Remove the checkpoint, or use another one."
        ) from error


def _refuse_large_memo(data: bytes) -> None:
    """Refuse an index of the unpickler's memo beyond what its bytes can need."""
    file, name = io.BytesIO(data), ""
    while name != "STOP":
        # Most operations are simple; one at a time, they would take longer than all else here.
        simple = _SIMPLE.match(data, file.tell())
        assert simple
        file.seek(simple.end())
        operation, argument, _ = next(pickletools.genops(file))
        name = operation.name
        if "PUT" in name:
            _require((argument or 0) <= len(data), "its memo has no end")


class _StandIn:
    """Stands for an object of a class of metadata, and keeps what it is made of."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Ignore the arguments of classes whose objects have no state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if name in _CLASSES.get(module, ()):
            # A new class each time, because a file can also change the attributes of a class.
            return type(name, (_StandIn,), {})
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise IncompatibleCheckpointError(
            f"{self._path} refers to {module}.{name}, which is not part of the metadata of a "
            "checkpoint. Nothing was called. Do not load it unless you know who wrote it."
        )


def _build(root: Any, sizes: Mapping[str, int]) -> md.Metadata:
    table = _fields(root, "Metadata")
    stored = {}
    for index, place in table["storage_data"].items():
        key, chunk = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        stored[key["fqn"], _numbers(key["offset"])] = _chunk_of(chunk, sizes)
    tensors: dict[str, md.TensorStorageMetadata | md.BytesStorageMetadata] = {
        name: _tensor_of(name, tensor, stored)
        for name, tensor in table["state_dict_metadata"].items()
    }
    places = {md.MetadataIndex(*key): chunk for key, chunk in stored.items()}
    return md.Metadata(tensors, storage_data=places)


def _chunk_of(table: Mapping[str, Any], sizes: Mapping[str, int]) -> StoredChunk:
    name, offset, length = table["relative_path"], *_numbers((table["offset"], table["length"]))
    # A name with a path would lead out of the folder.
    _require(_DATA_FILE.fullmatch(name), f"no file {name!r}")
    _require(offset + length <= sizes.get(name, 0), f"{name} is too short")
    return StoredChunk(name, offset, length)


def _tensor_of(
    name: str, tensor: Any, stored: Mapping[Any, StoredChunk]
) -> md.TensorStorageMetadata:
    table = _fields(tensor, "TensorStorageMetadata")
    dtype = table["properties"].state[0]
    _require(isinstance(dtype, torch.dtype), f"{name} has no type")
    size, chunks, row = _numbers(table["size"]), [], 0
    parts = [_fields(part, "ChunkStorageMetadata") for part in table["chunks"]]
    for begin, shape in sorted((_numbers(p["offsets"]), _numbers(p["sizes"])) for p in parts):
        if not math.prod(shape):
            continue
        is_next = begin == (row, *(0 for _ in size[1:])) and shape[1:] == size[1:]
        # What is stored is not compressed. Without this, a file could ask for endless memory.
        is_stored = (name, begin) in stored and (
            stored[name, begin].length >= math.prod(shape) * dtype.itemsize
        )
        _require(is_next and is_stored, f"{name} lacks rows from {row} on")
        chunks.append(md.ChunkStorageMetadata(torch.Size(begin), torch.Size(shape)))
        row += shape[0]
    _require(row == size[0] or not math.prod(size), f"{name} lacks rows from {row} on")
    return md.TensorStorageMetadata(md.TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _fields(value: Any, kind: str) -> Any:
    _require(isinstance(value, _StandIn) and type(value).__name__ == kind, f"no {kind}")
    return value.state


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> int:
    _require(type(value) is int and value >= 0, f"{value!r} is no number")
    return int(value)


def _require(is_so: Any, problem: str) -> None:
    if not is_so:
        raise ValueError(problem)
