"""Detects training that draws from NumPy's global generator, which Helios does not seed or save.

Reading its state takes 35 microseconds, so it is not compared at every batch. The training process
compares it once per pass, a worker after fetches 1, 2, 4 … 64, and then after every 64th one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, final
from weakref import WeakSet

import numpy as np
import torch

from helios.core import rng

_LOGGER = logging.getLogger(__name__)
_RARELY = 64


@contextmanager
def legacy_numpy_kept() -> Iterator[None]:
    """Restore the state of NumPy's global generator after a block."""
    found = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(found)


@final
class LegacyWatch:
    """Compares the state at the start and end of a pass, and warns once if it differs.

    Args:
        purpose: name of the random streams of fetching, for the warning.
        flag: one byte in shared memory that workers set; ``None`` without workers.
    """

    # A validation takes place within a pass of the training, which has not drawn its numbers.
    _open: ClassVar[WeakSet[LegacyWatch]] = WeakSet()

    def __init__(self, purpose: str, flag: torch.Tensor | None) -> None:
        self._purpose = purpose
        self._flag = flag
        self._digest = b""
        self._has_changed = False
        self._has_warned = False

    def begin(self) -> None:
        """Record the state."""
        digest = rng.legacy_numpy_digest()
        for each in self._open:
            each.look(digest)
        self._digest = digest
        self._open.add(self)

    def look(self, digest: bytes, *, is_own: bool = True) -> None:
        """Note the state, and whether this pass has changed it since the last look.

        Args:
            digest: hash of the state.
            is_own: whether a change is one of this pass, not of one within it.
        """
        self._has_changed |= is_own and digest != self._digest
        self._digest = digest

    def end(self) -> None:
        """Warn if the state has changed, in this process or in a worker."""
        digest = rng.legacy_numpy_digest()
        if self in self._open:
            self._open.discard(self)
            self.look(digest)
        for each in self._open:
            each.look(digest, is_own=False)
        in_worker = self._flag is not None and bool(self._flag.item())
        if (in_worker or self._has_changed) and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "NumPy's global generator (numpy.random) was used %s (purpose %r). Helios neither "
                "seeds nor saves it, so its numbers are not reproducible, and a resumed run will "
                "differ, unless you seed it in the same place. Draw from "
                "helios.core.rng.get_default_numpy_rng().generator instead.",
                "in a loader worker" if in_worker else "in the training process",
                self._purpose,
            )


@final
class WorkerWatch:
    """Compares the state in a worker, and notifies the training process through shared memory.

    Args:
        flag: one byte in shared memory, set when the state has changed.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag
        self._num_fetches = 0
        self._digest = rng.legacy_numpy_digest()

    def count(self) -> None:
        """Count a fetch, and compare the state after fetches 1, 2, 4 … 64, 128, 192 and so on."""
        self._num_fetches += 1
        count = self._num_fetches
        is_due = count & (count - 1) == 0 if count < _RARELY else count % _RARELY == 0
        if is_due and rng.legacy_numpy_digest() != self._digest:
            self._flag.fill_(1)
