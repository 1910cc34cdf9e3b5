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


def interrupt_parent() -> None:
    """Let Ctrl-C reach the parent while it waits."""
    _send_to_waiting_parent(signal.SIGINT)


def _send_to_waiting_parent(number: int) -> None:
    # Python swallows what a handler raises while the parent is still in its fork.
    place = Path(f"/proc/{os.getppid()}/wchan")
    while "poll" not in place.read_text():
        os.sched_yield()
    os.kill(os.getppid(), number)
    hang()


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


class HangsWhenSent:
    """Hangs, dies or fails in the first processes that get it by pickle.

    Args:
        folder: where these leave their marks.
        act: what they do.
        times: their number.
    """

    def __init__(self, folder: Path, act: Callable[[], object], times: int = 1) -> None:
        self.folder, self.act, self.times = folder, act, times

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        for number in range(self.times):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"sent {number}").touch(exist_ok=False)
                self.act()
                return


def fail() -> None:
    """End with an error."""
    raise LookupError("it cannot be read")


def count_files() -> int:
    """Count the open files of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def count_files_at_rest() -> int:
    """Count them when no thread of a queue closes one any more."""
    gc.collect()
    found = [-1]
    while found[-3:].count(found[-1]) < 3:
        time.sleep(0.05)
        found.append(count_files())
    return found[-1]
