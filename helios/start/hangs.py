"""Says which rank is behind when a run makes no progress, and ends the run after ``hang_timeout``.

A thread of each rank reads where its run is, which the loops note as they pass, and tells the other
ranks. After ``hang_timeout`` every rank writes the stacks of its threads to a file and ends,
whatever its main thread is doing, which may hold any lock. The next start resumes.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

from helios.core.signal_watch import TRY_AGAIN
from helios.core.utils import flush_outputs
from helios.distributed.process_groups import DistributedInfo, in_time, open_store
from helios.ledger.run_file import host, now

_LOGGER = logging.getLogger(__name__)
_STDERR = 2
_PRINT_SECONDS = 2.0
# The disk may be what the run waits for.
_FILE_SECONDS = 5.0
WARNING_SECONDS = 60.0
"""Without progress for so long, a line says where the run stands."""
_TOPIC = "helios/waiting"
_STORE_SECONDS = 5.0
# So often a rank looks in the time after which it warns or ends.
_LOOKS = 6
_END_SECONDS, _POLL_SECONDS = 5.0, 0.05


def say(text: str, *, level: int = logging.ERROR) -> None:
    """Log text, or write it to stderr itself if that takes too long: a thread may hold its lock."""

    def log() -> bool:
        _LOGGER.log(level, "%s", text)
        flush_outputs()
        return True

    if in_time(log, _PRINT_SECONDS) is None:
        line = f"{text}\n".encode("utf-8", "backslashreplace")
        in_time(lambda: os.write(_STDERR, line), _PRINT_SECONDS)


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


class Whereabouts(NamedTuple):
    """The place of a rank in the run.

    Attributes:
        step: the step, in words.
        text: what it does there, such as ``"in train_step"``.
        order: grows whenever the rank gets on, so that it is greater in one that is further.
    """

    step: str
    text: str
    order: list[int]


@final
class HangWatch:
    """Warns in a thread if this process makes no progress, and ends it.

    Args:
        info: the rank of this process, and how many there are.
        find_place: returns where this process is.
        timeout: seconds without progress until the process ends; ``None`` for never.
        folder: where the file with the stacks is written; ``None`` for stderr.
    """

    def __init__(
        self,
        info: DistributedInfo,
        find_place: Callable[[], Whereabouts],
        *,
        timeout: float | None,
        folder: Path | None,
    ) -> None:
        self._info = info
        self._find_place = find_place
        self._timeout = math.inf if timeout is None else timeout
        self._folder = folder
        self._first = min(WARNING_SECONDS, self._timeout)
        self._pause = self._first / _LOOKS
        self._heartbeats = Heartbeats(info, fresh=3 * self._pause)
        self._is_over = threading.Event()
        self._place = Whereabouts("", "", [])
        self._since = ""
        self._stood = self._warned = 0.0
        self._ends = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block."""
        thread = threading.Thread(target=self._watch, name="helios-hang-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join(1.0)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(self._pause):
            # A process that was stopped itself has not stood still in that time.
            elapsed, before = time.monotonic() - before, time.monotonic()
            self._stood += min(elapsed, 2 * self._pause)
            place = self._find_place()
            if place.order != self._place.order or not self._since:
                self._stood = self._warned = 0.0
                self._since = time.strftime("%H:%M:%S")
            self._place = place
            stands = self._stood >= self._first / 2
            # One that gets on says so to those that may wait for it.
            heard = self._exchange(reads=stands)
            if stands and not self._is_over.is_set():
                self._act(heard)

    def _exchange(self, *, reads: bool = True) -> Heard:
        place = self._place
        words = {"since": self._since, "stood": self._stood, "ends": self._ends}
        return self._heartbeats.exchange(place._asdict() | words, reads=reads)

    def _act(self, heard: Heard) -> None:
        """Warn or end, if it is time."""
        text = describe_ranks(heard, self._info.world_size)
        speaks = self._info.rank == heard.speaker
        words = heard.words.values()
        # A rank that gets on keeps those alive that wait for it.
        if any(each["ends"] for each in words) or all(
            each["stood"] >= self._timeout for each in words
        ):
            self._end(text, speaks=speaks)
        due = max(WARNING_SECONDS, 2 * self._warned)
        if self._stood >= due:
            self._warned = due
            if speaks:
                # The screen has nothing else of the other ranks than errors.
                level = logging.ERROR if self._info.rank else logging.WARNING
                say(f"No progress for {due:g} s at {text}.", level=level)

    def _end(self, text: str, *, speaks: bool) -> NoReturn:
        """End this process when all ranks that answer have written their stacks."""
        file = self._write_stacks(text)
        if speaks:
            where = f" The stacks of all threads are in {file}." if file else ""
            resumes = " Run the same command again to resume from the newest checkpoint."
            say(
                f"No progress for {self._timeout:g} s (hang_timeout) at {text}. All processes of "
                f"this run end now, with exit code {TRY_AGAIN}.{where}"
                f"{'' if self._folder is None else resumes}"
            )
        self._ends = True
        deadline = time.monotonic() + max(3 * self._pause, _END_SECONDS)
        while time.monotonic() < deadline:
            if all(words["ends"] for words in self._exchange().words.values()):
                break
            time.sleep(_POLL_SECONDS)
        if self._info.rank == 0 and self._info.world_size > 1:
            # It may have the store in which the others look.
            time.sleep(2 * self._pause)
        end_process(TRY_AGAIN)

    def _write_stacks(self, text: str) -> Path | None:
        """Write the stacks of all threads to the file; to stderr, and return None, if need be."""
        rank = self._info.rank
        head = f"{now()}, rank {rank}, process {os.getpid()} on {host()}\n{text}\n\n"

        def write(path: Path) -> bool:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file)
            return True

        path = None if self._folder is None else self._folder / f"stacks-rank-{rank}.txt"
        if path is not None and in_time(lambda: write(path), _FILE_SECONDS):
            return path
        in_time(lambda: faulthandler.dump_traceback(_STDERR), _PRINT_SECONDS)
        return None


