"""Children that do not get far: what the k-th process that is forked does first, by plan."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def hang() -> None:
    """Wait forever, as for a lock that nobody releases."""
    threading.Event().wait()


def stop() -> None:
    """Be stopped, and never continued."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    """Be killed, as when the memory is used up."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Plan:
    acts: Mapping[int, Callable[[], object]] = {}
    count = 0


@contextlib.contextmanager
def forks(acts: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Let the k-th process that this one forks, from 1 on, do something first."""
    _Plan.acts, _Plan.count = acts, 0
    try:
        yield
    finally:
        _Plan.acts = {}


def _count() -> None:
    _Plan.count += 1


def _obey() -> None:
    _Plan.acts.get(_Plan.count, bool)()


os.register_at_fork(before=_count, after_in_child=_obey)


def count_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def count_files_at_rest() -> int:
    """Count them when no thread of a queue closes one any more."""
    gc.collect()
    found = [-1]
    while found[-3:].count(found[-1]) < 3:
        time.sleep(0.05)
        found.append(count_files())
    return found[-1]
