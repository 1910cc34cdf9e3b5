"""Goes back to an older checkpoint on purpose: ``Trainer(rewind_to=..., skip_batches=...)``.

A rewind is decided and checked first, when nothing has changed yet. :func:`rewind_folder` writes it
to ``rewinds.json`` before it moves anything, and the file is kept: a start that finds a rewind in
it, and a newest checkpoint that does not know the rewind, carries it out again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import helios.ledger.book as book
import helios.ledger.lineage as lineage
from helios.checkpoint import file_names, loading
from helios.checkpoint.store import Loaded, RunFolder
from helios.data.source import Source
from helios.errors import ArgumentError, CheckpointError, LedgerError, RunMismatchError
from helios.ledger.book import read_lines
from helios.startup.run_identity import ORDERING
from helios.startup.trainer_options import Options, refusal
from helios.state import Cursor
from helios.storage import files
from helios.text import with_step

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


_LOGGER = logging.getLogger(__name__)


class Course(NamedTuple):
    """Where a run continues.

    Attributes:
        loaded: the checkpoint.
        rewinds: all rewinds of the run, also the one to carry out.
        plans: what is to be carried out before training continues.
    """

    loaded: Loaded
    rewinds: list[Rewind]
    plans: list[RewindPlan]


def find_course(
    folder: RunFolder, newest: Loaded, options: Options, safe_types: list[Any]
) -> Course:
    """Find out whether the run is rewound, and to which checkpoint; no file is changed.

    Args:
        folder: the run's folder.
        newest: its newest checkpoint.
        options: what the user asks for.
        safe_types: types that may be built.

    Raises:
        ArgumentError: for iterations that the run has not reached, or that the ledger lacks.
        LedgerError: if the ledger does not match the checkpoint.
        CheckpointError: if there is no checkpoint to go back to, or an earlier rewind is not
            complete.
    """
    known = read_plans(folder.path)
    rewinds = join_rewinds(newest.record.rewinds, [each.rewind for each in known])
    stored = [Rewind.from_plain(each) for each in newest.record.rewinds]
    plans = [each for each in known if each.rewind not in stored]
    is_asked = options.rewind_to is not None
    if is_asked and not any(each.request == _request(options) for each in rewinds):
        _require_complete(plans, folder.path)
        loaded, plan = _make_plan(folder, newest, options, safe_types, rewinds)
        return Course(loaded, [*rewinds, plan.rewind], [plan])
    if not plans:
        return Course(newest, rewinds, [])
    oldest = min(each.rewind.after for each in plans)
    return Course(_load(folder, oldest, safe_types), rewinds, plans)


def _request(options: Options) -> tuple[int | None, tuple[int, ...]]:
    return options.rewind_to, options.skip_batches


def _require_complete(plans: Sequence[RewindPlan], folder: Path) -> None:
    if plans:
        to, skip = plans[-1].rewind.request
        raise CheckpointError(
            f"The run cannot be rewound again before it has saved a checkpoint: the rewind with "
            f"rewind_to={to}, skip_batches={skip} has begun. Start the run without rewind_to "
            "until it has saved one. Or undo that rewind: move the files in "
            f"{folder / plans[-1].folder} back to {folder}, and remove its entry from "
            f"{FILE_NAME} there."
        )


def _load(folder: RunFolder, most: int, safe_types: list[Any]) -> Loaded:
    """Load the newest undamaged checkpoint at or before an iteration."""
    present = file_names.list_checkpoints(folder.path)
    listed = [path for path in present if file_names.iteration_of(path) <= most]
    damaged = folder.damaged
    loaded = folder.load_newest(safe_types, listed=listed) if listed else None
    folder.damaged = list(dict.fromkeys(damaged + folder.damaged))
    if loaded is None:
        first = min(present, key=file_names.iteration_of, default=None)
        oldest = 0 if first is None else file_names.iteration_of(first)
        place = with_step(oldest, None if first is None else loading.read_step(first))
        raise CheckpointError(
            f"A rewind to iteration {most} needs a checkpoint at or before it, but in "
            f"{folder.path} the oldest one is of iteration {place}. Pass rewind_to={oldest} or "
            'higher, or resume="never" to start a new run.'
        )
    return loaded


def _make_plan(
    folder: RunFolder,
    newest: Loaded,
    options: Options,
    safe_types: list[Any],
    rewinds: Sequence[Rewind],
) -> tuple[Loaded, RewindPlan]:
    to, skip = options.rewind_to, options.skip_batches
    last, place = newest.record.place[1], with_step(*newest.record.counters)
    assert to is not None
    if to > last:
        rule = f"at most {place}, the newest checkpoint in {folder.path}"
        raise refusal("rewind_to", rule, to, "Lower it: there is nothing to rewind.")
    loaded = _load(folder, to, safe_types)
    after = loaded.record.place[1]
    if after == last and not skip:
        rule = f"below {place}, the newest checkpoint, without skip_batches"
        raise refusal("rewind_to", rule, to, "Omit it to continue from there.")
    places = _find_places(folder.path, loaded, newest, skip, rewinds) if skip else ()
    digest = None if loaded.sidecar is None else loaded.sidecar.digest or None
    target = _free_name(folder.path)
    return loaded, RewindPlan(Rewind(to, skip, after, places), loaded.path.name, digest, target)


def _free_name(folder: Path) -> str:
    name = first = f"before-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{first}-{number}"
    return name


def _find_places(
    folder: Path,
    loaded: Loaded,
    newest: Loaded,
    skip: Sequence[int],
    rewinds: Sequence[Rewind],
) -> tuple[tuple[int, int], ...]:
    """Return epoch and number of the batches of iterations, found in the ledger."""
    path, record = folder / book.FILE_NAME, loaded.record
    before, now = record.options, newest.record.options
    changed = [name for name in ORDERING if before.get(name) != now.get(name)]
    if changed:
        raise ArgumentError(
            f"Trainer(skip_batches=...) must be empty if {', '.join(changed)} was changed between "
            f"{loaded.path.name} and {newest.path.name}: the batches after the rewind would be "
            f"others than those in the ledger. Pass a rewind_to after that change."
        )
    if record.ledger is None:
        raise LedgerError(
            f"Trainer(skip_batches=...) must be empty, because {loaded.path.name} was saved "
            "without a ledger, which would say which batches these iterations had. Omit it, or "
            "pass another rewind_to."
        )
    after = record.place[1]
    known = {place for each in rewinds for place in each.places}
    found, last, wanted = [], after, set(skip)
    cursor = Cursor(**record.cursor)
    for epoch in _read_epochs(path, record.ledger, after=after, stop=max(skip)):
        last += 1
        if epoch > cursor.epoch:
            cursor.next_epoch()
            cursor.epoch = epoch
        while (cursor.epoch, cursor.batch) in known:
            cursor.batch += 1
        if last in wanted:
            found.append((cursor.epoch, cursor.batch))
        cursor.batch += 1
    if max(skip) == last + 1:
        # An iteration that ended with an error has no line. Its batch may be in the next epoch,
        # whose first one `settle` finds, because here the length of an epoch is unknown.
        while (cursor.epoch, cursor.batch) in known:
            cursor.batch += 1
        found.append((cursor.epoch, cursor.batch))
    if len(found) < len(skip):
        rule = f"iterations from {after + 1}, after {loaded.path.name}, to {last + 1}"
        rule += f", the one after the last in {path}"
        raise refusal("skip_batches", rule, skip, "Correct them, or rewind_to.")
    return tuple(found)


def _read_epochs(path: Path, mark: dict[str, Any], *, after: int, stop: int) -> Iterable[int]:
    """Yield the epoch, from 0, of each iteration between a checkpoint and ``stop``."""
    for line in read_lines(path, mark):
        if after >= stop or b',"end":1' in line or not line.endswith(b"\n"):
            return
        after += 1
        try:
            epoch, iteration, _ = json.loads(line)["at"]
        except (ValueError, LookupError, TypeError) as error:
            raise LedgerError(f"{path} is damaged after iteration {after - 1}.") from error
        if iteration != after:
            raise LedgerError(f"{path} lacks iteration {after}, so skip_batches is not known.")
        yield epoch - 1


def rewind_folder(folder: RunFolder, plans: Sequence[RewindPlan]) -> None:
    """Write plans down, and move what is newer than their checkpoints aside; may be repeated.

    Raises:
        OSError: if the disk fails; the next start completes it.
    """
    known = read_plans(folder.path)
    added = [each for each in plans if each not in known]
    if added:
        write_plans(folder.path, known + added)
    for plan in plans:
        _move_later(folder, plan)


def _move_later(folder: RunFolder, plan: RewindPlan) -> None:
    step = loading.read_step(folder.path / plan.checkpoint)
    target, ledger = folder.path / plan.folder, folder.path / book.FILE_NAME
    files.make_folder(target)
    if ledger.exists() and not (target / book.FILE_NAME).exists():
        files.copy_durably(ledger, target / book.FILE_NAME)
    later = [each for each in folder.entries() if each.iteration > plan.rewind.after]
    for entry in later:
        # The sidecar first: on its own, the next start would take it for the rest of a killed save.
        for path in (entry.sidecar_path, entry.path):
            if path.exists():
                files.replace(path, target / path.name)
    files.fsync_folder(target)
    files.fsync_folder(folder.path)
    _LOGGER.warning(
        "The run is %s. Moved %d later checkpoints and a copy of the ledger to %s.",
        plan.rewind.describe(step),
        len(later),
        target,
    )


def settle(
    rewinds: Sequence[Rewind], plans: Sequence[RewindPlan], source: Source
) -> tuple[list[Rewind], list[RewindPlan]]:
    """Return rewinds and plans with places that exist: after the end of an epoch is the next one.

    Rewinds that were carried out stay as they are: the data may have another length now.

    Args:
        rewinds: all rewinds of the run.
        plans: how some of them are carried out.
        source: the training data.
    """
    number = source.num_batches()
    settled = {rewind: rewind for rewind in rewinds}
    for plan in plans:
        rewind = plan.rewind
        taken = {place for each in rewinds if each != rewind for place in each.places}
        places = tuple(_find_existing(place, number, taken) for place in rewind.places)
        settled[rewind] = replace(rewind, places=places)
    return list(settled.values()), [replace(p, rewind=settled[p.rewind]) for p in plans]


def _find_existing(
    place: tuple[int, int], number: int | None, taken: set[tuple[int, int]]
) -> tuple[int, int]:
    if number is None or place[1] < number:
        return place
    following = ((place[0] + 1, batch) for batch in range(number))
    return next((each for each in following if each not in taken), place)


def apply_rewinds(rewinds: Sequence[Rewind], source: Source) -> None:
    """Let the training data skip batches.

    Raises:
        ArgumentError: if it cannot, or if nothing would be left of an epoch.
    """
    places = sorted({place for each in rewinds for place in each.places})
    if not places:
        return
    source.skip(places)
    for epoch in sorted({epoch for epoch, _ in places}):
        total, _ = source.measure(epoch, batch=0, sample=0)
        if total == 0:
            raise ArgumentError(
                f"Trainer(skip_batches=...) must leave at least one batch of each epoch, but names "
                f"all of epoch {epoch + 1}. Skip fewer."
            )


def check_order(rewinds: Sequence[Rewind], changes: Sequence[str], cursor: Cursor) -> None:
    """Refuse another order of the data while batches to skip are ahead.

    Args:
        rewinds: those of the run.
        changes: what was allowed to change, as ``name: old -> new``.
        cursor: where the run continues.

    Raises:
        RunMismatchError: if the places of these batches would mean other ones.
    """
    names = [name for text in changes if (name := text.partition(":")[0]) in ORDERING]
    if names and any(epoch >= cursor.epoch for each in rewinds for epoch, _ in each.places):
        raise RunMismatchError(
            f"{', '.join(names)} must not change in an epoch with skipped batches, or before it, "
            "because other batches would be skipped. Undo the change until the end of that epoch."
        )
