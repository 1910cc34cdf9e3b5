"""Which members of data sets and collate functions count as state: small values and generators."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, final

import numpy as np
from torch import Tensor

from helios.core.generators import is_generator
from helios.core.utils import unsaved_of
from helios.state.digests import is_dense
from helios.state.values import ATOMS, each_in, elements_of
from helios.storage.plain_objects import attributes_of
from helios.text import size_text

_SMALL = 1 << 16
_GROWN = (
    f"an attribute of a data set that has changed and grown beyond {size_text(_SMALL)}: keep it in "
    "the data module, or declare it in the class of the data set: unsaved = (...,)"
)


def large_members(part: object) -> frozenset[str]:
    """Return the attributes of a data set that hold data, without reading all of them."""
    return frozenset(name for name, value in attributes_of(part).items() if is_large(value))


def is_large(value: Any) -> bool:
    """Return whether a value takes more than 64 KiB, without reading all of it, or is sparse."""
    left = _SMALL
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


@final
class OversizedMembers:
    """Records which members of a data set were saved, to name those that have grown too large."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, paths: Iterable[str]) -> None:
        """Record that training has changed the members that contain these paths."""
        self._known |= {str(path).partition(".")[0] for path in paths}

    def losses(self, large: Iterable[str]) -> dict[str, str]:
        """Return what checkpoints no longer hold, with the reason."""
        return dict.fromkeys(sorted(self._known.intersection(large)), _GROWN)
