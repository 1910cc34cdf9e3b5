"""What a call of the trainer does to files between its hooks, and what it refuses, in order.

Each call is played in a child process. An audit hook sees each file that is opened, listed, renamed
or removed, whoever does it; helpers of ``storage`` are wrapped for what it does not see.
``tests/golden/call_order.md`` holds what was recorded.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import helios
from helios.ledger import writer
from helios.ledger.run_file import FILE_NAME as RUN_FILE
from helios.plugins import EarlyStopping, Plugin
from helios.state import TrainingState
from helios.storage import files
from helios.storage.folder_lock import FolderLock
from helios.terminal.root_logger import get_tensorboard_writer
from tests.support.kills import kill_self, run_in_child

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "golden" / "call_order.md"
SAVED, LAST = 2, 4

_CHANGING = {
    "events.out.tfevents": r"events\.out\.tfevents\.\S*[^./]",
    "<date>": r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_WRAPPED = {
    "fsync": "flush",
    "fsync_folder": "flush the names in",
    "truncate": "cut",
    "make_folder": "make",
    "check_writable": "try to write in",
}


class Trail:
    """The file operations below a folder, and the hooks, of the thread that trains."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}{os.sep}"
        self._thread = threading.get_ident()
        self._is_inside = False
        self.lines: list[str] = []

    def install(self) -> None:
        """Record from here on, until this process ends."""
        # How often lines are written in between depends on how long a run takes.
        writer._SECONDS = math.inf
        sys.addaudithook(self._hear)
        for name, word in _WRAPPED.items():
            setattr(files, name, self._wrap(getattr(files, name), word, _place_of))
        for name, word in (("acquire", "lock"), ("release", "unlock")):
            method = getattr(FolderLock, name)
            setattr(FolderLock, name, self._wrap(method, word, lambda lock: lock.path))

    def add(self, line: str) -> None:
        """Add a line, unless it only repeats the one before."""
        if self.lines[-1:] != [line]:
            self.lines.append(line)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == "open":
            self._note(_word_for(*arguments[1:]), arguments[0])
        elif event in ("os.listdir", "os.scandir"):
            self._note("list", arguments[0])
        elif event == "os.rename":
            self._note("rename", *arguments[:2])
        elif event in ("os.remove", "os.rmdir"):
            self._note("remove", arguments[0])
        elif event == "os.mkdir" and Path(arguments[0]).parent.exists():
            self._note("make", arguments[0])

    def _note(self, word: str, *paths: Any) -> None:
        texts = [os.fspath(path) for path in paths if isinstance(path, str | os.PathLike)]
        is_below = all(f"{text}{os.sep}".startswith(self._folder) for text in texts)
        # How often this file is written depends on how long a run takes.
        if not texts or Path(texts[0]).name == RUN_FILE:
            return
        is_there = word == "make" and Path(texts[0]).exists()
        if is_below and not is_there and not self._is_inside:
            names = [text[len(self._folder) :] or "." for text in texts]
            line = f"{word} {' -> '.join(names)}"
            for name, pattern in _CHANGING.items():
                line = re.sub(pattern, name, line)
            self.add(line)

    def _wrap(
        self, operation: Callable[..., Any], word: str, place_of: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        def wrapped(target: Any, *more: Any, **others: Any) -> Any:
            if self._is_inside or threading.get_ident() != self._thread:
                return operation(target, *more, **others)
            self._note(word, place_of(target))
            self._is_inside = True
            try:
                return operation(target, *more, **others)
            finally:
                self._is_inside = False

        return wrapped


def _place_of(target: Any) -> Any:
    return target if isinstance(target, Path) else target.name


def _word_for(mode: str | None, flags: int) -> str:
    if mode is None:
        return "write" if flags & _WRITES else "read"
    return "write" if "+" in mode else {"a": "append", "r": "read"}.get(mode[0], "write")


class Told(Plugin):
    """Adds hooks to a trail.

    Args:
        dies_at: the iteration at whose start the process is killed; 0 for none.
    """

    unsaved = ("trail", "dies_at")

    def __init__(self, trail: Trail | None = None, dies_at: int = 0) -> None:
        super().__init__("told")
        self.trail = trail
        self.dies_at = dies_at

    def _tell(self, name: str) -> None:
        if self.trail is not None:
            self.trail.add(f"{name}()")

    def setup(self) -> None:
        self._tell("setup")

    def on_training_step_start(self, state: TrainingState) -> None:
        self._tell("on_training_step_start")
        if state.global_iteration == self.dies_at:
            # Whether the thread of TensorBoard has written the last events is left to chance.
            writer = get_tensorboard_writer()
            if writer is not None:
                writer.mark()
            kill_self()


def _make_teller(name: str) -> Callable[..., None]:
    def tell(self: Told, *arguments: Any) -> None:
        self._tell(name)

    return tell


for _name in (
    *("on_load_checkpoint", "on_checkpoint_loaded", "on_fit_start", "on_training_start"),
    *("on_training_resume", "on_testing_start", "on_testing_end", "on_save_checkpoint"),
    *("on_training_end", "on_exception", "on_fit_end", "teardown"),
):
    setattr(Told, _name, _make_teller(_name))


class Data(helios.DataModule):
    unsaved = ("trail", "wrongs")

    def __init__(self, trail: Trail | None = None, wrongs: Collection[str] = ()) -> None:
        super().__init__()
        self.trail = trail
        self.wrongs = wrongs

    def prepare_data(self) -> None:
        if self.trail is not None:
            self.trail.add("prepare_data()")
        if "prepare_data() fails" in self.wrongs:
            raise OSError("there is no network")

    def setup(self) -> None:
        numbers = TensorDataset(torch.arange(8.0).unsqueeze(1))
        size = 2 if "the data has changed" in self.wrongs else 1
        params = helios.DataLoaderParams(batch_size=size, shuffle=True)
        if "there is no training data" not in self.wrongs:
            self._train_dataset = self._create_dataset(numbers, params)
        self._test_dataset = self._create_dataset(numbers, params)


class Stepless(helios.Model):
    """One weight and one bias; nothing trains them."""

    unsaved = ("wrongs",)

    def __init__(self, wrongs: Collection[str] = ()) -> None:
        super().__init__("net")
        self.wrongs = wrongs

    def setup(self, fast_init: bool = False) -> None:
        if "setup() fails" in self.wrongs:
            raise ValueError("there are no labels")
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "on_load_checkpoint() fails" in self.wrongs:
            raise KeyError("ema")

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return {"score": (self.net(batch[0]).sum(), 1)}

    test_step = valid_step


class Line(Stepless):
    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return self.net(batch[0]).square().mean()


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Something wrong that a call refuses.

    Attributes:
        gone: which files are away, as a pattern.
        spoil: what is done in the process before.
    """

    error: str
    says: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gone: str = ""
    spoil: Callable[[Path], Any] = lambda folder: None


def _refuse_writing(folder: Path) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    files.check_writable = refuse


def _hold_the_lock(folder: Path) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    fcntl.lockf = refuse


_BEST = helios.KeepBest(1, "score", mode="max")
WRONGS = {
    "the data module is none": Wrong("ArgumentTypeError", "must be a DataModule"),
    "there is no checkpoint": Wrong("CheckpointError", "no checkpoint to evaluate", gone="*.pth"),
    "there is no ledger": Wrong("LedgerError", "has no ledger", gone="ledger.jsonl"),
    "the number of replicas has changed": Wrong(
        "RunMismatchError", "started with 1 replica", {"num_replicas": 2}
    ),
    "the folder cannot be written to": Wrong(
        "ArgumentError", "can be created and written to", spoil=_refuse_writing
    ),
    "prepare_data() fails": Wrong("OSError", "no network"),
    "another run holds the lock": Wrong(
        "FolderInUseError", "in use by another run", spoil=_hold_the_lock
    ),
    "the folder is of another run": Wrong(
        "RunMismatchError", "belongs to the run", {"run_name": "other"}
    ),
    "a declared parameter has changed": Wrong(
        "RunMismatchError", "width", {"params": {"width": 2}}
    ),
    "setup() fails": Wrong("ValueError", "no labels"),
    "the model has no training step": Wrong("ArgumentError", "must override train_step"),
    "there is no training data": Wrong("ArgumentError", "must have training data"),
    "one score has two modes": Wrong(
        "ArgumentError", "one mode", {"store": helios.CheckpointStore(False, keep_best=_BEST)}
    ),
    "the data has changed": Wrong("RunMismatchError", "batch_size"),
    "on_load_checkpoint() fails": Wrong("KeyError", "ema"),
}
"""What can be wrong, each with the error that it leads to."""

_AT_FIRST = ("the data module is none",)
_IN_SETUP = ("setup() fails", "the model has no training step", "there is no training data")


@dataclasses.dataclass(frozen=True)
class Situation:
    """A call that is recorded.

    Attributes:
        before: how the run was left: ``None`` for nothing, else the iteration at which it was
            killed, or 0 if it has ended.
    """

    title: str
    refuses: tuple[str, ...] = ()
    before: int | None = None
    act: Callable[..., Any] = helios.Trainer.fit
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


SITUATIONS = {
    "fresh": Situation(
        "A new run",
        (
            *(*_AT_FIRST, "the folder cannot be written to", "prepare_data() fails"),
            *("another run holds the lock", *_IN_SETUP, "one score has two modes"),
        ),
    ),
    "resume": Situation(
        "A resume after a kill",
        (
            *(*_AT_FIRST, "the number of replicas has changed", "prepare_data() fails"),
            *("another run holds the lock", "the folder is of another run"),
            *("the folder cannot be written to", *_IN_SETUP, "one score has two modes"),
            *("a declared parameter has changed", "the data has changed"),
            "on_load_checkpoint() fails",
        ),
        before=LAST,
    ),
    "back": Situation(
        "Going back to an older checkpoint",
        before=0,
        options={"resume": f"net/net_epoch_1_iter_{SAVED}.pth"},
    ),
    "finished": Situation(
        "A run that has ended",
        (
            *(*_AT_FIRST, "the number of replicas has changed", "prepare_data() fails"),
            *("another run holds the lock", "the folder is of another run"),
            *("a declared parameter has changed", "setup() fails"),
        ),
        before=0,
    ),
    "evaluate": Situation(
        "An evaluation",
        (*_AT_FIRST, "prepare_data() fails", "there is no checkpoint", "setup() fails"),
        before=0,
        act=lambda *given: helios.Trainer.test(*given, checkpoint="newest"),
    ),
    "replay": Situation(
        "A replay",
        (
            *(*_AT_FIRST, "there is no ledger", "the number of replicas has changed"),
            *("prepare_data() fails", *_IN_SETUP, "one score has two modes"),
            *("a declared parameter has changed", "the data has changed"),
            "on_load_checkpoint() fails",
        ),
        before=0,
        act=helios.Trainer.replay,
    ),
}


def _make_trainer(folder: Path, *plugins: Plugin, **options: Any) -> helios.Trainer:
    given = {
        "train_unit": "iteration",
        "total_steps": LAST,
        "chkpt_frequency": SAVED,
        "print_frequency": 1,
        "chkpt_root": folder / "runs",
        "enable_file_logging": True,
        "log_path": folder / "logs",
        "enable_tensorboard": True,
        "run_path": folder / "tb",
        "print_banner": False,
        "use_cpu": True,
        "params": {"width": 1},
        "plugins": list(plugins),
        "store": helios.CheckpointStore(is_async=False),
    }
    if "resume" in options:
        options["resume"] = folder / "runs" / options["resume"]
    return helios.Trainer(**{**given, **options})


def leave(folder: Path, situation: Situation) -> None:
    """Leave a folder as a situation finds it."""
    before = situation.before
    if before is not None:

        def work() -> bool:
            trainer = _make_trainer(folder, Told(dies_at=before))
            return trainer.fit(Line(), Data())

        assert run_in_child(work, folder.with_suffix(".before")) == (-9 if before else 0)


@dataclasses.dataclass
class Played:
    lines: list[str]
    error: str


def play(folder: Path, situation: Situation, wrongs: Collection[str] = ()) -> Played:
    """Play a situation in the folder that was left for it, with some things wrong."""

    def work() -> Played:
        trail = Trail(folder)
        plugins: list[Plugin] = [Told(trail)]
        if "one score has two modes" in wrongs:
            plugins.append(EarlyStopping("score", patience=9, mode="min"))
        options = dict(situation.options)
        for name in wrongs:
            WRONGS[name].spoil(folder)
            options |= WRONGS[name].options
        trainer = _make_trainer(folder, *plugins, **options)
        kind = Stepless if "the model has no training step" in wrongs else Line
        data = None if "the data module is none" in wrongs else Data(trail, wrongs)
        trail.install()
        error = ""
        try:
            situation.act(trainer, kind(wrongs), data)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return Played(trail.lines, error)

    result = folder.with_suffix(".played")
    with _without(folder, wrongs):
        assert run_in_child(work, result) == 0
    played: Played = pickle.loads(result.read_bytes())
    return played


@contextmanager
def _without(folder: Path, wrongs: Collection[str]) -> Iterator[None]:
    """Keep the files away that are gone."""
    run = folder / "runs" / "net"
    patterns = [WRONGS[name].gone for name in wrongs if WRONGS[name].gone]
    places = [place for pattern in patterns for place in run.glob(pattern)]
    for place in places:
        place.rename(folder.parent / place.name)
    try:
        yield
    finally:
        for place in places:
            (folder.parent / place.name).rename(place)


def render(situation: Situation, lines: list[str]) -> str:
    """Return the section of the page about a situation."""
    refused = "".join(f"{number}. {text}\n" for number, text in enumerate(situation.refuses, 1))
    refuses = f"It refuses, in this order:\n\n{refused}\n" if refused else ""
    trail = "\n".join(lines)
    return f"## {situation.title}\n\n{refuses}```text\n{trail}\n```\n"


def page() -> str:
    """Return the page with the trails of all situations."""
    sections = []
    for name, situation in SITUATIONS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, name)
            folder.mkdir()
            leave(folder, situation)
            sections.append(render(situation, play(folder, situation).lines))
    head, _, _ = PAGE.read_text("utf-8").partition("## ")
    return head + "\n".join(sections)
