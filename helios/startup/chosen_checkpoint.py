"""Which checkpoint an evaluation is asked to load, and how it is found while a training may write.

That training deletes old checkpoints. A file that disappears while it is loaded, in one process or
between two, is not an error: a newer one was committed before, and is searched for then.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from helios.best import BestRule
from helios.checkpoint import file_names, loading
from helios.checkpoint.retention import Ranking, rank_checkpoints, with_sidecar
from helios.checkpoint.store import Loaded, RunFolder
from helios.core.sharded_tensors import RowShare
from helios.errors import ArgumentError, ArgumentTypeError, CheckpointError, DamagedCheckpointError
from helios.plugins.plugin import Plugin
from helios.replicas.on_all_ranks import on_each, on_first
from helios.replicas.replicas import Replicas
from helios.startup.best_validations import find_declared_rule, require_one_mode
from helios.startup.resume_point import load_found_by_rank_0, open_folder
from helios.startup.trainer_options import Options
from helios.storage.local_paths import as_local_path
from helios.text import number_text

Choice: TypeAlias = Literal["best", "newest"] | str | Path | None
"""``"best"``, ``"newest"``, a file, or ``None`` for the newest one if there is any."""


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint an evaluation loads.

    Attributes:
        path: this file; ``None`` for one in the run's folder.
        is_best: whether it is the best one, or else the newest.
        rule: what decides which one is the best; ``None`` for what the run was trained with.
        is_required: whether it is an error if there is none.
    """

    path: Path | None = None
    is_best: bool = False
    rule: BestRule | None = None
    is_required: bool = False


