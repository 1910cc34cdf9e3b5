"""The search for a checkpoint: which one is asked for, and how all processes load the same one.

A training may be writing to the folder, and deletes old checkpoints. A file that disappears while
it is loaded, in one process or between two, is not an error: a newer one was committed before, and
is searched for then.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

from helios.best import BestRule
from helios.checkpoint import file_names, loading
from helios.checkpoint.retention import Ranking, rank_checkpoints, with_sidecar
from helios.checkpoint.store import CheckpointStore, Loaded, RunFolder, find_damaged
from helios.core.sharded_tensors import RowShare
from helios.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DamagedCheckpointError,
    RunMismatchError,
)
from helios.plugins.plugin import Plugin
from helios.replicas.on_all_ranks import on_each, on_first
from helios.replicas.replicas import Replicas
from helios.start.best_score import find_declared_rule, require_one_mode
from helios.start.options import Options
from helios.storage.local_paths import as_local_path
from helios.text import number_text

Choice: TypeAlias = Literal["auto", "best", "newest"] | str | Path | None
"""``"auto"``, ``"best"``, ``"newest"``, a file, or ``None`` for none."""


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint an evaluation loads.

    Attributes:
        path: this file; ``None`` for one in the run's folder.
        is_none: whether none is loaded.
        is_best: whether it is the best one, or else the newest.
        rule: what decides which one is the best; ``None`` for what the run was trained with.
        is_required: whether it is an error if there is none.
    """

    path: Path | None = None
    is_none: bool = False
    is_best: bool = False
    rule: BestRule | None = None
    is_required: bool = False


def choose_checkpoint(
    asked: Choice,
    options: Options,
    plugins: Iterable[Plugin],
    *,
    has_fitted: bool,
    may_lack: bool,
) -> CheckpointChoice:
    """Return what the argument means.

    Args:
        asked: the argument.
        options: where checkpoints are, and how they are kept.
        plugins: those of the trainer.
        has_fitted: whether the trainer has trained: its newest checkpoint comes from
            ``resume=<path>`` then, otherwise that file itself is meant.
        may_lack: whether the model has weights without a checkpoint.

    Raises:
        ArgumentTypeError: if it is neither a string nor a path.
        ArgumentError: for a URL, if there is no folder to look in, or for two modes of one score.
    """
    if asked is None:
        return CheckpointChoice(is_none=True)
    if asked == "auto" and not has_fitted and options.resume_path is not None:
        asked = options.resume_path
    if asked == "auto":
        return CheckpointChoice(is_required=not may_lack)
    if not isinstance(asked, str | Path):
        raise ArgumentTypeError(
            'Trainer.test(checkpoint=...) must be "best", "newest", a file or None, got '
            f"{asked!r}. Omit it for the newest one."
        )
    if asked not in ("best", "newest"):
        path = as_local_path("Trainer.test(checkpoint=...)", asked)
        return CheckpointChoice(path, is_required=True)
    if options.chkpt_root is None:
        raise ArgumentError(
            f"Trainer.test(checkpoint={asked!r}) must be used with a folder of checkpoints, got "
            "none. Pass Trainer(chkpt_root=...), or the path of a file."
        )
    if asked == "newest":
        return CheckpointChoice(is_required=True)
    plugins = list(plugins)
    require_one_mode(options, plugins)
    rule = find_declared_rule(options, plugins)
    return CheckpointChoice(is_best=True, rule=rule, is_required=True)


SHARING = (
    "All processes must see the folder chkpt_root: put it on a file system that the machines "
    "share, under the same path."
)
"""Remedy if a process does not see what another one has written."""

Facts = TypeVar("Facts")


def open_folder(options: Options, save_name: str) -> RunFolder | None:
    """Return the folder of a run, or ``None`` without ``chkpt_root``.

    Raises:
        ArgumentError: if there is a file with its name.
    """
    if options.chkpt_root is None:
        return None
    path = options.chkpt_root / save_name
    if path.exists() and not path.is_dir():
        raise ArgumentError(
            f"The run's folder, chkpt_root/<save_name>, must be a folder, got the file {path}. "
            "Move the file away, or give the model another save_name."
        )
    return RunFolder(path, options.store or CheckpointStore())


