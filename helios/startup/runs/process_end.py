"""Ends this process whatever its main thread is doing, which may hang and hold any lock."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from helios.core.utils import flush_outputs

_LOGGER = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_PRINT_SECONDS = 2.0


def in_time(work: Callable[[], _Value], seconds: float) -> _Value | None:
    """Return what some work returns; ``None`` if it takes longer, or fails with an ``OSError``.

    Args:
        work: done in a thread, which is left alone if it waits forever.
        seconds: how long this waits.
    """
    found: list[_Value] = []

    def run() -> None:
        try:
            found.append(work())
        except OSError as error:
            _LOGGER.debug("It failed.", exc_info=error)

    thread = threading.Thread(target=run, name="helios-end", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def write_to_stderr(text: str) -> None:
    """Write text to the descriptor itself, without the locks of the log and of ``sys.stderr``."""
    in_time(lambda: os.write(2, f"{text}\n".encode("utf-8", "backslashreplace")), _PRINT_SECONDS)


def say(text: str, *, level: int = logging.ERROR) -> None:
    """Log text, or write it to stderr if that takes too long."""

    def log() -> bool:
        _LOGGER.log(level, "%s", text)
        flush_outputs()
        return True

    if in_time(log, _PRINT_SECONDS) is None:
        write_to_stderr(text)


def end_process(code: int) -> NoReturn:
    """End this process and its children.

    Args:
        code: the exit code.
    """
    try:
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(code)
