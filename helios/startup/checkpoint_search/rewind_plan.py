"""Rewinds of a run, and the file ``rewinds.json`` in its folder that holds them.

The file is written before anything is moved, and is kept: a start that finds a rewind in it, and a
newest checkpoint that does not know the rewind, carries it out again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import helios.ledger.lineage as lineage
from helios.checkpoint import file_names, loading
from helios.core.text import with_step
from helios.errors import CheckpointError, LedgerError
from helios.storage import files

FILE_NAME = "rewinds.json"


@dataclass(frozen=True)
class Rewind:
    """A rewind, as each later checkpoint holds it.

    Attributes:
        to: the iteration that ``Trainer(rewind_to=...)`` named.
        skip: the iterations that ``Trainer(skip_batches=...)`` named.
        after: the iteration of the checkpoint that was loaded.
        places: epoch and number of each batch to skip, from 0.
    """

    to: int
    skip: tuple[int, ...]
    after: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rewind:
        """Return the rewind that :meth:`as_plain` has described."""
        places = tuple((epoch, batch) for epoch, batch in plain["places"])
        return cls(plain["to"], tuple(plain["skip"]), plain["after"], places)

    def as_plain(self) -> dict[str, Any]:
        """Return the rewind as plain values."""
        places = [list(place) for place in self.places]
        return {**asdict(self), "skip": list(self.skip), "places": places}

    @property
    def request(self) -> tuple[int, tuple[int, ...]]:
        """The arguments that asked for it: the same ones ask for it only once."""
        return self.to, self.skip

    def __str__(self) -> str:
        """Return it in words."""
        return self.describe()

    def describe(self, step: int | None = None) -> str:
        """Return it in words, with the optimizer steps at the checkpoint that was loaded."""
        noun = "iteration" if len(self.skip) == 1 else "iterations"
        skipped = ", ".join(map(str, self.skip))
        without = f", without the batches of {noun} {skipped}" if skipped else ""
        return f"rewound to iteration {with_step(self.after, step)}{without}"


@dataclass(frozen=True)
class RewindPlan:
    """How a rewind is carried out.

    Attributes:
        rewind: the rewind.
        checkpoint: name of the checkpoint that is loaded.
        digest: its digest; ``None`` if unknown.
        folder: name of the folder that gets later checkpoints and a copy of the ledger.
    """

    rewind: Rewind
    checkpoint: str
    digest: str | None
    folder: str

    def as_event(self) -> dict[str, Any]:
        """Return the details for the lineage."""
        own = {"checkpoint": self.checkpoint, "digest": self.digest, "folder": self.folder}
        return {**self.rewind.as_plain(), **own}


def read_plans(folder: Path) -> list[RewindPlan]:
    """Return the rewinds of a run, the oldest first; none without a file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    path = folder / FILE_NAME
    try:
        entries = json.loads(path.read_text("utf-8")) if path.exists() else []
        return [
            RewindPlan(Rewind.from_plain(each), each["checkpoint"], each["digest"], each["folder"])
            for each in entries
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path}, which holds the rewinds of the run, cannot be read: {error!r}. Put it back. "
            "Without it, a rewind is known from the checkpoints that were saved after it: if "
            "there are any, you may remove the file."
        ) from error


def write_plans(folder: Path, plans: Sequence[RewindPlan]) -> None:
    """Write the rewinds of a run, before they are carried out."""
    text = json.dumps([each.as_event() for each in plans], indent=2)
    files.write_text_durably(folder / FILE_NAME, f"{text}\n")


def join_rewinds(stored: Iterable[Mapping[str, Any]], known: Iterable[Rewind]) -> list[Rewind]:
    """Return the rewinds of a checkpoint, and those that are newer than it."""
    found = [Rewind.from_plain(each) for each in stored]
    return found + [each for each in known if each not in found]


def find_rewinds(folder: Path) -> list[Rewind]:
    """Return all rewinds of a run without loading a checkpoint.

    They are in its file and in the sidecar of its newest checkpoint; without a file, and if the
    sidecar has none, in its lineage.

    Raises:
        CheckpointError: if the file cannot be read.
        LedgerError: if the lineage cannot be read.
    """
    stored: list[Any] = []
    for path in reversed(file_names.list_checkpoints(folder)):
        try:
            sidecar = loading.read_sidecar(path)
        except (CheckpointError, OSError):
            continue
        if sidecar is not None:
            stored = sidecar.rewinds
            break
    found = join_rewinds(stored, [each.rewind for each in read_plans(folder)])
    if found or (folder / FILE_NAME).exists():
        return found
    return [Rewind.from_plain(event) for event in find_events(folder)]


def find_events(folder: Path) -> list[dict[str, Any]]:
    """Return the rewinds in the lineage of a run, without those of earlier runs in its folder.

    Raises:
        LedgerError: if the lineage cannot be read.
    """
    found: list[dict[str, Any]] = []
    for event in lineage.read_lineage(folder):
        if event["event"] in (lineage.START, lineage.BRANCH):
            found = []
        elif event["event"] == lineage.REWIND:
            found.append(event)
    if any(not {"to", "skip", "after", "places"} <= each.keys() for each in found):
        raise LedgerError(f"A rewind in {folder / lineage.FILE_NAME} is damaged. Remove its line.")
    return found