class Search(ABC, Generic[Facts]):
    """The search for one checkpoint: rank 0 looks for it, and all processes load the same file.

    What rank 0 looks for is the rule of the class. All processes run the search at the same time.

    Args:
        safe_types: types that may be built.
        team: the processes.
        share: what this process reads of sharded tensors; ``None`` for everything.
    """

    _verb = "resumes from"
    _remedy = SHARING

    def __init__(
        self, safe_types: list[Any], team: Replicas, share: RowShare | None = None
    ) -> None:
        self._types = safe_types
        self._team = team
        self._share = share
        self._found: Loaded | None = None

    def run(self) -> tuple[Loaded | None, Facts]:
        """Search until all processes have loaded the same checkpoint.

        Returns:
            The checkpoint, ``None`` if there is none; and what rank 0 knows of it.

        Raises:
            CheckpointError: in all processes, if one does not see what rank 0 has found.
        """
        attempts = self._attempts()
        while True:
            next(attempts)
            self._found = None
            name, facts = on_first(self._team, self._choose)
            if name is None or self._is_loaded_by_all(self._path(name, facts), facts):
                return self._found, facts

    def _attempts(self) -> Iterator[Any]:
        """Yield before each attempt; by default without end."""
        return itertools.repeat(None)

    @abstractmethod
    def _choose(self) -> tuple[str | None, Facts]:
        """Load the checkpoint on rank 0; returns its name if there is one, and small facts."""

    @abstractmethod
    def _path(self, name: str, facts: Facts) -> Path:
        """Return the path of what rank 0 has found, as this process sees it."""

    def _pass_over(self, path: Path, facts: Facts, damage: str) -> None:
        """Go on, on rank 0, where another process has found damage; by default, that is an error.

        Raises:
            DamagedCheckpointError: if no other checkpoint will do.
        """
        raise DamagedCheckpointError(damage)

    def _load(self, path: Path) -> Loaded:
        return loading.load_present(path, self._types, maps=True, share=self._share)

    def _is_loaded_by_all(self, path: Path, facts: Facts) -> bool:
        """Load it in all processes; returns whether they have it."""
        reports = on_each(self._team, lambda: self._try(path))
        damage = next((text for text in reports if text), "")
        if damage:
            on_first(self._team, lambda: self._pass_over(path, facts, damage))
            return False
        if None not in reports:
            return True
        if on_first(self._team, lambda: file_names.is_gone(path)):
            return False
        # Rank 0 still sees it: the folder is not shared.
        on_each(self._team, lambda: self._insist(path))
        return True

    def _try(self, path: Path) -> str | None:
        """Load what rank 0 has found; returns what is damaged of it, ``None`` if it is gone."""
        if self._team.rank == 0:
            return ""
        try:
            self._found = self._load(path)
        except FileNotFoundError:
            return None
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _insist(self, path: Path) -> None:
        if self._team.rank == 0:
            return
        if not file_names.is_present(path):
            raise CheckpointError(
                f"Rank 0 of {self._team.num_processes} {self._verb} {path}, but rank "
                f"{self._team.rank} finds no such file. {self._remedy}"
            )
        self._found = loading.load(path, self._types, maps=True, share=self._share)


@final
class GivenCheckpoint(Search[list[str]]):
    """A file that was named; each process has its own name of it.

    Args:
        path: the file.
        rest: as in :class:`Search`.
    """

    _verb = "loads"
    _remedy = "All processes must see the file that is named: copy it to each machine."

    def __init__(self, path: Path, *rest: Any) -> None:
        super().__init__(*rest)
        self._given = path

    def _choose(self) -> tuple[str | None, list[str]]:
        self._found = loading.load(self._given, self._types, maps=True, share=self._share)
        return self._given.name, []

    def _path(self, name: str, facts: list[str]) -> Path:
        return self._given


class NewestCheckpoint(Search[list[str]]):
    """The newest undamaged checkpoint of a folder in which a run may be training; no file changes.

    Args:
        folder: the folder.
        rest: as in :class:`Search`.
    """

    def __init__(self, folder: RunFolder, *rest: Any) -> None:
        super().__init__(*rest)
        self._folder = folder
        folder.share = self._share

    def _attempts(self) -> Iterator[Any]:
        return file_names.listings(self._folder.path)

    def _choose(self) -> tuple[str | None, list[str]]:
        self._found = self._folder.load_newest(self._types, renames_damaged=False)
        return (None if self._found is None else self._found.path.name), []

    def _path(self, name: str, facts: list[str]) -> Path:
        return self._folder.path / name

    def _pass_over(self, path: Path, facts: list[str], damage: str) -> None:
        self._folder.pass_over(path, damage, renames=False)


