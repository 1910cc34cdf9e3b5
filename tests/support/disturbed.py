"""Disturbances of a start, drawn by a seed: kills, signals and a full disk, at random places.

A chain of starts is disturbed one after the other, each with other options that change no bit, and
goes on from what the last one has left. What it leaves must be that of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
from pathlib import Path
from typing import Any, TypeVar

import helios
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from tests.support.elastic import Elastic
from tests.support.kills import KillAtFileOperation, kill_self
from tests.support.runs import Setting

Varied = TypeVar("Varied", Setting, Elastic)

KILL, OPERATION, SIGNAL, FULL_DISK = "kill", "file operation", "SIGTERM", "full disk"
KINDS = (KILL, OPERATION, OPERATION, SIGNAL, FULL_DISK)
MOST_STEPS = 4
"""How many steps a start makes before it is killed, if nothing else has ended it."""
EVENTS = (
    "on_training_batch_start",
    "on_forward_end",
    "on_backward_end",
    "on_optimizer_step_end",
    "on_training_batch_end",
    "on_save_checkpoint",
    "on_validation_batch_start",
)


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """What happens to a start.

    Attributes:
        after: from which iteration of this start on.
    """

    kind: str
    event: str
    after: int
    number: int
    rank: int


def draw(chance: random.Random, num_processes: int = 1) -> Disturbance:
    kind = chance.choice(KINDS)
    # Only rank 0 writes.
    rank = 0 if kind in (OPERATION, FULL_DISK) else chance.randrange(num_processes)
    return Disturbance(
        kind, chance.choice(EVENTS), chance.randint(2, 3), chance.randint(1, 40), rank
    )


def draw_store(chance: random.Random) -> helios.CheckpointStore:
    return helios.CheckpointStore(is_async=chance.random() < 0.5)


def vary(setting: Varied, chance: random.Random) -> Varied:
    """Return the same training with other options that change no bit."""
    frequency = chance.choice((1, 1, 2, 3)) if setting.unit == "iteration" else 1
    return dataclasses.replace(
        setting,
        chkpt_frequency=frequency,
        num_workers=chance.choice((0, 0, 0, 2)),
        options={**setting.options, "store": draw_store(chance)},
    )


class Disturb(Plugin):
    """Carries out a disturbance, and kills the process soon after if it did not end it."""

    unsaved = ("num_begun",)

    def __init__(self, disturbance: Disturbance) -> None:
        super().__init__("disturb")
        self.disturbance = disturbance
        self.num_begun = 0
        setattr(self, disturbance.event, self._act)

    def setup(self) -> None:
        self.num_begun = 0
        planned = self.disturbance
        if planned.kind == OPERATION and self.trainer.rank == planned.rank:
            KillAtFileOperation(planned.number, is_after=False).install()

    def on_training_step_start(self, state: TrainingState) -> None:
        self.num_begun += 1
        if self.trainer.rank == self.disturbance.rank and self.num_begun > MOST_STEPS:
            kill_self()

    def _act(self, *args: Any) -> None:
        planned = self.disturbance
        if self.trainer.rank != planned.rank or self.num_begun < planned.after:
            return
        if planned.kind == KILL:
            kill_self()
        elif planned.kind == SIGNAL:
            os.kill(os.getpid(), signal.SIGTERM)
        elif planned.kind == FULL_DISK:
            files.write = _refuse  # type: ignore[assignment]


def _refuse(handle: Any, data: Any) -> int:
    """Write a part, as a disk does that is full after it."""
    handle.write(memoryview(data).cast("B")[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def newest_iteration(folder: Path) -> int:
    """Return the iteration of the newest checkpoint below a folder; 0 without one."""
    places = (int(path.stem.split("_iter_")[1]) for path in folder.glob("*/*.pth"))
    return max(places, default=0)
