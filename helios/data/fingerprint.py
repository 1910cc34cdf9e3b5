"""What a data set is, in plain words: its class through all wrappers, and its own fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

_DEEPEST = 16


@runtime_checkable
class _Wrapper(Protocol):
    """A data set around another one."""

    dataset: Any


@runtime_checkable
class _HasFingerprint(Protocol):
    """A data set that says by itself what it holds."""

    fingerprint: Any


def _inside(dataset: Any) -> list[Any]:
    """Return the data sets that a wrapper wraps."""
    if isinstance(dataset, ConcatDataset):
        return list(dataset.datasets)
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    # Only a data set can wrap one: others may have their name or their raw samples there.
    if isinstance(dataset, Dataset) and isinstance(dataset, _Wrapper):
        return [dataset.dataset] if isinstance(dataset.dataset, Dataset) else []
    return []


def count_samples(dataset: Any) -> int | None:
    """Return the length of a map-style data set; ``None`` where it has none."""
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:  # a wrapper has a length only if what it wraps has one
        return None


def describe_class(dataset: Any, *, depth: int = _DEEPEST) -> str:
    """Return the class of a data set, and of those inside it in parentheses.

    Modules are left out: that of a class differs between a script and the same file imported.

    Example:
        >>> describe_class(Subset([1, 2, 3], [0]))
        'Subset(list)'
    """
    # Equal ones are named once: a hundred parts of one kind are no hundred facts.
    parts = [describe_class(part, depth=depth - 1) for part in _inside(dataset)] if depth else []
    name = type(dataset).__qualname__
    return f"{name}({', '.join(dict.fromkeys(parts))})" if parts else name


def find_fingerprint(dataset: Any) -> str | None:
    """Return the fingerprint that a data set, or what it wraps, offers; ``None`` without one.

    It is the attribute ``fingerprint``, a string.
    """
    found = list(_fingerprints(dataset, _DEEPEST))
    return " ".join(found) or None


def _fingerprints(dataset: Any, depth: int) -> Iterator[str]:
    if isinstance(dataset, _HasFingerprint) and isinstance(dataset.fingerprint, str):
        yield dataset.fingerprint
        return
    for part in _inside(dataset) if depth else []:
        yield from _fingerprints(part, depth - 1)
