"""Which checkpoints are kept: the options of ``Trainer(store=...)``, and pure rules over names.

The rules combine: a checkpoint is kept if any of them keeps it, and without rules all are kept. The
newest one, and the newest with a readable sidecar, are always kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from helios.best import BestRule, BestValidation, Mode, check_mode, rank_by_score
from helios.checkpoint.file_names import find_checkpoints, parse
from helios.checkpoint.loading import try_sidecar
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.status import Status
from helios.errors import ArgumentError, UsageError
from helios.storage.files import as_local_path

_ON_SAVE_ERROR = ("continue", "raise")
_FROZEN = ("save", "reference")


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keep the best checkpoints by a validation score: ``CheckpointStore(keep_best=...)``.

    A validation among the ``count`` best of the run saves a checkpoint at its safe point,
    regardless of ``chkpt_frequency``; without a ``chkpt_frequency`` nothing is saved. A checkpoint
    without its own validation, or with a score that is not finite, is never among the best; of two
    with the same score the earlier one counts as better. If a validation does not compute the
    score, the run ends with a ``UsageError``.

    Attributes:
        count: how many to keep.
        metric: name of the score in the model's ``val_scores``.
        mode: ``"min"`` if small scores are good, ``"max"`` if large ones are; required.

    Raises:
        ArgumentError: if a value is out of range.
    """

    count: int
    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        if not _is_count(self.count):
            raise _fail("KeepBest", "count", "a positive int", self.count, "Pass e.g. 3.")
        if not isinstance(self.metric, str) or not self.metric:
            remedy = "Pass a name that valid_step returns."
            raise _fail("KeepBest", "metric", "the name of a score", self.metric, remedy)
        check_mode(self.mode, "KeepBest")

    @property
    def rule(self) -> BestRule:
        """The rule that decides which validations are the best."""
        return BestRule(self.metric, self.mode, self.count, saves=True)

    def check_scores(self, scores: Mapping[str, float]) -> None:
        """Check that a validation has computed the score.

        Args:
            scores: those that are single numbers, by name.

        Raises:
            UsageError: if the score is not among them.
        """
        if self.metric not in scores:
            names = ", ".join(sorted(scores)) or "none"
            raise UsageError(
                f"KeepBest(metric={self.metric!r}) must name a validation score that is a single "
                f"number. The scores are: {names}. Fix the name, or log the score in valid_step: "
                "self.log(name, value)."
            )


@dataclasses.dataclass(frozen=True)
class CheckpointStore:
    """Options for writing and keeping checkpoints: ``Trainer(store=CheckpointStore(...))``.

    Attributes:
        is_async: write in a thread, from a copy of the state, while training continues; if False,
            training waits until the file is on the disk.
        keep_last: number of newest checkpoints to keep; ``None`` for no such rule.
        keep_every: keep checkpoints whose number of completed units (epochs or steps, by
            ``train_unit``) is a multiple of this; ``None`` for no such rule.
        keep_best: keep the best ones by a validation score; ``None`` for no such rule.
        digest: verify the bytes of a checkpoint with SHA-256 when it is loaded.
        on_save_error: what to do if a save fails: ``"continue"`` keeps training, tries again at
            the next due save, and raises at the end if no later save succeeded; ``"raise"`` ends
            the run at the next safe point.
        max_plain_bytes: maximum number of bytes of plain values (numbers, lists, arrays and tensors
            outside modules) in a checkpoint; values beyond that are reported, and the checkpoint is
            incomplete.
        frozen: ``"reference"`` leaves weights that are frozen and unchanged since ``setup`` out of
            checkpoints, and stores their digest: each start must make the same, which is checked.

    Raises:
        ArgumentError: if a value is out of range.
    """

    is_async: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    digest: bool = True
    on_save_error: str = "continue"
    max_plain_bytes: int = 64 * 2**20
    frozen: str = "save"

    def __post_init__(self) -> None:
        name = "CheckpointStore"
        for flag in ("is_async", "digest"):
            value = getattr(self, flag)
            if not isinstance(value, bool):
                raise _fail(name, flag, "True or False", value, "Pass a bool.")
        for rule in ("keep_last", "keep_every"):
            value = getattr(self, rule)
            if value is not None and not _is_count(value):
                remedy = "None disables the rule; without any rule all checkpoints are kept."
                raise _fail(name, rule, "None or a positive int", value, remedy)
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            remedy = 'Pass e.g. KeepBest(3, "accuracy", "max").'
            raise _fail(name, "keep_best", "None or a KeepBest", self.keep_best, remedy)
        if self.on_save_error not in _ON_SAVE_ERROR:
            remedy = "Omit it to continue training."
            raise _fail(name, "on_save_error", '"continue" or "raise"', self.on_save_error, remedy)
        if self.frozen not in _FROZEN:
            remedy = "Omit it to save everything."
            raise _fail(name, "frozen", '"save" or "reference"', self.frozen, remedy)
        if type(self.max_plain_bytes) is not int or self.max_plain_bytes < 0:
            remedy = "Pass e.g. 256 * 2**20; 0 saves no plain values."
            value = self.max_plain_bytes
            raise _fail(name, "max_plain_bytes", "a non-negative int", value, remedy)

    @property
    def keeps_all(self) -> bool:
        """Whether there is no retention rule."""
        return self.keep_last is None and not needs_sidecars(self)


