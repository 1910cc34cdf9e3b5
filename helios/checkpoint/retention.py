"""Decides which checkpoints to delete: pure rules over names and sidecars.

The rules of ``CheckpointStore`` combine: a checkpoint is kept if any of them keeps it. The newest
one, and the newest with a readable sidecar, are always kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from helios.best import BestRule, BestValidation, rank_by_score
from helios.checkpoint.file_names import find_checkpoints, parse, sidecar_path
from helios.checkpoint.loading import read_sidecar
from helios.checkpoint.options import CheckpointStore, KeepBest
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.status import Status
from helios.errors import CheckpointError
from helios.storage.files import as_local_path


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
    """A committed checkpoint; entries are ordered by (epoch, iteration).

    Attributes:
        epoch: the epoch in its name.
        iteration: the iteration in its name.
        path: the ``.pth`` file or ``.ckpt`` folder.
        count: the completed units of the run, according to its sidecar; ``None`` inside an epoch of
            a run that counts epochs, and if unknown.
        metrics: the validation scores in its sidecar.
        best: the best validation of the run so far, according to its sidecar; ``None`` if unknown.
        is_known: whether its sidecar was read and holds everything that the rules need.
    """

    epoch: int
    iteration: int
    path: Path
    count: int | None = dataclasses.field(default=None, compare=False)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    best: BestValidation | None = dataclasses.field(default=None, compare=False)
    is_known: bool = dataclasses.field(default=False, compare=False)

    @property
    def sidecar_path(self) -> Path:
        """The path of the sidecar, if there is one."""
        return sidecar_path(self.path)


def plan(
    entries: Sequence[Entry], options: CheckpointStore, protected: Collection[Path] = ()
) -> list[Entry]:
    """Return the checkpoints to delete, oldest first.

    With ``keep_every`` or ``keep_best``, a checkpoint without a readable sidecar is kept too.
    ``keep_last`` alone needs only the names.

    Args:
        entries: the checkpoints, in any order; completed from the sidecars if ``keep_every`` or
            ``keep_best`` is set.
        options: the rules; without any, everything is kept.
        protected: files to keep whatever the rules say, such as the one resumed from.
    """
    if options.keeps_all:
        return []
    ranked = sorted(entries)
    known = [entry for entry in ranked if entry.is_known]
    # A newer one that is not known may be damaged, so the last good one is kept too.
    kept = {entry.path for entry in known[-1:]} | set(protected)
    if options.keep_last is not None:
        kept |= {entry.path for entry in ranked[-options.keep_last :]}
    if options.keep_every is not None:
        kept |= {entry.path for entry in ranked if _is_multiple(entry, options.keep_every)}
    if options.keep_best is not None:
        kept |= {entry.path for entry in find_best(ranked, options.keep_best.rule)}
    if needs_sidecars(options):
        kept |= {entry.path for entry in ranked if not entry.is_known}
    return [entry for entry in ranked if entry.path not in kept]


def needs_sidecars(options: CheckpointStore) -> bool:
    """Return whether the rules need more than the names of the files."""
    return options.keep_every is not None or options.keep_best is not None


def _is_multiple(entry: Entry, number: int) -> bool:
    return entry.count is not None and entry.count > 0 and entry.count % number == 0


def find_best(ranked: Sequence[Entry], rule: BestRule) -> list[Entry]:
    """Return the best entries, the best first; of equal ones the earlier counts as better.

    Where the model decides, these are the ones whose own validation was the best when they were
    saved, the newest first.

    Args:
        ranked: entries with their scores, oldest first.
        rule: which score counts, and how many to return.
    """
    if rule.metric is None or rule.mode is None:
        best = [each for each in reversed(ranked) if _was_best(each, rule)]
    else:
        scored = [(entry.metrics.get(rule.metric, math.nan), entry) for entry in ranked]
        best = rank_by_score(scored, rule.mode)
    return best[: rule.count]


def _was_best(entry: Entry, rule: BestRule) -> bool:
    best = entry.best
    return best is not None and best.iteration == entry.iteration and rule.is_alike(best)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The checkpoints of a run by their scores.

    The best validation and the best checkpoint are two facts: the best validation may have none.

    Attributes:
        rule: what decides; ``None`` if nothing does.
        entries: the checkpoints that it can compare, the best one first.
        best: the best validation of the run, as its newest checkpoint says; ``None`` if unknown.
    """

    rule: BestRule | None
    entries: list[Entry]
    best: BestValidation | None

    @property
    def path(self) -> Path | None:
        """The best checkpoint; ``None`` if there is none."""
        return self.entries[0].path if self.entries else None

    @property
    def lacks_best(self) -> bool:
        """Whether the best validation is known to have no checkpoint here."""
        if self.best is None:
            return False
        return not self.entries or self.entries[0].iteration != self.best.iteration


