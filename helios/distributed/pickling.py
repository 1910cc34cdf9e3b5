"""Pickles values and errors for other processes of the same job; tensors go on sharing memory.

Plain ``pickle`` copies the memory of every tensor, so two views of one tensor would become two
tensors. Use it only for data from processes of the same job, never for files.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import reprlib
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.errors import UsageError


class _Memory:
    """The bytes of a storage; ``pickle`` stores an object once, however often it occurs."""

    def __init__(self, content: np.ndarray[Any, Any], place: _Accelerator | None) -> None:
        self.content = content
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_storage, (self.content, self.place)


class _Accelerator:
    """Stands for the device of the process that pickles, and then of the one that loads."""


_ACCELERATOR = _Accelerator()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._memories: dict[tuple[str, int], _Memory] = {}
        self.last: Any = None
        self.from_main: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.from_main.add(value.__qualname__)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        storage = value.untyped_storage()
        place = (str(value.device), storage.data_ptr())
        if place not in self._memories:
            flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            where = None if value.is_cpu else _ACCELERATOR
            self._memories[place] = _Memory(flat.cpu().numpy(), where)
        shape = (value.storage_offset(), tuple(value.shape), value.stride())
        return _view, (self._memories[place], value.dtype, shape, value.requires_grad)

    def persistent_id(self, value: Any) -> str | None:
        return "accelerator" if value is _ACCELERATOR else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> torch.device:
        return self._device


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    is_odd = tensor.is_conj() or tensor.is_neg() or tensor.is_meta or not tensor.is_leaf
    return is_dense and not is_odd and tensor.untyped_storage().nbytes() > 0


def _load_storage(
    content: np.ndarray[Any, Any], device: torch.device | None
) -> torch.UntypedStorage:
    # A copy, because torch aligns its memory, and arithmetic may depend on that.
    return torch.from_numpy(content).to(device or "cpu", copy=True).untyped_storage()


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[Any, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *shape)
    return tensor.requires_grad_(requires_grad)


def dumps(value: Any) -> bytes:
    """Return a value as bytes for another process of this job; tensors are copied to the CPU.

    Raises:
        Exception: the error of ``pickle`` if the value cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads(data: bytes, device: torch.device | None = None) -> Any:
    """Return the value that another process of this job passed to :func:`dumps`.

    Args:
        data: the bytes.
        device: where to put tensors that were on an accelerator; ``None`` for the CPU.
    """
    return _Unpickler(io.BytesIO(data), device or torch.device("cpu")).load()


def pack_by_value(value: Any, what: str) -> bytes:
    """Return a value as bytes for another process that imports the same script.

    Args:
        value: the value; its tensors are copied.
        what: names the value in messages.

    Raises:
        UsageError: if a part of it cannot be pickled, or if another process could not import its
            class.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        part = pickler.last
        raise UsageError(
            f"{what} must be something that can be pickled, because each rank is a separate "
            f"process, but {reprlib.repr(part)}, of type {type(part).__qualname__}, cannot be "
            f"({error}). Define classes and functions at the top level of a module, and create the "
            "rest in setup(), which runs in every process; or start the script with torchrun, "
            "which copies nothing."
        ) from error
    _check_main(pickler.from_main)
    return file.getvalue()


def _check_main(names: set[str]) -> None:
    """Check that another process can import the script that is run."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file and Path(file).exists()):
        return
    if names or file:
        found = f", and {', '.join(sorted(names))} is defined here" if names else ""
        raise UsageError(
            "Several processes must be started from a script in a file, because each of them "
            "imports it, but this is a notebook, an interactive session, python -c or a script "
            f"from standard input{found}. Move your classes and functions to a file, and import "
            "them here; or train in one process (nproc=1)."
        )


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an error for ``pickle.loads``; ``None`` if that would not restore it."""
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        again = pickle.loads(data)
        if type(again) is type(error) and str(again) == str(error):
            return data
    return None
