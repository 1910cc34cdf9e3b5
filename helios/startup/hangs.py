"""What a run waits for that stands still, and how it ends if it does so for too long.

When the run makes no progress, a line of the log says what each process waits for. After
``hang_timeout`` every process writes its stacks to a file and ends, whatever its main thread is
doing, which may hang and hold any lock. The next start is worth a try, so the code is 75. A run
that stands still again, without any checkpoint in between, would be started forever: a file beside
the checkpoints remembers it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar, final

from helios.checkpoint import file_names
from helios.core.signal_watch import TRY_AGAIN
from helios.core.utils import flush_outputs
from helios.distributed.heartbeats import Heard, Heartbeats
from helios.distributed.process_groups import DistributedInfo
from helios.ledger.run_file import host, now
from helios.storage import files

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


_MEMORY = "hang.json"
# The disk may be what the run waits for.
_FILE_SECONDS = 5.0


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
        """Write the stacks of all threads.

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
        return f"The stacks of all threads are in {path}."

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


_HELIOS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# What a module waits for, the innermost frame first. Modules that serve several of these, such as
# replicas.messages, are not listed: the frame that called them is.
_PEERS = {
    "helios.replicas.gradients": "in the exchange of gradients",
    "helios.replicas.flat_gradients": "in the exchange of gradients",
    "helios.replicas.window_exchange": "in the exchange of gradients",
    "helios.sharding.sharded_gradients": "in the exchange of gradients",
    "helios.replicas.module_buffers": "in the exchange of buffers",
    "helios.replicas.named_sums": "in the exchange of scores",
    "helios.replicas.replicas": "in an agreement",
    "helios.replicas.turns": "in an agreement",
    "helios.distributed.collectives": "in an agreement",
    "helios.distributed.process_groups": "in an agreement",
    "helios.requests": "in an agreement",
    "torch.distributed.fsdp": "in the exchange of sharded parameters",
}
_OWN = {
    "torch.utils.data.dataloader": "waits for its loader",
    "helios.checkpoint": "saves",
    "helios.checkpoint.writer_thread": "waits for the save under way",
    "helios.storage": "saves",
    "helios.startup.run_saves": "saves",
    "helios.launch": "waits for the ranks that it has started",
    "bdb": "is in a debugger",
    "torch._dynamo.convert_frame": "compiles",
    "torch._inductor": "compiles",
}
# How many times as long it may take there before anybody is warned.
_PATIENCE = {
    "helios.launch": math.inf,
    "bdb": math.inf,
    "torch._dynamo.convert_frame": 10.0,
    "torch._inductor": 10.0,
}
_COLLECTIVE = "torch.distributed.distributed_c10d"
# So often a rank looks in the time after which it warns.
_LOOKS = 6
_END_SECONDS = 1.0
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Where a thread is.

    Attributes:
        text: what it does there, as the rest of a sentence about its rank; for what needs other
            ranks, after the word "waits".
        needs_others: whether it waits for other ranks.
        patience: how many times as long as usual it may take.
    """

    text: str
    needs_others: bool = False
    patience: float = 1.0


def find_whereabouts(frame: FrameType | None) -> Whereabouts:
    """Return where the thread is whose innermost frame this is.

    Code of the user is named by the function that Helios has called.
    """
    user: FrameType | None = None
    own: FrameType | None = None
    is_collective = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        # A module that is imported waits for nobody.
        is_import = frame.f_code.co_name == "<module>"
        known = None if user or is_import else _find_known(module)
        if known is not None:
            return known
        is_collective |= module == _COLLECTIVE and user is None
        path = frame.f_code.co_filename
        if path.startswith(_HELIOS):
            if user is not None:
                break
            own = own or frame
        elif not path.startswith((*_LIBRARIES, "<")):
            if own is not None:
                break
            user = frame
        frame = frame.f_back
    found = user or own
    if found is None:
        return Whereabouts("is starting or ending")
    where = f"{found.f_code.co_name} ({Path(found.f_code.co_filename).name})"
    return (
        Whereabouts(f"in a collective of {where}", True)
        if is_collective
        else Whereabouts(f"is in {where}")
    )


def _find_known(module: str) -> Whereabouts | None:
    """Return what a module, or its package, waits for."""
    while module:
        if module in _PEERS:
            return Whereabouts(_PEERS[module], needs_others=True)
        if module in _OWN:
            return Whereabouts(_OWN[module], patience=_PATIENCE.get(module, 1.0))
        module = module.rpartition(".")[0]
    return None


@final
class HangWatch:
    """Warns in a thread when the thread that has made it makes no progress, and ends the process.

    Args:
        info: the rank of this process, and how many there are.
        seconds: how long it may wait in one place; it warns then, and after 2, 4, 8, ... times as
            long; ``None`` for no warning.
        find_progress: returns the step in words, and what changes with each batch.
        end: ends the process if it waits longer; ``None`` for never.
    """

    def __init__(
        self,
        info: DistributedInfo,
        seconds: float | None,
        find_progress: Callable[[], tuple[str, object]],
        *,
        end: HangEnd | None = None,
    ) -> None:
        self._info = info
        self._seconds = seconds
        self._find_progress = find_progress
        self._end = end
        given = [*([] if seconds is None else [seconds]), *([] if end is None else [end.seconds])]
        self._first = min(given, default=math.inf)
        self._pause = self._first / _LOOKS
        self._heartbeats = Heartbeats(info)
        self._thread = threading.get_ident()
        self._wakes = threading.Event()
        self._is_over = self._is_hurried = False
        self._here = Whereabouts("")
        self._progress: object = None
        self._now = self._moved = self._arrived = 0.0
        self._clock = ""
        self._warned = 0.0
        self._heard = Heard({})
        # Whether this process ends, and has written its stacks.
        self._ends = self._has_written = False
        # Held by who decides that the run is over, or that the process ends.
        self._deciding = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block."""
        if self._first == math.inf:
            yield
            return
        thread = threading.Thread(target=self._watch, name="helios-hang-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._deciding:
                self._is_over = True
            self._wakes.set()
            thread.join(_END_SECONDS)

    def hurry(self, seconds: float) -> None:
        """Ask the other ranks from now on where they are, because this process may soon end.

        Args:
            seconds: how long it may last.
        """
        self._pause = min(self._pause, seconds / _LOOKS)
        self._is_hurried = True
        self._wakes.set()

    def describe(self) -> str:
        """Return where the run stands, as far as this process knows; for any thread."""
        step, progress = self._find_progress()
        here = self._find_here()
        is_known = (here, progress) == (self._here, self._progress)
        heard, rank = self._heard, self._info.rank
        known = {**heard.words, rank: self._word(here, self._clock if is_known else "")}
        # Who is asked to end is not to say that it makes progress.
        words = {each: {**word, "moves": False} for each, word in known.items()}
        # Others say something when they have stood still for a while.
        is_sure = self._now - self._moved >= self._first or not self._knows_all(heard)
        heard = Heard(dict(sorted(words.items())), heard.mute if is_sure else [], heard.speaker)
        return f"{step}: {describe_ranks(heard, self._info.world_size)}"

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over:
            self._wakes.wait(self._pause)
            if self._is_over:
                return
            self._wakes.clear()
            # A process that was stopped has not stood still in that time.
            now = time.monotonic()
            self._now += min(now - before, 2 * self._pause)
            before = now
            step = self._update()
            if self._moves and not self._is_hurried:
                # Others may wait for this rank.
                self._heartbeats.say(self._word(self._here, self._clock))
                continue
            self._heard = self._exchange()
            if not self._is_over:
                self._act(f"{step}: {describe_ranks(self._heard, self._info.world_size)}")

    @property
    def _moves(self) -> bool:
        return self._now - self._moved < self._first / 2

    def _update(self) -> str:
        """Note where this rank is; returns the step in words."""
        step, progress = self._find_progress()
        here = self._find_here()
        if progress != self._progress:
            self._moved, self._warned = self._now, 0.0
        if (here, progress) != (self._here, self._progress):
            self._arrived, self._clock = self._now, time.strftime("%H:%M:%S")
        self._here, self._progress = here, progress
        return step

    def _find_here(self) -> Whereabouts:
        return find_whereabouts(sys._current_frames().get(self._thread))  # noqa: SLF001 - documented

    def _word(self, here: Whereabouts, since: str) -> dict[str, Any]:
        end = self._end
        is_due = end is not None and self._now - self._arrived >= end.seconds * here.patience
        ends = {"is_due": is_due, "ends": self._ends, "has_written": self._has_written}
        return {**dataclasses.asdict(here), "since": since, "moves": self._moves, **ends}

    def _exchange(self) -> Heard:
        return self._heartbeats.exchange(self._word(self._here, self._clock), fresh=3 * self._pause)

    def _knows_all(self, heard: Heard) -> bool:
        """Whether the store has answered, so that each rank is known to speak, or not to."""
        return len(heard.words) + len(heard.mute) == self._info.world_size

    def _act(self, text: str) -> None:
        """Warn or end, if it is time."""
        heard, stood = self._heard, self._now - self._arrived
        patience = max(words["patience"] for words in heard.words.values())
        if self._end is not None:
            # A rank that moves, or compiles, keeps those alive that wait for it.
            is_asked = any(words["ends"] for words in heard.words.values())
            if is_asked or all(words["is_due"] for words in heard.words.values()):
                self._leave(self._end, text)
        if self._seconds is None:
            return
        due = max(self._seconds * patience, 2 * self._warned)
        if stood >= due:
            self._warned = due
            if heard.speaker == self._info.rank:
                # The screen has nothing else of the other ranks than errors.
                say(f"{text}.", level=logging.ERROR if self._info.rank else logging.WARNING)

    def _leave(self, end: HangEnd, text: str) -> None:
        """End this process, unless its run has ended or gone on in the meantime."""
        self._ends = True
        was_known = self._knows_all(self._exchange())
        end.write_stacks(text)
        with self._deciding:
            is_alone = self._info.world_size == 1
            before = self._here, self._progress
            self._update()
            if self._is_over or (is_alone and before != (self._here, self._progress)):
                self._ends = False
            else:
                self._end_with_others(end, text, was_known=was_known)

    def _end_with_others(self, end: HangEnd, text: str, *, was_known: bool) -> NoReturn:
        """End this process when all ranks that can speak have written their stacks."""
        count = self._info.world_size
        # When others see that all have written, this one has spoken.
        code = end.finish(text, num_ranks=count, speaks=self._heard.speaker == self._info.rank)
        self._has_written = True
        # As long as the others take to notice it, or to find out for themselves.
        deadline = time.monotonic() + 3 * self._pause
        while time.monotonic() < deadline:
            heard = self._exchange()
            if self._knows_all(heard):
                if all(words["has_written"] for words in heard.words.values()):
                    break
            elif was_known:
                # Rank 0 is gone, and has seen that all have written.
                break
            time.sleep(_POLL_SECONDS)
        if self._info.rank == 0 and count > 1:
            # It has the store in which the others look.
            time.sleep(2 * _POLL_SECONDS)
        end_process(code)


def describe_ranks(heard: Heard, num_ranks: int) -> str:
    """Return who waits for whom.

    Args:
        heard: what the ranks have said.
        num_ranks: how many there are.
    """
    if num_ranks == 1:
        [words] = heard.words.values()
        return f"the training {_phrase(words)}"
    waiting = {rank: words for rank, words in heard.words.items() if words["needs_others"]}
    others = {rank: words for rank, words in heard.words.items() if rank not in waiting}
    causes = [f"rank {rank}, which {_phrase(words)}" for rank, words in others.items()]
    verb = "does" if len(heard.mute) == 1 else "do"
    mute = [f"{_list_ranks(heard.mute, num_ranks)} {verb} not answer"] if heard.mute else []
    if not waiting:
        return "; ".join([*(cause.replace(", which", "") for cause in causes), *mute])
    by_text: dict[str, list[int]] = {}
    for rank, words in waiting.items():
        by_text.setdefault(words["text"], []).append(rank)
    groups = [
        f"{_list_ranks(ranks, num_ranks)} {'waits' if len(ranks) == 1 else 'wait'} {text}"
        for text, ranks in by_text.items()
    ]
    first = min(words["since"] for words in waiting.values())
    whom = f" for {' and '.join(causes)}" if causes else _say_since(first)
    return "; ".join([f"{' and '.join(groups)}{whom}", *mute])


def _phrase(words: Mapping[str, Any]) -> str:
    if words["moves"]:
        return f"makes progress: it {words['text']}"
    verb = "waits " if words["needs_others"] else ""
    return f"{verb}{words['text']}{_say_since(words['since'])}"


def _say_since(clock: str) -> str:
    return f" since {clock}" if clock else ""


def _list_ranks(ranks: Sequence[int], num_ranks: int) -> str:
    """Return ranks in words, with the first and last one of three and more in a row."""
    if len(ranks) == num_ranks:
        return "all ranks"
    parts: list[str] = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        row = [str(rank) for _, rank in run]
        parts += [f"{row[0]} to {row[-1]}"] if len(row) > 2 else row
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


@contextmanager
def showing_stacks() -> Iterator[None]:
    """Write the stacks of all threads to stderr at each SIGQUIT in the block, and go on.

    Loader workers that are forked in the block do so, too. A handler of the script's stays.
    """
    number = getattr(signal, "SIGQUIT", None)
    # A shell lets the commands that it runs in the background ignore it.
    unhandled = (signal.SIG_DFL, signal.SIG_IGN)
    if number is None or signal.getsignal(number) not in unhandled or _is_caught(number):
        yield
        return
    try:
        faulthandler.register(number, sys.stderr)
    except (AttributeError, OSError, RuntimeError, ValueError):  # a stderr without a descriptor
        yield
        return
    try:
        yield
    finally:
        faulthandler.unregister(number)


def _is_caught(number: int) -> bool:
    """Return whether a handler in C has a signal, as far as the system says so."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    [masks] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(masks, 16) >> (number - 1) & 1)
