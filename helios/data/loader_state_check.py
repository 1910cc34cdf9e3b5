"""Checks on copies whether the ``state_dict`` of a loader restores its next batch.

Helios cannot know whether the ``state_dict`` of a custom loader or data set contains everything
that the next batch depends on, but it can try in memory.
"""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from helios.core import rng
from helios.data.interfaces import Source
from helios.protocols import Clock

_LOGGER = logging.getLogger(__name__)
_NUM_BATCHES = 3
_SECONDS = 2.0
_MAX_BYTES = 64 << 20
_CHECKED_EVERY = 1024
_SCALARS = (int, float, complex, str, bytes, type(None), np.generic)


class Verdict(Enum):
    """The result of a check."""

    UNKNOWN = "unknown"
    KEPT = "kept"
    BROKEN = "broken"


class _GivenUpError(Exception):
    """The check takes too much time or memory."""


def try_state(source: Source, *, clock: Clock = time.monotonic) -> Verdict:
    """Save a source's state after a few batches, load it into a copy, and compare the next batch.

    The run is not changed: only copies are used, and all generators are restored. If the check
    fails, takes more than two seconds (checked between batches) or would copy more than 64 MiB,
    the result is ``Verdict.UNKNOWN``.

    Args:
        source: the source, before its first pass.
        clock: returns the time in seconds.
    """
    try:
        with _generators_restored():
            return _try(source, clock, clock() + _SECONDS)
    except Exception as error:
        # An error of the user's code on a copy does not stop the run.
        _LOGGER.debug("The state of the training loader could not be checked: %r", error)
        return Verdict.UNKNOWN


def _try(source: Source, clock: Clock, deadline: float) -> Verdict:
    def check_time() -> None:
        if clock() > deadline:
            raise _GivenUpError("it takes too long")

    whole = source.num_batches()
    num_batches = _NUM_BATCHES if whole is None else min(_NUM_BATCHES, whole - 1)
    if num_batches < 1:
        raise _GivenUpError("there is no second batch")
    _check_size(source, check_time)
    undisturbed = copy.deepcopy(source)
    check_time()
    resumed = copy.deepcopy(source)
    batches = undisturbed.batches(0)
    for _ in range(num_batches):
        check_time()
        next(batches)
    state = copy.deepcopy(undisturbed.state_dict())
    check_time()
    expected = next(batches)
    check_time()
    resumed.load_state_dict(state)
    check_time()
    found = next(resumed.batches(0, batch=num_batches), None)
    return Verdict.KEPT if have_same_bytes(expected, found) else Verdict.BROKEN


@contextmanager
def _generators_restored() -> Iterator[None]:
    found, legacy = rng.get_rng_state_dict(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        rng.load_rng_state_dict(found)
        np.random.set_state(legacy)


def _check_size(root: object, check_time: Callable[[], None]) -> None:
    """Raise an error if the copies would need too much memory."""
    waiting, seen, size = [root], set[int](), 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if len(seen) % _CHECKED_EVERY == 0:
            check_time()
        seen.add(id(value))
        size += _size_of(value)
        if size > _MAX_BYTES:
            raise _GivenUpError("it is too large to be copied")
        waiting += _members_of(value)


def _size_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes | bytearray) else 0


def _members_of(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, type | FunctionType | ModuleType):
        return ()
    return getattr(value, "__dict__", {}).values()


def have_same_bytes(left: Any, right: Any) -> bool:
    """Whether two batches contain the same bytes.

    Raises:
        TypeError: if they contain something that cannot be compared.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and torch.equal(_elements_as_bytes(left), _elements_as_bytes(right))
    if isinstance(left, np.ndarray):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and have_same_bytes(left.tolist(), right.tolist())
    if isinstance(left, Mapping):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(have_same_bytes(one, other) for one, other in pairs)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(have_same_bytes(one, other) for one, other in pairs)
    if isinstance(left, _SCALARS):
        return pickle.dumps(left) == pickle.dumps(right)
    return have_same_bytes(vars(left), vars(right))


def _elements_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