@final
class BestCheckpoint(NewestCheckpoint):
    """The best checkpoint of a folder, with the reasons why it is; a damaged one is an error.

    Args:
        folder: the folder.
        rule: what decides; ``None`` for what the run was trained with.
        run_name: name of the run.
        rest: as in :class:`Search`.
    """

    def __init__(self, folder: RunFolder, rule: BestRule | None, run_name: str, *rest: Any) -> None:
        super().__init__(folder, *rest)
        self._rule = rule
        self._run_name = run_name

    def _choose(self) -> tuple[str | None, list[str]]:
        for _ in file_names.listings(self._folder.path):
            ranking = _rank(self._folder, self._rule, self._run_name)
            path = ranking.entries[0].path
            try:
                self._found = self._load(path)
            except FileNotFoundError:
                continue
            _warn_of_better(ranking)
            return path.name, _explain(ranking)
        return None, []

    def _pass_over(self, path: Path, facts: list[str], damage: str) -> None:
        raise DamagedCheckpointError(damage)


_LOGGER = logging.getLogger(__name__)

_MAX_NAMES = 8


def require_present(
    choice: CheckpointChoice, options: Options, save_name: str, run_name: str
) -> None:
    """Check that a checkpoint fits the choice, without loading it.

    Raises:
        CheckpointError: if there is none; it names those there are.
        ArgumentError: if nothing decides which one is the best.
    """
    folder = open_folder(options, save_name)
    if choice.path is not None:
        if not file_names.is_present(choice.path):
            raise CheckpointError(
                'Trainer.test(checkpoint=...) must be "best", "newest" or a checkpoint file, but '
                f"there is no file at {choice.path}. {_describe(folder)}".rstrip()
            )
    elif choice.is_required and folder is None:
        raise CheckpointError(
            "There is no checkpoint to evaluate: chkpt_root is not set, and this trainer has not "
            "trained this model. Use the trainer whose fit has trained it, or pass "
            f"Trainer(chkpt_root=...) or the file. {_UNTRAINED}"
        )
    elif choice.is_required and folder is not None:
        if not file_names.find_checkpoints(folder.path) and not find_damaged(folder.path):
            raise CheckpointError(
                f"There is no checkpoint to evaluate: {folder.path} holds no checkpoint. "
                f"{_list_runs(folder.path)} {_UNTRAINED}"
            )
        if choice.is_best:
            _rank(folder, choice.rule, run_name)


def find_chosen(
    choice: CheckpointChoice,
    options: Options,
    save_name: str,
    safe_types: list[Any],
    *,
    run_name: str,
    team: Replicas,
    share: RowShare | None = None,
) -> tuple[Loaded | None, list[str]]:
    """Load the checkpoint of an evaluation, the same one in all processes of a team.

    Args:
        choice: which one.
        options: where checkpoints are.
        save_name: name of the run's folder.
        safe_types: types that may be built.
        run_name: name of the run, which the files of its folder begin with.
        team: the processes; rank 0 searches.
        share: what this process reads of sharded tensors.

    Returns:
        The checkpoint, ``None`` if there is none; and why it was chosen.

    Raises:
        CheckpointError: if there is none that fits, or if it cannot be used.
        ArgumentError: if nothing decides which one is the best.
    """
    if choice.is_none:
        return None, []
    if choice.is_required:
        on_first(team, lambda: require_present(choice, options, save_name, run_name))
    rest = safe_types, team, share
    if choice.path is not None:
        return GivenCheckpoint(choice.path, *rest).run()
    folder = open_folder(options, save_name)
    if folder is None:
        return None, []
    if choice.is_best:
        return BestCheckpoint(folder, choice.rule, run_name, *rest).run()
    found = NewestCheckpoint(folder, *rest).run()
    if options.run_name and found[0] is not None:
        check_run_name(found[0], run_name, folder)
    return found


