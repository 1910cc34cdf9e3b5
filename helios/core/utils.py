"""Small independent helpers, for scripts and for Helios itself."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import inspect
import operator
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from helios.core.environment import get_env_info_str as get_env_info_str
from helios.errors import UsageError
from helios.text import size_text

if sys.version_info >= (3, 14):
    import annotationlib

_Value = TypeVar("_Value")
Clock: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds; an argument, so that tests need not sleep."""
_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that :meth:`state_dict` returned."""
        ...


def get_from_optional(opt_var: _Value | None, raise_on_empty: bool = False) -> _Value:
    """Return the value of an optional that is known to be set.

    Args:
        opt_var: the optional.
        raise_on_empty: raise a ``RuntimeError`` instead of an ``AssertionError``.

    Raises:
        AssertionError: if the value is ``None``.
        UsageError: if the value is ``None`` and ``raise_on_empty`` is set (a ``RuntimeError``).
    """
    if opt_var is not None:
        return opt_var
    message = "get_from_optional(...) needs a value, got None. Set the optional before this call."
    raise UsageError(message) if raise_on_empty else AssertionError(message)


def convert_to_list(var: _Value | list[_Value] | tuple[_Value, ...]) -> list[_Value]:
    """Return a list unchanged, a tuple as a list, and any other value in a list.

    Example:
        >>> convert_to_list(3), convert_to_list((1, 2))
        ([3], [1, 2])
    """
    if isinstance(var, list):
        return var
    return list(var) if isinstance(var, tuple) else [var]


class ChdirContext:
    """Change the working directory for a block; yields the previous one and restores it.

    Args:
        target_path: the directory to change to.
    """

    def __init__(self, target_path: Path) -> None:
        self._target = target_path

    def __enter__(self) -> Path:
        self._previous = Path.cwd()
        os.chdir(self._target)
        return self._previous

    def __exit__(self, *error: object) -> None:
        os.chdir(self._previous)


class AverageTimer:
    """Moving average of the seconds between two calls of :meth:`record`.

    Args:
        sliding_window: how many records the average covers.
        clock: returns the time in seconds.
    """

    def __init__(self, sliding_window: int = 200, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        # Times of records, and of the first start, without the pauses before later starts.
        self._times = deque((clock(),), sliding_window + 1)
        self._pauses = 0.0
        self._average = 0.0

    def start(self) -> None:
        """Start measuring now; the time since the last record is not counted."""
        self._pauses = self._clock() - self._times[-1]

    def record(self) -> float:
        """Record the time since the last record, or since :meth:`start`; returns the average."""
        times = self._times
        times.append(self._clock() - self._pauses)
        self._average = (times[-1] - times[0]) / (len(times) - 1)
        return self._average

    def get_average_time(self) -> float:
        """Return the average in seconds per record; 0.0 before the first one."""
        return self._average


def safe_torch_load(f: str | os.PathLike[str] | BinaryIO, **kwargs: Any) -> Any:
    """Load a file that ``torch.save`` wrote without executing code from it.

    Args:
        f: path or open file.
        **kwargs: further arguments of ``torch.load``; ``weights_only`` is always True.
    """
    # A file of the user, not in the format of Helios, so the codec cannot decode it.
    return torch.load(f, weights_only=True, **kwargs)  # noqa: TID251


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable the collector for a block, so that it does not scan a growing tree repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_extra(name: str, extra: str) -> Any:
    """Return a module of a library that an extra of the package installs.

    Raises:
        UsageError: if it is not installed.
    """
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise UsageError(
            f'{library} is not installed. Install it with: pip install "helios-trainer[{extra}]"'
        ) from None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return list(chain.from_iterable(map(operator.itemgetter("params"), optimizer.param_groups)))


def read_rates(optimizer: Optimizer) -> list[Any]:
    """Return the learning rates of the groups; tensors, which schedulers change, are copied.

    A group without a rate is skipped.
    """
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is not None:
            rates.append(rate.clone() if isinstance(rate, Tensor) else rate)
    return rates


def flush_outputs() -> None:
    """Flush stdout and stderr, except for streams without a reader or that were closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def as_names(declared: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names that a class declares; a string is one name, ``None`` is none."""
    return (declared,) if isinstance(declared, str) else tuple(declared or ())


def unsaved_of(part: object) -> tuple[str, ...]:
    """Return the names in the class attribute ``unsaved`` of a data set or sampler.

    Anything but strings is ignored: the class uses the name for something else.
    """
    declared: Any = getattr(type(part), "unsaved", ())
    names = as_names(declared) if isinstance(declared, str | tuple | list) else ()
    return names if all(isinstance(name, str) for name in names) else ()


def read_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable, whatever its annotations name.

    Since Python 3.14, ``inspect.signature`` evaluates annotations, which fails for a name that is
    imported for type checkers only.
    """
    if sys.version_info >= (3, 14):
        form = annotationlib.Format.FORWARDREF
        return inspect.signature(function, annotation_format=form)
    return inspect.signature(function)


def peak_memory_text() -> str:
    """Return the peak of the memory on the GPU, or else of this process; empty if it is unknown.

    It does not wait for a device.
    """
    # After an error of the device, nothing may be known of it.
    with suppress(RuntimeError):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return f"GPU peak {size_text(torch.cuda.max_memory_allocated())}"
    with suppress(OSError):
        line = _PEAK.search(_STATUS.read_bytes())
        if line is not None:
            return f"peak {size_text(int(line[1]) * 1024)}"
    return ""


def map_container(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with the results for its members.

    Dicts, lists, tuples, named tuples and dataclasses are copied; other values are returned.
    """
    if isinstance(value, dict):
        # dict.copy() of a subclass is a plain dict.
        table = {} if type(value) is dict else copy.copy(value)
        for name, item in value.items():
            table[name] = function(item)
        return table
    if isinstance(value, list):
        members = [] if type(value) is list else copy.copy(value)
        members[:] = map(function, value)
        return members
    if isinstance(value, tuple):
        build = getattr(type(value), "_make", type(value))
        return build(map(function, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied: Any = copy.copy(value)  # type: ignore[call-overload, unused-ignore]
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, function(getattr(value, field.name)))
        return copied
    return value


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; those of inference mode cannot be."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public one


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Return what identifies the memory of a tensor; its views have the same."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# PyTorch documents them under these names: https://docs.pytorch.org/docs/stable/torch.html
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": torch._foreach_add_,
    "copy": torch._foreach_copy_,
    "div": torch._foreach_div_,
    "mul": torch._foreach_mul_,
}


def foreach(
    operation: Literal["add", "copy", "div", "mul"],
    tensors: Sequence[Tensor],
    other: Sequence[Tensor] | Tensor | float,
) -> None:
    """Do to each tensor, in place, what its method of that name does with a trailing underscore.

    Args:
        operation: the name.
        tensors: the tensors; there may be none.
        other: the other operands, one for each tensor or for all.
    """
    if tensors:
        with torch.no_grad():
            _OPERATIONS[operation](tensors, other)
