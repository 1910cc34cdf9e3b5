"""Describes a data set: its class, the classes that it wraps, and its fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from helios.data.mixture import Mixture

_DEEPEST = 16


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


def count_samples(dataset: Any) -> int | None:
    """Return the length of a map-style data set; ``None`` if it has none."""
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
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
