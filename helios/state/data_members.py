"""Which members of data sets and collate functions count as state: small values and generators."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from torch import Tensor

from helios.core.generators import is_generator
from helios.core.utils import unsaved_of
from helios.state.digests import is_dense
from helios.state.values import ATOMS, SMALL, each_in, elements_of
from helios.storage.plain_objects import attributes_of


def large_members(part: object) -> frozenset[str]:
    """Return the attributes of a data set that hold data, without reading all of them."""
    return frozenset(name for name, value in attributes_of(part).items() if is_large(value))


def is_large(value: Any) -> bool:
    """Return whether a value takes more than 64 KiB, without reading all of it, or is sparse."""
    left = SMALL
    for part in each_in(value, elements_of):
        if isinstance(part, Tensor) and not is_dense(part):
            return True
        left -= part.nbytes if isinstance(part, Tensor | np.ndarray) else sys.getsizeof(part, 0)
        if left < 0:
            return True
    return False


def generators_in(part: object) -> list[str]:
    """Return the attributes of an object that hold a generator and are not declared unsaved."""
    return sorted(
        name
        for name, value in attributes_of(part).items()
        if type(value) not in ATOMS and is_generator(value) and name not in unsaved_of(part)
    )