def choose_checkpoint(
    asked: Choice, options: Options, plugins: Iterable[Plugin], *, has_fitted: bool
) -> CheckpointChoice:
    """Return what the argument means.

    Args:
        asked: the argument.
        options: where checkpoints are, and how they are kept.
        plugins: those of the trainer.
        has_fitted: whether the trainer has trained: its newest checkpoint comes from
            ``resume=<path>`` then, otherwise that file itself is meant.

    Raises:
        ArgumentTypeError: if it is neither a string nor a path.
        ArgumentError: for a URL, if there is no folder to look in, or for two modes of one score.
    """
    if asked is None and not has_fitted:
        asked = options.resume_path
    if asked is None:
        return CheckpointChoice()
    if not isinstance(asked, str | Path):
        raise ArgumentTypeError(
            f'Trainer.test(checkpoint=...) must be "best", "newest" or a file, got {asked!r}. Omit '
            "it for the newest one."
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


def find_newest(
    options: Options, save_name: str, safe_types: list[Any], *, team: Replicas
) -> Loaded | None:
    """Load the newest undamaged checkpoint, the same one in all processes of a team.

    Args:
        options: where checkpoints are.
        save_name: name of the run's folder.
        safe_types: types that may be built.
        team: the processes; rank 0 searches.

    Raises:
        CheckpointError: if there is a checkpoint that cannot be used.
    """
    folder = open_folder(options, save_name)
    return None if folder is None else run_search(Search(folder, safe_types, team))


def run_search(search: Search) -> Loaded | None:
    """Search until all processes have loaded the same checkpoint; ``None`` if there is none."""
    for _ in file_names.listings(search.folder.path):
        if search.succeeds():
            break
    return search.found


class Search:
    """The search in one process of a team; all of them do the same at the same time.

    Args:
        folder: the run's folder.
        safe_types: types that may be built.
        team: the processes; rank 0 searches.

    Attributes:
        found: the checkpoint, once it is loaded.
    """

    def __init__(self, folder: RunFolder, safe_types: list[Any], team: Replicas) -> None:
        self.found: Loaded | None = None
        self.folder = folder
        self._types = safe_types
        self._team = team

    def succeeds(self) -> bool:
        """Search and load; returns whether all processes have it, or there is none."""
        name = on_first(self._team, self._look)
        if name is None:
            return True
        path = self.folder.path / name
        reports = on_each(self._team, lambda: self._try(path))
        damage = next((text for text in reports if text), "")
        if damage:
            on_first(self._team, lambda: self._pass_over(path, damage))
            return False
        if None not in reports:
            return True
        if on_first(self._team, lambda: file_names.is_gone(path)):
            return False
        # Rank 0 still sees it: the folder is not shared.
        on_each(self._team, lambda: self._insist(path))
        return True

    def _look(self) -> str | None:
        self.found = self.folder.load_newest(self._types, renames_damaged=False)
        return None if self.found is None else self.found.path.name

    def _try(self, path: Path) -> str | None:
        """Load what rank 0 has found; returns what is damaged of it, ``None`` if it is gone."""
        if self._team.rank == 0:
            return ""
        try:
            self.found = loading.load_present(path, self._types, maps=True, share=self.folder.share)
        except FileNotFoundError:
            return None
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _pass_over(self, path: Path, damage: str) -> None:
        """Look for an older checkpoint instead of one that another process found damaged."""
        self.folder.pass_over(path, damage, renames=False)

    def _insist(self, path: Path) -> None:
        if self._team.rank != 0:
            self.found = load_found_by_rank_0(self.folder, path, self._types, self._team)


_LOGGER = logging.getLogger(__name__)

_MAX_NAMES = 8


@dataclasses.dataclass
class Chosen:
    """The checkpoint of an evaluation.

    Attributes:
        loaded: its content; ``None`` without one.
        reasons: why it was chosen, for the log of rank 0.
    """

    loaded: Loaded | None
    reasons: list[str] = dataclasses.field(default_factory=list)


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
    elif choice.is_required and folder is not None:
        if choice.is_best:
            _rank(folder, choice.rule, run_name)
        elif not file_names.find_checkpoints(folder.path):
            raise CheckpointError(
                'Trainer.test(checkpoint="newest") needs a checkpoint, but there is none in '
                f"{folder.path}. Train first, or correct chkpt_root and the model's save_name."
            )


def find_chosen(
    choice: CheckpointChoice,
    options: Options,
    save_name: str,
    safe_types: list[Any],
    *,
    run_name: str,
    team: Replicas,
    share: RowShare | None = None,
) -> Chosen:
    """Load the checkpoint of an evaluation, the same one in all processes of a team.

    Args:
        choice: which one.
        options: where checkpoints are.
        save_name: name of the run's folder.
        safe_types: types that may be built.
        run_name: name of the run, which the files of its folder begin with.
        team: the processes; rank 0 searches.
        share: what this process reads of sharded tensors.

    Raises:
        CheckpointError: if there is none that fits, or if it cannot be used.
        ArgumentError: if nothing decides which one is the best.
    """
    if choice.is_required:
        on_first(team, lambda: require_present(choice, options, save_name, run_name))
    path, found = choice.path, list[Loaded]()
    load = partial(loading.load, safe_types=safe_types, maps=True, share=share)
    if path is not None:
        on_each(team, lambda: found.append(load(path)))
        return Chosen(found[0])
    folder = open_folder(options, save_name)
    if folder is None:
        return Chosen(None)
    folder.share = share
    if not choice.is_best:
        return Chosen(run_search(Search(folder, safe_types, team)))
    search = _BestSearch(folder, safe_types, team)
    search.rule, search.run_name = choice.rule, run_name
    return Chosen(run_search(search), search.reasons)


class _BestSearch(Search):
    """The search for the best checkpoint.

    Attributes:
        rule: what decides; ``None`` for what the run was trained with.
        run_name: name of the run.
        reasons: why it was chosen, on rank 0.
    """

    rule: BestRule | None
    run_name: str

    def __init__(self, folder: RunFolder, safe_types: list[Any], team: Replicas) -> None:
        super().__init__(folder, safe_types, team)
        self.reasons: list[str] = []

    def _look(self) -> str | None:
        for _ in file_names.listings(self.folder.path):
            ranking = _rank(self.folder, self.rule, self.run_name)
            try:
                self.found = loading.load_present(
                    ranking.entries[0].path, self._types, maps=True, share=self.folder.share
                )
            except FileNotFoundError:
                continue
            self.reasons = _explain(ranking)
            _warn_of_better(ranking)
            break
        return None if self.found is None else self.found.path.name

    def _pass_over(self, path: Path, damage: str) -> None:
        raise DamagedCheckpointError(damage)


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


def _describe(folder: RunFolder | None) -> str:
    """Return a sentence that names the newest checkpoints of a folder; empty without a folder."""
    if folder is None:
        return ""
    names = [path.name for path in file_names.find_checkpoints(folder.path)]
    if not names:
        return f"{folder.path} holds no checkpoint. "
    more = f", and {len(names) - _MAX_NAMES} older ones" if len(names) > _MAX_NAMES else ""
    return f"{folder.path} holds {', '.join(reversed(names[-_MAX_NAMES:]))}{more}. "