def needs_sidecars(options: CheckpointStore) -> bool:
    """Return whether the rules need more than the names of the files."""
    return options.keep_every is not None or options.keep_best is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _fail(owner: str, name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"{owner}({name}=...) must be {rule}, got {value!r}. {remedy}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A committed checkpoint; entries are ordered by (epoch, iteration).

    Attributes:
        path: the ``.pth`` file or ``.ckpt`` folder.
        sidecar: its sidecar; ``None`` if it was not read, or cannot be.
    """

    path: Path
    sidecar: Sidecar | None = None

    @cached_property
    def place(self) -> tuple[int, int]:
        """(epoch, iteration) in its name."""
        return parse(self.path) or (0, 0)

    @property
    def is_known(self) -> bool:
        """Whether its sidecar was read, and says which run wrote it."""
        return self.sidecar is not None and self.sidecar.names_run

    @property
    def metrics(self) -> dict[str, float]:
        """The validation scores in its sidecar."""
        return {} if self.sidecar is None else self.sidecar.metrics

    @property
    def best(self) -> BestValidation | None:
        """The best validation of the run so far; ``None`` if unknown."""
        return None if self.sidecar is None else self.sidecar.best

    def __lt__(self, other: Entry) -> bool:
        return (self.place, self.path) < (other.place, other.path)


def plan(
    entries: Sequence[Entry], options: CheckpointStore, protected: Collection[Path] = ()
) -> list[Entry]:
    """Return the checkpoints to delete, oldest first.

    With ``keep_every`` or ``keep_best``, a checkpoint without a readable sidecar is kept too.
    ``keep_last`` alone needs only the names.

    Args:
        entries: the checkpoints, in any order; with their sidecars if ``keep_every`` or
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


def _is_multiple(entry: Entry, number: int) -> bool:
    count = None if entry.sidecar is None else entry.sidecar.count
    return count is not None and count > 0 and count % number == 0


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
    return best is not None and best.iteration == entry.place[1] and rule.is_alike(best)


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
        return not self.entries or self.entries[0].place[1] != self.best.iteration


def rank_checkpoints(entries: Iterable[Entry], rule: BestRule | None = None) -> Ranking:
    """Return the checkpoints of a run by their scores.

    Args:
        entries: those of one run, with their sidecars.
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
        (Entry(status.path, status.sidecar), status.sidecar.run_name)
        for status in files
        if status.is_good and status.place is not None and status.sidecar is not None
    ]
    _, newest = max(entries, default=(None, ""))
    return rank_checkpoints(entry for entry, name in entries if name == newest)


def with_sidecar(path: Path) -> Entry:
    """Return a checkpoint with its sidecar; without it if that cannot be read."""
    return Entry(path, try_sidecar(path))


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
    entries = map(with_sidecar, found)
    return rank_checkpoints(entries, None if rule is None else rule.rule).path
