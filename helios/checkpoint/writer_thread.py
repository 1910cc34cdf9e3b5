"""A thread that writes one thing at a time, and that the training waits for.

It writes copies in host memory, so that training can go on meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TypeVar, final

from helios.storage.staging import HostBuffers

_LOGGER = logging.getLogger(__name__)
_START_SECONDS = 1.0
Result = TypeVar("Result")


@final
class WriterThread:
    """Runs work in a thread; the work must not raise.

    Args:
        name: the name of the thread.
        content: what it writes, in messages.
        copies: whether the work may have copies; otherwise nothing is copied.
        pins: whether what it writes is on CUDA devices.

    Attributes:
        buffers: the memory of the copies; ``None`` where nothing is copied.
    """

    def __init__(
        self, name: str, *, content: str = "", copies: bool = False, pins: bool = False
    ) -> None:
        self.buffers = HostBuffers(pins=pins) if copies else None
        self._name = name
        self._content = content
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def copying(self, make: Callable[[HostBuffers | None], Result]) -> Result:
        """Return what a function makes, with copies if memory allows; else it gets ``None``."""
        if self.buffers is not None:
            try:
                return make(self.buffers)
            except MemoryError as error:
                self.buffers = None
                _LOGGER.warning(
                    "There is too little memory for a copy of %s (%s), so training waits from now "
                    "on until each checkpoint is on the disk, as with "
                    "CheckpointStore(is_async=False).",
                    self._content,
                    error,
                )
        return make(None)

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
        """Wait until no work is in progress, and release the memory.

        An interruption is raised afterwards. It does not shorten the wait: the thread must stop
        writing to the folder before another run may use it.
        """
        try:
            self._wait_without_interruption()
        finally:
            if self.buffers is not None:
                self.buffers.release()

    def _wait_without_interruption(self) -> None:
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
