"""Runs work that may wait forever, and waits for it only so long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

_LOGGER = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def in_time(work: Callable[[], _Value], seconds: float) -> _Value | None:
    """Return what some work returns; ``None`` if it takes longer, or if disk or network fail.

    Args:
        work: done in a thread, which is left alone if it waits forever.
        seconds: how long this waits.
    """
    found: list[_Value] = []

    def run() -> None:
        try:
            found.append(work())
        except (OSError, RuntimeError) as error:
            _LOGGER.debug("It failed.", exc_info=error)

    thread = threading.Thread(target=run, name="helios-in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
