"""Pickles values and errors for other processes of the same job; tensors go on sharing memory.

Plain ``pickle`` copies the memory of every tensor, so two views of one tensor would become two
tensors. Use it only for data from processes of the same job, never for files.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


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

    def reducer_override(self, value: Any) -> Any:
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


def find_culprit(value: Any, place: str, is_fine: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the nearest part that cannot be pickled although all of its own parts can.

    The search is breadth-first, because objects may have reference cycles.

    Args:
        value: what cannot be pickled.
        place: its name, with which the path to the part begins.
        is_fine: whether a part can be pickled.

    Returns:
        The path to the part, such as ``data.images["handle"]``, and the part.
    """
    first = (place, value)
    waiting = deque([first])
    # By id; the values are kept alive, so that no id is reused.
    seen = {id(value): value}
    while waiting:
        place, value = waiting.popleft()
        broken = [(place + name, part) for name, part in _parts(value) if not is_fine(part)]
        if not broken:
            return place, value
        for found, part in broken:
            if id(part) not in seen:
                seen[id(part)] = part
                waiting.append((found, part))
    return first


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    # A class that defines its own pickling need not pickle its attributes.
    method: Any = type(value).__reduce__
    if method is object.__reduce__ and not isinstance(value, type | FunctionType | ModuleType):
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in attributes.items())


def describe_value(value: Any) -> str:
    """Return a value and its type for a message."""
    kind = type(value)
    text = repr(value)
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{short}, of type {kind.__module__}.{kind.__qualname__}"


class _Parts:
    """The parts of an error whose own pickling does not restore it.

    ``pickle`` calls the class with ``args``, which often differ from the constructor's parameters.

    Args:
        error: the error.
    """

    def __init__(self, error: BaseException) -> None:
        kind = type(error)
        args = error.args if _can_travel(error.args) else (str(error),)
        attributes = {name: part for name, part in vars(error).items() if _can_travel(part)}
        self._parts = (kind, args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._parts


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def _can_travel(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an error for ``pickle.loads``, part by part if its own pickling does not restore it.

    Returns:
        The bytes; None if the class cannot be pickled. Attributes that cannot be pickled are left
        out.
    """
    for make in (lambda: error, lambda: _Parts(error)):
        try:
            data = pickle.dumps(make())
            again = pickle.loads(data)
            if type(again) is type(error) and str(again) == str(error):
                return data
        except Exception:
            continue
    return None
