"""Describes a data set: its class, the classes that it wraps, its fingerprint, its values.

Processes compare the values that it has in memory. Large values are compared by samples, since
values that were drawn or read differently differ almost everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import is_dataclass
from operator import itemgetter
from pathlib import PurePath
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from helios.core.utils import unsaved_of
from helios.data.mixture import Mixture
from helios.state.values import ATOMS, is_dense
from helios.storage.content_hash import fingerprint
from helios.storage.plain_objects import attributes_of

_DEEPEST = 16
_MOST_MEMBERS = 4_096
"""Maximum number of members of a container that are compared."""
_MOST_BYTES, _MOST_MAPPED_BYTES = 1 << 30, 1 << 20
"""Maximum bytes that are read of an attribute, and of an array that is mapped from a file."""
_BLOCKS = 64
_NUMBERS = (bool, int, float, complex, bytes, type(None))
_SHOWN = 60


@runtime_checkable
class _Wrapper(Protocol):
    """A data set that wraps another one."""

    dataset: Any


@runtime_checkable
class _HasFingerprint(Protocol):
    """A data set that identifies its contents."""

    fingerprint: Any


def _inside(dataset: Any) -> list[Any]:
    """Return the data sets that a wrapper wraps."""
    if isinstance(dataset, ConcatDataset | Mixture):
        return list(dataset.datasets)
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    # In other objects, ``dataset`` may be a name or the raw samples.
    if isinstance(dataset, Dataset) and isinstance(dataset, _Wrapper):
        return [dataset.dataset] if isinstance(dataset.dataset, Dataset) else []
    return []


def length_of(part: Any) -> int | None:
    """Return the length of a data set, a sampler or a loader; ``None`` if it has none."""
    if isinstance(part, IterableDataset):
        return None
    try:
        return len(part) if isinstance(part, Sized) else None
    except TypeError:  # a wrapper has a length only if what it wraps has one
        return None


def describe_class(dataset: Any, *, depth: int = _DEEPEST) -> str:
    """Return the class of a data set, with the classes that it wraps in parentheses.

    The module of a class is left out, because it differs between a script and its import.

    Example:
        >>> describe_class(Subset([1, 2, 3], [0]))
        'Subset(list)'
    """
    # Equal descriptions occur once, as there may be hundreds of parts of one class.
    parts = [describe_class(part, depth=depth - 1) for part in _inside(dataset)] if depth else []
    name = type(dataset).__qualname__
    return f"{name}({', '.join(dict.fromkeys(parts))})" if parts else name


def find_fingerprint(dataset: Any) -> str | None:
    """Return the ``fingerprint``, a string, of a data set or of those that it wraps, or None."""
    found = list(_fingerprints(dataset, _DEEPEST))
    return " ".join(found) or None


def _fingerprints(dataset: Any, depth: int) -> Iterator[str]:
    if isinstance(dataset, _HasFingerprint) and isinstance(dataset.fingerprint, str):
        yield dataset.fingerprint
        return
    for part in _inside(dataset) if depth else []:
        yield from _fingerprints(part, depth - 1)


def describe_values(part: Any) -> dict[str, str]:
    """Return the tensors, arrays, containers, numbers and strings of a data set as texts.

    Nothing is fetched or changed. Attributes of its class and variables of a script that its
    methods name count; attributes in ``unsaved`` do not, nor does anything else that may differ
    from process to process: single values, folders in paths, objects.

    Args:
        part: the data set, without those that it wraps.

    Returns:
        A text for each attribute, which is equal for equal content; the name is empty for the
        content of a list.
    """
    held: dict[str, Any] = {}
    for base in reversed(type(part).__mro__):
        if base.__module__.partition(".")[0] not in ("builtins", "typing", "torch", "helios"):
            for method in (each for each in vars(base).values() if type(each) is FunctionType):
                known = method.__globals__
                held |= {name: known[name] for name in method.__code__.co_names if name in known}
            held |= {name: value for name, value in vars(base).items() if name[:2] != "__"}
    held |= attributes_of(part) | {"": part}
    return {
        name: describe_content(value)
        for name, value in held.items()
        if name not in unsaved_of(part) and isinstance(value, _COMPARED)
    }


@runtime_checkable
class _Frame(Protocol):
    """A table or column of pandas."""

    iloc: Any

    def __len__(self) -> int: ...


_COMPARED = (Tensor, np.ndarray, list, tuple, dict, _Frame)


def describe_content(value: Any) -> str:
    """Return a text that is equal for equal content; see :func:`describe_values`."""
    excerpt = _excerpt(value, _MOST_BYTES)
    size = tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else f"of {len(value)}"
    first = excerpt if isinstance(excerpt, Mapping) else excerpt[:5]
    shown = " ".join(str(first).split())
    shown = f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown
    return f"{type(value).__name__} {size} {shown} (digest {fingerprint(excerpt):016x})"


def _excerpt(value: Any, num_bytes: int, depth: int = 0, *, is_sample: bool = False) -> Any:
    """Return what is compared of a value, which has about a number of bytes at most.

    Args:
        value: the value.
        num_bytes: the bytes.
        depth: how many containers are around it.
        is_sample: whether a list is among them; else single values under a name are options, such
            as ranks and devices, and do not count, as those of attributes do not.
    """
    if isinstance(value, str | PurePath):
        # Machines may have the same files in different folders.
        return str(value).replace("\\", "/").rpartition("/")[2]
    if type(value) in ATOMS or depth > _DEEPEST:
        return value if type(value) in _NUMBERS else repr(value) if type(value) in ATOMS else None
    if isinstance(value, Tensor):
        return _rows(value, num_bytes) if is_dense(value) else [str(value.dtype)]
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OSU":
        return _rows(value, num_bytes)
    # Members of members are many.
    most = max(_MOST_MEMBERS >> 5 * depth, 8)
    if isinstance(value, _Frame):
        value = value.iloc[_spread(len(value), most)].to_numpy().tolist()
    elif is_dataclass(value) and not isinstance(value, type):
        value = attributes_of(value)
    elif isinstance(value, set | frozenset):
        value = dict.fromkeys(value)
    if isinstance(value, Mapping):
        # Which entries come first may depend on a set.
        found = dict(value) if len(value) <= most else {}
        share = num_bytes // max(len(found), 1)
        entries = [
            (
                repr(_excerpt(name, share, depth + 1)),
                None
                if _is_option(name, each) and not is_sample
                else _excerpt(each, share, depth + 1, is_sample=is_sample),
            )
            for name, each in found.items()
        ]
        return dict(sorted(entries, key=itemgetter(0)))
    if isinstance(value, list | tuple | np.ndarray):
        places = _spread(len(value), most)
        share = num_bytes // max(len(places), 1)
        return [_excerpt(value[place], share, depth + 1, is_sample=True) for place in places]
    # The text of an object may have its address.
    return value if isinstance(value, np.generic) else type(value).__qualname__


def _is_option(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (type(value) in ATOMS or isinstance(value, str | PurePath))


def _rows(part: Any, num_bytes: int) -> Any:
    """Return a tensor or array, or rows in equal distances if it is large."""
    most = min(num_bytes, _MOST_MAPPED_BYTES) if isinstance(part, np.memmap) else num_bytes
    if part.nbytes <= most or not part.ndim:
        return part if part.ndim else part.reshape(1)
    count = max(1, len(part) * most // part.nbytes // _BLOCKS)
    starts = _spread(len(part) - count + 1, _BLOCKS)
    return [part[start : start + count] for start in starts]


def _spread(length: int, count: int) -> list[int]:
    """Return places in equal distances, the first and the last among them."""
    if length <= count:
        return list(range(length))
    return [place * (length - 1) // (count - 1) for place in range(count)]
