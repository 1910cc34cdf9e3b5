"""The cells of the matrix of decisions: where a run ends, saves and leaves out an update.

Each cell is a short training in which something is decided once, in one event, by all processes or
by the last one alone. Its outcome is a line of text that is the same on every processor: weights
are sums of small integers times powers of two.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import helios
from helios.hooks.events import asks_nothing
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from tests.support import faults
from tests.support.decision_cells import (
    EARLY_STOP,
    FAILED_SAVE,
    FAILED_WRITE,
    FAILED_WRITE_CONTINUED,
    FIRST_ITERATION,
    GOLDEN,
    GROUPS,
    IMPROVEMENT,
    INTERRUPT,
    MID,
    OVERFLOW,
    POLL,
    REQUEST_CHECKPOINT,
    REQUEST_STOP,
    RESUME,
    SIGNAL,
    SKIP_STEP,
    STOP_ITERATION,
    TRIAL,
    Cell,
    cells_of,
)
from tests.support.ranks import run_ranks
from tests.support.runs import RETURNS

__all__ = ["GOLDEN", "expected", "golden_table", "parse", "play"]
BATCHES = 5
_STEP_METHODS = ("train_step", "valid_step", "have_metrics_improved")
_GATE_SECONDS = 120
_GROUP_SECONDS = 250


class Line(nn.Module):
    """A weight whose gradient is the mean of the batches; twelve can be divided by every count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch).sum()


class Learner(helios.Model):
    """What it has learned depends on which batches made which update, and in which order."""

    unsaved = ("act",)

    def __init__(self, act: Callable[[str], Any]) -> None:
        super().__init__("run")
        self.act = act

    def setup(self, fast_init: bool = False) -> None:
        self.net = Line()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train_step(self, batch: torch.Tensor, state: TrainingState) -> torch.Tensor:
        factor = self.act("train_step")
        loss: torch.Tensor = self.net(batch)
        return loss if factor is None else loss * factor

    def valid_step(self, batch: torch.Tensor, step: int) -> dict[str, tuple[Any, Any]]:
        self.act("valid_step")
        return {"score": (self.net(batch).detach(), len(batch))}

    def have_metrics_improved(self) -> bool:
        return bool(self.act("have_metrics_improved"))


class Multiples(helios.DataModule):
    """Multiples of twelve, one a batch; each replica has as many."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self.num_replicas = num_replicas

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=1)
        self._train_dataset = self._create_dataset(self._make(BATCHES), params)
        self._valid_dataset = self._create_dataset(self._make(2), params)

    def _make(self, length: int) -> torch.Tensor:
        count = length * self.num_replicas
        return 12 * torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(1)


@dataclass
class Seen:
    """What a training shows: its context, the saves it told of, and the steps it left out."""

    context: Any = None
    saves: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


class Deed:
    """Does what a cell decides, once, when its moment has come.

    Args:
        cell: the cell.
        seen: what the training shows.
        is_asking: whether this process decides anything.
        gate: is opened where a save is to fail.
    """

    def __init__(self, cell: Cell, seen: Seen, *, is_asking: bool, gate: threading.Event) -> None:
        self._cell, self._seen, self._gate = cell, seen, gate
        self._is_asking = is_asking
        self._tellings: dict[str, int] = {}
        self._last = -1
        self._is_done = False

    def act(self, event: str) -> Any:
        """Return the answer of the receiver, if it has one."""
        if event != self._cell.event:
            return None
        number = self._tellings[event] = self._tellings.get(event, 0) + 1
        if self._cell.kind in (POLL, IMPROVEMENT):
            return self._is_asking and number == self._cell.number
        if not self._is_its_moment(number):
            return None
        self._is_done = True
        return self._do() if self._is_asking else None

    def _is_its_moment(self, number: int) -> bool:
        cell, context = self._cell, self._seen.context
        if self._is_done or cell.kind == EARLY_STOP:
            return False
        if context is None or cell.moment not in FIRST_ITERATION:
            return True
        if cell.moment == TRIAL:
            return bool(context.is_sanity_check) or "validation" not in cell.event
        iteration = context.state.global_iteration
        if cell.is_late:
            # The second poll of an iteration stands behind a validation or an epoch.
            was_asked, self._last = self._last == iteration, iteration
            return was_asked and iteration >= FIRST_ITERATION[cell.moment]
        return bool(iteration >= FIRST_ITERATION[cell.moment])

    def _do(self) -> Any:
        context, kind = self._seen.context, self._cell.kind
        if kind == REQUEST_CHECKPOINT:
            context.request_checkpoint()
        elif kind == REQUEST_STOP:
            context.request_stop("enough")
        elif kind == INTERRUPT:
            context.interrupt("the time is over")
        elif kind == SKIP_STEP:
            context.skip_step("on purpose")
        elif kind == STOP_ITERATION:
            raise StopIteration
        elif kind == OVERFLOW:
            return self._overflow()
        elif kind == SIGNAL:
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == FAILED_SAVE:
            self._gate.set()
            faults.join_writer()
        return None

    def _overflow(self) -> float | None:
        if self._cell.event == "train_step":
            return float("inf")
        for parameter in self._seen.context.model.net.parameters():
            parameter.grad.fill_(float("inf"))
        return None


def _watcher(seen: Seen, deed: Deed, cell: Cell) -> Plugin:
    """Return a plugin that hears the cell's event, and keeps what the training shows.

    It holds nothing: what drives a training is no part of its state.
    """

    def see(self: Any) -> None:
        # Before it there is no context.
        seen.context = self.context

    @asks_nothing
    def on_step_end(self: Any, state: TrainingState, committed: bool) -> None:
        if not committed:
            seen.skipped.append(state.global_iteration)

    def on_save(self: Any, checkpoint: dict[str, Any]) -> None:
        seen.saves.append(checkpoint["training_state"]["global_iteration"])

    def ask_for_save(self: Any, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == number:
            self.context.request_checkpoint()

    methods: dict[str, Callable[..., Any]] = {
        "setup": lambda self: None,
        "on_fit_start": see,
        "on_load_checkpoint": lambda self, checkpoint: see(self),
        "on_training_step_end": on_step_end,
        "on_save_checkpoint": on_save,
    }
    # A save that is in flight from the first window on, or one inside of an epoch.
    number = 1 if cell.kind == FAILED_SAVE else 3
    if number == 1 or (cell.event == "on_save_checkpoint" and cell.unit == "epoch"):
        methods["on_training_batch_end"] = ask_for_save
    if cell.event not in _STEP_METHODS:
        methods[cell.event] = _hearing(cell.event, methods.get(cell.event), deed)
    return type("Watcher", (Plugin,), methods)("watcher")


def _hearing(event: str, usual: Callable[..., Any] | None, deed: Deed) -> Callable[..., Any]:
    def hear(self: Any, *args: Any) -> Any:
        if usual is not None:
            usual(self, *args)
        answer = deed.act(event)
        return args[0] if event.startswith("process_") else answer

    return hear


def _make_trainer(cell: Cell, folder: Path, *plugins: Plugin) -> helios.Trainer:
    is_by_epoch = cell.unit == "epoch"
    fails = cell.kind in (FAILED_SAVE, FAILED_WRITE)
    store = helios.CheckpointStore(
        is_async=cell.kind == FAILED_SAVE,
        digest=False,
        on_save_error="raise" if fails else "continue",
    )
    return helios.Trainer(
        train_unit=cell.unit,
        total_steps=2 if is_by_epoch else 8 // cell.accumulation,
        valid_frequency=1 if is_by_epoch else 2,
        chkpt_frequency=100 if cell.kind == FAILED_SAVE else 2 if is_by_epoch else 3,
        print_frequency=2,
        sanity_steps=int(cell.moment == TRIAL),
        accumulation_steps=cell.accumulation,
        early_stop_cycles={EARLY_STOP: cell.number, IMPROVEMENT: 1}.get(cell.kind),
        use_cpu=True,
        precision="fp16" if cell.kind == OVERFLOW else None,
        chkpt_root=folder,
        num_replicas=cell.num_replicas,
        plugins=plugins,
        store=store,
        print_banner=False,
        signals=RETURNS,
    )


class _FailingFiles:
    """Lets rank 0 fail to commit a checkpoint: at once, or when the gate is opened."""

    def __init__(self, cell: Cell, gate: threading.Event, rank: int) -> None:
        is_failing = cell.kind in (FAILED_SAVE, FAILED_WRITE, FAILED_WRITE_CONTINUED)
        self._is_used = is_failing and rank == 0
        self._waits = cell.kind == FAILED_SAVE
        self._gate = gate
        self._replace = files.replace

    def __enter__(self) -> None:
        if self._is_used:
            files.replace = self._fail

    def __exit__(self, *error: object) -> None:
        files.replace = self._replace

    def _fail(self, source: Path, target: Path) -> None:
        if self._waits and not self._gate.wait(_GATE_SECONDS):
            raise AssertionError("the cell's moment never came")
        raise OSError(errno.ENOSPC, "no space, on purpose", str(target.name))


class Outcome(NamedTuple):
    """What a process sees of a cell: its end, the saves it was told of, and what it learned."""

    end: str
    saves: tuple[int, ...]
    rest: str

    def show(self, kept: list[int]) -> str:
        """Return it as text, with the saves that did not reach the disk."""
        lost = [number for number in self.saves if number not in kept]
        failed = f" without {_join(lost)}" if lost else ""
        return f"{self.end}, saves {_join(self.saves)}{failed}, {self.rest}"


def _play(rank: int, cell: Cell, folder: Path) -> Outcome:
    if cell.moment == RESUME:
        first = cell._replace(
            kind=INTERRUPT, event="on_training_batch_end", moment=MID, asking_rank=None
        )
        _fit(rank, first, folder)
    return _fit(rank, cell, folder)


def _fit(rank: int, cell: Cell, folder: Path) -> Outcome:
    seen, gate = Seen(), threading.Event()
    is_asking = rank == cell.asking_rank or cell.asking_rank is None
    deed = Deed(cell, seen, is_asking=is_asking, gate=gate)
    trainer = _make_trainer(cell, folder, _watcher(seen, deed, cell))
    model = Learner(deed.act)
    try:
        with _FailingFiles(cell, gate, rank):
            ended = str(trainer.fit(model, Multiples(cell.num_replicas)))
    except Exception as error:
        ended = type(error).__name__
    state, place = seen.context.state, seen.context.place
    end = f"{ended} at {state.global_iteration}.{place.epoch}.{place.batch}"
    validations = f"{state.validation_cycles} validations"
    skips = f"skips {_join(seen.skipped)}"
    weight = f"weight {model.net.weight.item()!r}"
    return Outcome(end, tuple(seen.saves), f"{validations}, {skips}, {weight}")


def _join(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def _play_all(rank: int, cells: list[Cell], root: Path) -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    return [_play(rank, cell, root / str(number)) for number, cell in enumerate(cells)]


def play(cells: list[Cell], num_processes: int = 1) -> dict[Cell, str]:
    """Play cells one after the other, in one group of processes; return their outcomes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        root = Path(folder)
        if num_processes == 1:
            ranks = [[_play(0, cell, root / str(n)) for n, cell in enumerate(cells)]]
        else:
            ranks = run_ranks(_play_all, num_processes, cells, root, timeout=_GROUP_SECONDS)
        found = {}
        for number, (cell, *seen) in enumerate(zip(cells, *ranks, strict=True)):
            kept = faults.committed(root / str(number) / "run")
            # Where processes do not see the same, all of it is told.
            texts = dict.fromkeys(outcome.show(kept) for outcome in seen)
            found[cell] = " BUT ".join(texts)
    return found


def name_of(cell: Cell, num_processes: int) -> str:
    """Return the name of a line that holds for one number of processes only."""
    is_alone = cell.asking_rank == num_processes - 1 and cell.kind != SIGNAL
    return f"{cell} / P={num_processes}{', the last one alone' if is_alone else ''}"


def golden_table() -> str:
    """Return the text of the golden file, as the code makes it; takes a minute."""
    lines: dict[str, str] = {}
    for num_replicas, num_processes in GROUPS:
        cells = cells_of(num_replicas, num_processes)
        for cell, outcome in play(cells, num_processes).items():
            if num_processes == 1:
                lines[str(cell)] = outcome
            elif outcome != lines[str(cell)]:
                lines[name_of(cell, num_processes)] = outcome
    return "".join(f"{name}: {outcome}\n" for name, outcome in sorted(lines.items()))


def parse(text: str) -> dict[str, str]:
    """Return the lines of the golden file by their names."""
    return dict(line.split(": ", 1) for line in text.splitlines())


def expected(golden: dict[str, str], cell: Cell, num_processes: int) -> str:
    """Return what should happen in a cell on a number of processes."""
    return golden.get(name_of(cell, num_processes), golden[str(cell)])