def check_run_name(loaded: Loaded, name: str, folder: RunFolder) -> None:
    """Check that the newest checkpoint is of the run with a name.

    Raises:
        RunMismatchError: if it is of another run.
    """
    sidecar = loaded.sidecar
    if sidecar is not None and sidecar.names_run and sidecar.run_name != name:
        raise RunMismatchError(
            f"The folder {folder.path} belongs to the run {sidecar.run_name!r} (newest checkpoint "
            f"{loaded.path.name}), but this run is {name!r}. Give the model another save_name, "
            f"pass run_name={sidecar.run_name!r} to continue that run, or resume='never' to "
            "move its files aside."
        )


def _rank(folder: RunFolder, rule: BestRule | None, run_name: str) -> Ranking:
    """Return the checkpoints of a run by their scores; there is at least one.

    Raises:
        CheckpointError: if there is no checkpoint with the score.
        ArgumentError: if nothing decides.
    """
    present = [each for each in folder.entries() if file_names.belongs_to(each.path, run_name)]
    known = [with_sidecar(entry) for entry in present]
    ranking = rank_checkpoints(known, rule)
    if ranking.entries:
        return ranking
    if ranking.rule is None:
        raise ArgumentError(
            'Trainer.test(checkpoint="best") must be used with one score that decides, got none, '
            'or several. Pass Trainer(store=CheckpointStore(keep_best=KeepBest(1, "loss", '
            'mode="min"))), as for the training.'
        )
    names = sorted({name for entry in known for name in entry.metrics})
    metric = ranking.rule.metric
    best = "" if ranking.best is None else f"The best validation: {ranking.best}. "
    raise CheckpointError(
        f'Trainer.test(checkpoint="best") needs a checkpoint of the run {run_name!r} with the '
        f"score{'' if metric is None else f' {metric!r}'}, but there is none. {best}"
        f"{_describe(folder)}Their scores: {', '.join(names) or 'none'}. Correct the metric, or "
        "set chkpt_frequency and valid_frequency so that a checkpoint follows a validation."
    )


def _explain(ranking: Ranking) -> list[str]:
    """Return why the best checkpoint was chosen."""
    best, *others = ranking.entries
    metric = None if ranking.rule is None else ranking.rule.metric
    if metric is None:
        return ["the last one that have_metrics_improved accepted"]
    score = best.metrics[metric]
    reasons = [f"the best of {len(others) + 1} checkpoints by {ranking.rule}: {number_text(score)}"]
    equal = [each.path.name for each in others if each.metrics[metric] == score]
    if equal:
        reasons.append(f"the earliest with this score (equal: {', '.join(equal)})")
    return reasons


def _warn_of_better(ranking: Ranking) -> None:
    """Warn if the best validation of the run has no checkpoint."""
    if ranking.lacks_best:
        _LOGGER.warning(
            "The best validation of the run has no checkpoint: %s. The best checkpoint is %s. "
            "CheckpointStore(keep_best=...) saves each best validation.",
            ranking.best,
            ranking.entries[0].path.name,
        )


_UNTRAINED = "To evaluate a model that was never trained, pass checkpoint=None."


def _list_runs(path: Path) -> str:
    """Return a sentence that names the runs beside a folder, those with a similar name first."""
    root = path.parent
    folders = [each for each in root.iterdir() if each.is_dir()] if root.is_dir() else []
    names = [each.name for each in folders if file_names.list_checkpoints(each)]
    names.sort(key=lambda name: (-SequenceMatcher(None, path.name, name).ratio(), name))
    if file_names.list_checkpoints(root):
        return f"{root} is itself the folder of a run: pass its parent as chkpt_root."
    if not names:
        return f"{root} {'holds no runs' if root.is_dir() else 'does not exist'}: check chkpt_root."
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"The runs there are: {', '.join(names[:_MAX_NAMES])}{more}. Correct the save_name."


def _describe(folder: RunFolder | None) -> str:
    """Return a sentence that names the newest checkpoints of a folder; empty without a folder."""
    if folder is None:
        return ""
    names = [path.name for path in file_names.find_checkpoints(folder.path)]
    if not names:
        return f"{folder.path} holds no checkpoint. "
    more = f", and {len(names) - _MAX_NAMES} older ones" if len(names) > _MAX_NAMES else ""
    return f"{folder.path} holds {', '.join(reversed(names[-_MAX_NAMES:]))}{more}. "
