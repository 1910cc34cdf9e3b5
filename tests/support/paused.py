"""A child process that pauses in the middle of its work, until the test lets it continue."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helios.storage.folder_lock import FolderLock

_FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def another_process(work: Callable[[Callable[[], Any]], Any]) -> Iterator[int]:
    """Run ``work(pause)`` in a child until it pauses; yields its process id.

    The child continues at the end of the block.
    """
    told, tell = _FORK.Pipe(duplex=False)
    wait, go_on = _FORK.Pipe(duplex=False)

    def pause() -> None:
        tell.send(os.getpid())
        with contextlib.suppress(EOFError):
            wait.recv()

    def target() -> None:
        go_on.close()
        work(pause)

    child = _FORK.Process(target=target)
    child.start()
    tell.close()
    try:
        yield told.recv()
    finally:
        go_on.close()
        child.join()
        child.close()


def locked(folder: Path) -> contextlib.AbstractContextManager[int]:
    """Lock a folder in another process during the block; yields its process id."""

    def hold(pause: Callable[[], Any]) -> None:
        with FolderLock(folder):
            pause()

    return another_process(hold)
