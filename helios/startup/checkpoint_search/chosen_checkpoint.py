"""Loads the checkpoint that an evaluation was asked for: the newest, the best, or a file."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any

from helios.best import BestRule
from helios.checkpoint import file_names, loading
from helios.checkpoint.retention import Ranking, rank_checkpoints, with_sidecar
from helios.checkpoint.store import Loaded, RunFolder
from helios.core.sharded_tensors import RowShare
from helios.core.text import number_text
from helios.errors import ArgumentError, CheckpointError, DamagedCheckpointError
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search.newest_checkpoint import Search, run_search
from helios.startup.checkpoint_search.run_folder import open_folder
from helios.startup.launching.on_all_ranks import on_each, on_first
from helios.startup.options.checkpoint_choice import CheckpointChoice
from helios.startup.options.checkpoint_options import CheckpointOptions

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
    choice: CheckpointChoice, options: CheckpointOptions, save_name: str, run_name: str
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
    options: CheckpointOptions,
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
