"""NumPy's legacy generator, which Helios neither seeds nor saves: notice when training moves it.

Reading its state takes 35 microseconds, so it is not compared at every batch: the training process
compares once a pass, a worker after its fetches number 1, 2, 4 … and then at every 64th.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

from helios.core import rng

_LOGGER = logging.getLogger(__name__)
_RARELY = 64


@contextmanager
def legacy_numpy_kept() -> Iterator[None]:
    """Run a block of a user's code on the side: what it draws there moves nothing."""
    found = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(found)


@final
class LegacyWatch:
    """Compares the state at both ends of a pass, and warns once.

    Args:
        purpose: name of the fetching streams, for the warning.
        flag: one byte in shared memory that workers set; ``None`` without workers.
    """

    def __init__(self, purpose: str, flag: torch.Tensor | None) -> None:
        self._purpose = purpose
        self._flag = flag
        self._digest = b""
        self._has_warned = False

    def begin(self) -> None:
        """Remember the state."""
        if not self._has_warned:
            self._digest = rng.legacy_numpy_digest()

    def end(self) -> None:
        """Warn if the state is another one, here or in a worker."""
        if self._has_warned:
            return
        in_worker = self._flag is not None and bool(self._flag.item())
        if in_worker or rng.legacy_numpy_digest() != self._digest:
            self._has_warned = True
            _LOGGER.warning(
                "numpy.random's global generator was moved %s (purpose %r). Helios neither seeds "
                "nor saves it, so what was drawn from it is not reproducible, and a resumed run "
                "will differ, unless you seeded it at the same place. Draw from "
                "helios.core.rng.get_default_numpy_rng().generator instead.",
                "in a loader worker" if in_worker else "in the training process",
                self._purpose,
            )


@final
class WorkerWatch:
    """Compares the state in a worker, and tells the training process through shared memory.

    Args:
        flag: one byte in shared memory, set when the state was moved.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag
        self._num_fetches = 0
        self._digest = rng.legacy_numpy_digest()

    def count(self) -> None:
        """Count a fetch; compare where its number says so."""
        self._num_fetches += 1
        count = self._num_fetches
        is_due = count & (count - 1) == 0 if count < _RARELY else count % _RARELY == 0
        if is_due and rng.legacy_numpy_digest() != self._digest:
            self._flag.fill_(1)
