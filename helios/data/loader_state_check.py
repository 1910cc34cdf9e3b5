"""Checks on copies whether the ``state_dict`` of a loader restores its next batch.

Helios cannot know whether the ``state_dict`` of a custom loader or data set contains everything
that the next batch depends on, but it can try in memory.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch

from helios.core import rng
from helios.core.utils import Clock
from helios.data.source import Source
from helios.state.digests import Identities, mark_of
from helios.state.values import children_of, each_in

_LOGGER = logging.getLogger(__name__)
_NUM_BATCHES = 3
_SECONDS = 2.0
_MAX_BYTES = 64 << 20


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
    whole = source.num_batches()
    num_batches = _NUM_BATCHES if whole is None else min(_NUM_BATCHES, whole - 1)
    if num_batches < 1:
        raise _GivenUpError("there is no second batch")
    _check_size(source)
    undisturbed, resumed = copy.deepcopy(source), copy.deepcopy(source)
    batches = undisturbed.batches(0)
    for _ in range(num_batches):
        next(batches)
        if clock() > deadline:
            raise _GivenUpError("it takes too long")
    state = copy.deepcopy(undisturbed.state_dict())
    expected = next(batches)
    resumed.load_state_dict(state)
    found = next(resumed.batches(0, batch=num_batches), None)
    return compare_batches(expected, found)


@contextmanager
def _generators_restored() -> Iterator[None]:
    found, legacy = rng.get_rng_state_dict(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        rng.load_rng_state_dict(found)
        np.random.set_state(legacy)


def _check_size(root: object) -> None:
    """Raise an error if the copies would need too much memory."""
    size = 0
    for value in each_in(root, children_of):
        is_tensor = isinstance(value, torch.Tensor)
        size += value.untyped_storage().nbytes() if is_tensor else sys.getsizeof(value, 0)
        if size > _MAX_BYTES:
            raise _GivenUpError("it is too large to be copied")


def compare_batches(expected: Any, found: Any) -> Verdict:
    """Return whether two batches consist of the same bytes; unknown if that cannot be told."""
    identities = Identities()
    if mark_of(expected, identities) == mark_of(found, identities):
        return Verdict.KEPT
    # What is compared by identity may be equal nevertheless.
    return Verdict.UNKNOWN if identities.num_given else Verdict.BROKEN
