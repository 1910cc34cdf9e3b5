"""A thread that writes one thing at a time, and that the training waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final

_START_SECONDS = 1.0


@final
class WriterThread:
    """Runs work in a thread; the work must not raise.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def start(self, work: Callable[[], None]) -> None:
        """Begin with the next work; the one before must have ended."""
        has_begun = threading.Event()

        def run() -> None:
            has_begun.set()
            try:
                work()
            finally:
                self._is_idle.set()

        self._is_idle.clear()
        self._thread = threading.Thread(target=run, name=self._name)
        try:
            self._thread.start()
        except BaseException:
            # An interruption leaves it unknown whether the thread was started.
            if not has_begun.wait(_START_SECONDS):
                self._thread = None
                self._is_idle.set()
            raise

    def wait(self) -> None:
        """Wait until no work is in progress."""
        if os.getpid() != self._pid:
            # A forked process has no such thread, and would wait forever.
            self._thread = None
            return
        # Before Python 3.13, an interrupted join takes the thread for ended.
        self._is_idle.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until no work is in progress; an interruption is raised afterwards.

        It does not shorten the wait: the thread must stop writing to the folder before another run
        may use it.
        """
        interruption: KeyboardInterrupt | None = None
        has_waited = False
        while not has_waited:
            try:
                self.wait()
                has_waited = True
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption
