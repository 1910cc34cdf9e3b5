"""The cells of the matrix: each a tiny training that is cut off, built anew and resumed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import helios
from helios.checkpoint.retention import CheckpointStore
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.matrix.owners import OWNERS, Subjects, build
from tests.support.matrix.values import ATTRIBUTE, PARTNER, VALUES, close
from tests.support.resume import copy_checkpoint
from tests.support.warned import collect_warnings

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "state_matrix.txt"
TOTAL, FREQUENCY = 6, 2
BY_REPLICA = "one replica"

# At which iterations training changes the value, and after which the run is cut off.
TIMES: dict[str, tuple[tuple[int, ...], int]] = {
    "once": ((1,), 2),
    "each step": (tuple(range(1, TOTAL + 1)), 2),
    "late": ((3,), 4),
    BY_REPLICA: (tuple(range(1, TOTAL + 1)), 2),
}

SAVED, NAMED = "saved", "named"
BY_RANK = "saved by rank"
"""Saved and named, at the level ``restart``: another number of processes would not have it."""


class Cell(NamedTuple):
    """One place, what lies there, and when it changes."""

    owner: str
    value: str
    time: str

    def __str__(self) -> str:
        return " / ".join(self)


CELLS = [Cell(owner, value, time) for owner in OWNERS for value in VALUES for time in TIMES]


@dataclass
class Record:
    """What a training shows from outside."""

    end: Any = None
    warnings: list[str] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)


def _drive(cell: Cell, subjects: Subjects, record: Record) -> Plugin:
    """Return a plugin that changes the value, and reads it at the end.

    It holds nothing: what drives a training is no part of its state.
    """
    value, iterations = VALUES[cell.value], TIMES[cell.time][0]

    class Driver(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_start(self, state: TrainingState) -> None:
            record.counts[state.global_iteration] = len(record.warnings)

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            if cell.time != BY_REPLICA and state.global_iteration in iterations:
                value.change(subjects.find())

        def on_training_end(self) -> None:
            record.end = value.read(subjects.find())

    driver = Driver("driver")

    def change_on_second_replica() -> None:
        if driver.context.replica == 1:
            value.change(subjects.find())

    if cell.time == BY_REPLICA:
        subjects.model.on_step = change_on_second_replica
    return driver


def train(cell: Cell, folder: Path, *plugins: Plugin) -> Record:
    """Train with new objects in a folder, from what lies there."""
    subjects, record = build(cell.owner, cell.value), Record()
    device = {"use_cpu": True} if subjects.engine is None else {"engine": subjects.engine}
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=FREQUENCY,
        chkpt_root=folder,
        random_seed=1,
        print_banner=False,
        num_replicas=2 if cell.time == BY_REPLICA else 1,
        store=CheckpointStore(is_async=False, digest=False),
        plugins=[*subjects.plugins, _drive(cell, subjects, record), *plugins],
        **device,
    )
    if subjects.loop is not None:
        trainer.fit_loop.epoch_loop.connect(batch_loop=subjects.loop)
    try:
        with collect_warnings() as record.warnings:
            trainer.fit(subjects.model, subjects.data)
    finally:
        close(subjects.find())
    return record


def end_of(result: Path) -> Any:
    """Return what the place held at the end of a training in a child process."""
    record: Record = pickle.loads(result.read_bytes())
    return record.end


def checkpoint_after(folder: Path, iteration: int) -> Path:
    (path,) = folder.glob(f"*/*_iter_{iteration}.pth")
    return path


def play(cell: Cell, folder: Path) -> str:
    """Return what happens in a cell: ``saved``, ``named``, ``saved by rank``, or a failure."""
    try:
        whole = train(cell, folder / "whole")
    except Exception as error:
        return f"STOPPED by {type(error).__name__}"
    since = TIMES[cell.time][1]
    path = checkpoint_after(folder / "whole", since)
    try:
        resumed = train(cell, copy_checkpoint(path, folder / "resumed"))
    except Exception as error:
        return f"REFUSED by {type(error).__name__}"
    sidecar = json.loads(path.with_suffix(".json").read_text())
    warnings = whole.warnings[: whole.counts[since + 1]]
    return judge(cell, sidecar, warnings, is_equal=resumed.end == whole.end)


def judge(cell: Cell, sidecar: dict[str, Any], warnings: list[str], *, is_equal: bool) -> str:
    """Say in a few words what became of the value."""
    is_missing, is_warned = _names(sidecar.get("missing", {})), _names(warnings)
    if not is_equal:
        return _judge_lost(sidecar["level"], is_missing=is_missing, is_warned=is_warned)
    if is_missing or (is_warned and cell.time != BY_REPLICA):
        return f"{SAVED} YET NAMED"
    if cell.time != BY_REPLICA:
        return SAVED if sidecar["level"] == "restart" else f"{SAVED} at {sidecar['level']}"
    if sidecar["level"] == "elastic":
        return f"{SAVED} but ELASTIC"
    return BY_RANK if is_warned else f"{BY_RANK} UNNAMED"


def _judge_lost(level: str, *, is_missing: bool, is_warned: bool) -> str:
    if not is_missing and not is_warned:
        return "LOST"
    if not is_missing:
        return f"LOST but for a warning at {level}"
    if level != "incomplete":
        return f"{NAMED} at {level}"
    return NAMED if is_warned else f"{NAMED} in the sidecar only"


def _names(texts: Iterable[str]) -> bool:
    return any(name in text for text in texts for name in (ATTRIBUTE, PARTNER))


def wanted(cell: Cell) -> str:
    if not VALUES[cell.value].is_savable:
        return NAMED
    return BY_RANK if cell.time == BY_REPLICA else SAVED


def is_in_slice(cell: Cell) -> bool:
    """Return whether a cell is among those, one in 23, that the default tier plays."""
    owner, value = OWNERS.index(cell.owner), list(VALUES).index(cell.value)
    return (owner + 2 * value + 3 * list(TIMES).index(cell.time)) % 23 == 0


def render(outcomes: dict[Cell, str]) -> str:
    """Return the text of the golden file: a line for each owner and value."""
    lines = [f"# owner / value: {', '.join(TIMES)}"]
    for owner, value in dict.fromkeys((cell.owner, cell.value) for cell in outcomes):
        found = [outcomes[Cell(owner, value, time)] for time in TIMES]
        lines.append(f"{owner} / {value}: {', '.join(found)}")
    return "\n".join(lines) + "\n"


def golden_table() -> str:
    """Return the text of the golden file, as the code makes it; takes a minute."""
    outcomes: dict[Cell, str] = {}
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            for cell in CELLS:
                with tempfile.TemporaryDirectory() as folder:
                    outcomes[cell] = play(cell, Path(folder))
    finally:
        logging.disable(disabled)
    return render(outcomes)


def parse(text: str) -> Iterator[tuple[Cell, str]]:
    for line in text.splitlines()[1:]:
        place, _, found = line.partition(": ")
        owner, value = place.split(" / ")
        for time, outcome in zip(TIMES, found.split(", "), strict=True):
            yield Cell(owner, value, time), outcome
