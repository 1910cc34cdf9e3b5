"""Commands of which nothing is left, whatever happens to the test or script that has started them.

Not all of their processes are in one session: torchrun gives each rank one of its own. So they are
found by a variable that they inherit, as far as the system shows it, which only Linux does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_MARK = "HELIOS_STARTED_BY"
_NUMBERS = itertools.count()


@contextlib.contextmanager
def started(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Start a command; when the block is left, its processes are killed."""
    mark = f"{_mine()}{next(_NUMBERS)}/"
    variables = {**(os.environ if env is None else env), _MARK: mark}
    with subprocess.Popen(command, env=variables, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _end(mark)


def end_all() -> None:
    """Kill the processes of all commands that are under way, for example in other threads."""
    _end(_mine())


def interrupt_at_signals() -> None:
    """Let SIGTERM, and a terminal that is closed, end this script as Ctrl-C does.

    Otherwise it would end at once, and leave what it has started.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not below nohup
            signal.signal(number, signal.default_int_handler)


def _mine() -> str:
    """Return the mark of this process, which continues that of who has started it."""
    return f"{os.environ.get(_MARK, '')}{os.getpid()}."


def _end(mark: str) -> None:
    # Again and again: one that is missed may have forked meanwhile.
    while found := _find(f"{_MARK}={mark}".encode()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _find(mark: bytes) -> list[int]:
    """Return the processes in whose variables there is a mark; those that have ended have none."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(each.startswith(mark) for each in _variables(process).split(b"\0")):
                found.append(int(process.name))
    return found


def _variables(process: Path) -> bytes:
    """Return what is in the file ``environ`` of a process, which is empty while it calls exec."""
    for _ in range(100):
        if variables := (process / "environ").read_bytes():
            return variables
        (process / "exe").readlink()  # an OSError if it has ended
        time.sleep(0.01)
    return b""