def describe_ranks(heard: Heard, num_ranks: int) -> str:
    """Return which rank is behind, and what the others do.

    Args:
        heard: what the ranks say.
        num_ranks: how many there are.
    """
    least = min(words["order"] for words in heard.words.values())
    behind = [rank for rank, words in heard.words.items() if words["order"] == least]
    others = [rank for rank in heard.words if rank not in behind]
    words = heard.words[behind[0]]
    place = f"{words['text']} since {words['since']}"
    if num_ranks == 1:
        parts = [place]
    elif others:
        place = f"{_list_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind, {place}"
        parts = [place, f"{_list_ranks(others)} {heard.words[others[0]]['text']}"]
    else:
        parts = [f"{'all ranks' if len(behind) == num_ranks else _list_ranks(behind)} {place}"]
    if heard.mute:
        verb = "does" if len(heard.mute) == 1 else "do"
        parts.append(f"{_list_ranks(heard.mute)} {verb} not answer")
    return f"{words['step']}: {'; '.join(parts)}"


def _list_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


class Heard(NamedTuple):
    """What a rank knows of all ranks.

    Attributes:
        words: what the ranks say that answer, by rank.
        mute: the ranks that do not.
        speaker: the rank that speaks for all.
    """

    words: Mapping[int, Mapping[str, Any]]
    mute: list[int]
    speaker: int


@final
class Heartbeats:
    """The last words of all ranks, in the store of the group.

    Args:
        info: the rank of this process, and how many there are.
        fresh: for how many seconds a rank counts as answering after it has said something new.
    """

    def __init__(self, info: DistributedInfo, fresh: float) -> None:
        self._info = info
        self._fresh = fresh
        self._store: Any = None
        self._count = 0
        # The last text of each rank, and when it was new.
        self._last: dict[int, tuple[bytes, float]] = {}

    def exchange(self, words: Mapping[str, Any], *, reads: bool = True) -> Heard:
        """Write the words of this rank; return those of the ranks that answer.

        Args:
            words: plain values.
            reads: whether to look for what the others say.
        """
        own = self._info.rank
        self._count += 1
        text = json.dumps({**words, "count": self._count})
        # A store that is stopped answers nobody, and may wait forever.
        has_store = in_time(lambda: self._talk(text, reads), _STORE_SECONDS)
        if has_store is None:
            # Rank 0 has the store, or is beside it. Who else answers is not known.
            return Heard({own: words}, [0] if own else [], 1 if own else 0)
        if not has_store:
            return Heard({own: words}, [], own)
        found = {own: words}
        for rank, (said, when) in self._last.items():
            if time.monotonic() - when < self._fresh:
                found[rank] = json.loads(said)
        mute = [rank for rank in range(self._info.world_size) if rank not in found]
        return Heard(dict(sorted(found.items())), mute, min(found))

    def _talk(self, text: str, reads: bool) -> bool:
        """Write the words of this rank and read those of others; False if there is no store."""
        # After an error it is opened again: it may come back.
        store, self._store = self._store or open_store(), None
        if store is None:
            return False
        store.set(f"{_TOPIC}/{self._info.rank}", text)
        for rank in range(self._info.world_size) if reads else ():
            key = f"{_TOPIC}/{rank}"
            if rank == self._info.rank or not store.check([key]):
                continue
            said, before = store.get(key), self._last.get(rank)
            if before is None:
                # It may be of an earlier call, or of ranks that torchrun has started before.
                self._last[rank] = said, -math.inf
            elif before[0] != said:
                self._last[rank] = said, time.monotonic()
        self._store = store
        return True
