"""How a run ends that stands still for too long: with all stacks in a file, and an exit code.

The next start is worth a try, so the code is 75. A run that stands still again, without any
checkpoint in between, would be started forever: a file beside the checkpoints remembers it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import final

from helios.checkpoint import file_names
from helios.core.signal_watch import TRY_AGAIN
from helios.data.workers import find_worker_stacks
from helios.ledger.lineage import host, now
from helios.startup.runs.process_end import in_time, say, write_to_stderr
from helios.storage import files

_MEMORY = "hang.json"
# The disk may be what the run waits for.
_FILE_SECONDS = 5.0
_WORKER_SECONDS = 1.0


@final
class HangEnd:
    """What is done before this process ends because the run stands still for too long.

    Args:
        seconds: how long it may stand still.
        rank: the rank of this process.
        place: the file for the stacks, without the number of the rank; ``None`` for stderr.
        folder: the folder of the run's checkpoints; ``None`` if none are written.

    Attributes:
        seconds: as given.
    """

    def __init__(
        self, seconds: float, *, rank: int, place: Path | None, folder: Path | None
    ) -> None:
        self.seconds = seconds
        self._rank = rank
        self._place = place
        self._folder = folder
        # The disk may not answer, as in the run that this start follows.
        before = None if folder is None else in_time(lambda: _read_before(folder), _FILE_SECONDS)
        self._before = before
        self._is_in_file = False

    def write_stacks(self, words: str) -> None:
        """Write the stacks of all threads and loader workers.

        Args:
            words: where the run stands.
        """
        path = None if self._place is None else _path_of(self._place, str(self._rank))
        text = in_time(lambda: self._describe_stacks(words), _FILE_SECONDS) or words
        if path is not None and in_time(lambda: _write(path, text), _FILE_SECONDS):
            self._is_in_file = True
        else:
            write_to_stderr(text)

    def _describe_stacks(self, words: str) -> str:
        head = f"{now()}, rank {self._rank}, process {os.getpid()} on {host()}\n{words}\n"
        main = threading.main_thread().ident
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()  # noqa: SLF001 - documented
        parts = [
            f"Thread {names.get(ident, ident)} (most recent call first):\n{_describe_stack(frame)}"
            for ident, frame in sorted(frames.items(), key=lambda pair: pair[0] != main)
        ]
        workers = in_time(lambda: find_worker_stacks(_WORKER_SECONDS), _FILE_SECONDS / 2) or {}
        for pid, text in workers.items():
            parts.append(f"Loader worker, process {pid}:\n{text or '  It did not answer.'}\n")
        return "\n".join([head, *parts])

    def finish(self, words: str, *, num_ranks: int, speaks: bool) -> int:
        """Remember that this start ends like this; returns the exit code.

        Args:
            words: where the run stands.
            num_ranks: how many processes end.
            speaks: whether this one says so.
        """
        obstacle = self._find_obstacle()
        code = 1 if obstacle else TRY_AGAIN
        advice = "Run the same command again to resume from the newest checkpoint."
        if speaks:
            who = "this process ends" if num_ranks == 1 else "all ranks end"
            say(
                f"{words}. Nothing has moved for {self.seconds:g} s (hang_timeout), so {who} now, "
                f"with exit code {code}. {self._describe_file(num_ranks)} {obstacle or advice}"
            )
        return code

    def _describe_file(self, num_ranks: int) -> str:
        if not self._is_in_file or self._place is None:
            return "The stacks are above."
        path = _path_of(self._place, str(self._rank) if num_ranks == 1 else "*")
        return f"The stacks of all threads and loader workers are in {path}."

    def _find_obstacle(self) -> str:
        """Remember this end, and return why another start would not help."""
        folder = self._folder
        if folder is None:
            return "No checkpoints are written, so there is nothing to resume."
        newest = in_time(lambda: _find_newest(folder), _FILE_SECONDS)
        text = json.dumps({"time": now(), "newest": newest})
        path = folder / _MEMORY
        temporary = files.temporary_path(path.with_name(f"{_MEMORY}.rank-{self._rank}"))

        def remember() -> bool:
            _write(temporary, text)
            files.replace(temporary, path)
            files.fsync_folder(folder)
            return True

        if newest is None or in_time(remember, _FILE_SECONDS) is None:
            return f"The folder {folder} does not answer, so this end cannot be remembered there."
        if newest == self._before:
            return (
                "The start before this one ended in the same way, and no checkpoint was committed "
                "since, so another start would not help: look for the cause in the stacks."
            )
        return ""


def forget_hang(folder: Path) -> None:
    """Forget how the start before this one ended, because this start will end in its own way."""
    path = folder / _MEMORY
    if path.exists():
        files.unlink(path)


def _read_before(folder: Path) -> str | None:
    """Return the newest checkpoint when the start before stood still; ``None`` if it did not."""
    try:
        newest: str | None = json.loads((folder / _MEMORY).read_text("utf-8"))["newest"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return newest


def _find_newest(folder: Path) -> str:
    found = file_names.list_checkpoints(folder)
    return found[-1].name if found else ""


def _path_of(place: Path, number: str) -> Path:
    return place.with_name(f"{place.name}-{number}.txt")


def _write(path: Path, text: str) -> bool:
    files.make_folder(path.parent)
    with files.create(path) as handle:
        files.write(handle, text.encode("utf-8", "backslashreplace"))
        files.fsync(handle)
    return True


def _describe_stack(frame: FrameType | None) -> str:
    """Return a stack without lines of code, for which files would have to be read."""
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