def rank_checkpoints(entries: Iterable[Entry], rule: BestRule | None = None) -> Ranking:
    """Return the checkpoints of a run by their scores.

    Args:
        entries: those of one run, completed from their sidecars.
        rule: what decides; ``None`` for what the run was trained with, as its newest one says.
    """
    ranked = sorted(entries)
    best = next((each.best for each in reversed(ranked) if each.is_known), None)
    if rule is None and best is not None:
        rule = best.rule
    if rule is None:
        return Ranking(None, [], None)
    if best is not None and not rule.is_alike(best):
        best = None
    scored = find_best(ranked, dataclasses.replace(rule, count=max(1, len(ranked))))
    return Ranking(rule, scored, best)


def rank_files(files: Iterable[Status]) -> Ranking:
    """Return the good checkpoints among examined files by their scores.

    If the folder has files of several runs, those of the run that is newest.
    """
    entries = [
        (fill_in(Entry(*status.place, status.path), status.sidecar), status.sidecar.run_name)
        for status in files
        if status.is_good and status.place is not None and status.sidecar is not None
    ]
    _, newest = max(entries, default=(None, ""))
    return rank_checkpoints(entry for entry, name in entries if name == newest)


class Retention:
    """The rules of one run, and the sidecars that were read so far.

    Args:
        options: the rules.
    """

    def __init__(self, options: CheckpointStore) -> None:
        self._options = options
        # A run saves often, and its sidecars do not change: each is read once.
        self._known: dict[Path, Entry] = {}

    def plan(self, entries: Sequence[Entry], protected: Collection[Path] = ()) -> list[Entry]:
        """Return the checkpoints to delete; see :func:`plan`.

        If a sidecar is missing or unreadable, its checkpoint is kept.

        Args:
            entries: the checkpoints, in any order, according to their names.
            protected: files to keep whatever the rules say.
        """
        if needs_sidecars(self._options):
            entries = [self._known.get(entry.path) or with_sidecar(entry) for entry in entries]
            self._known = {entry.path: entry for entry in entries if entry.is_known}
        return plan(entries, self._options, protected)


def with_sidecar(entry: Entry) -> Entry:
    """Return an entry completed from its sidecar; unchanged if that cannot be read.

    The number of completed units stays unknown where the sidecar does not name the run.
    """
    try:
        sidecar = read_sidecar(entry.path)
    except (CheckpointError, OSError):
        return entry
    return entry if sidecar is None else fill_in(entry, sidecar)


def fill_in(entry: Entry, sidecar: Sidecar) -> Entry:
    """Return an entry completed from its sidecar."""
    return dataclasses.replace(
        entry,
        count=sidecar.count,
        metrics=sidecar.metrics,
        best=BestValidation.from_plain(sidecar.best),
        is_known=sidecar.names_run,
    )


def find_best_checkpoint(root: Path | None, rule: KeepBest | None = None) -> Path | None:
    """Return the best checkpoint directly in a folder, as its validation scores say.

    Args:
        root: the folder that holds the files, ``chkpt_root/<save_name>``; it need not exist.
        rule: the score that decides; its ``count`` has no effect. Omit it for what the run itself
            was trained with.

    Returns:
        The file or folder, which is not that of the best validation if that one has none; of equal
        ones the earliest; ``None`` if there is no score, or nothing decides.
    """
    if root is not None:
        root = as_local_path("find_best_checkpoint(root=...)", root)
    found = [] if root is None else find_checkpoints(root)
    entries = [with_sidecar(Entry(*(parse(path) or (0, 0)), path)) for path in found]
    return rank_checkpoints(entries, None if rule is None else rule.rule).path
