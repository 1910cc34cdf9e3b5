"""Loads the checkpoint that an evaluation was asked for: the newest, the best, or a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.options import KeepBest
from helios.checkpoint.retention import Entry, find_best, with_sidecar
from helios.checkpoint.store import Loaded, RunFolder
from helios.core.sharded_tensors import RowShare
from helios.errors import CheckpointError, DamagedCheckpointError
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search.newest_checkpoint import Search, run_search
from helios.startup.checkpoint_search.run_folder import open_folder
from helios.startup.launching.on_all_ranks import on_each, on_first
from helios.startup.options.checkpoint_choice import CheckpointChoice
from helios.startup.options.checkpoint_options import CheckpointOptions

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
    """
    folder = open_folder(options, save_name)
    if choice.path is not None:
        if not file_names.is_present(choice.path):
            raise CheckpointError(
                'Trainer.test(checkpoint=...) must be "best", "newest" or a checkpoint file, but '
                f"there is no file at {choice.path}. {_describe(folder)}Correct the path."
            )
    elif choice.is_required and folder is not None:
        if choice.rule is not None:
            _find_scored(folder, choice.rule, run_name)
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
    if choice.rule is None:
        return Chosen(run_search(Search(folder, safe_types, team)))
    search = _BestSearch(folder, safe_types, team)
    search.rule, search.run_name = choice.rule, run_name
    return Chosen(run_search(search), search.reasons)


class _BestSearch(Search):
    """The search for the best checkpoint.

    Attributes:
        rule: the score that decides.
        run_name: name of the run.
        reasons: why it was chosen, on rank 0.
    """

    rule: KeepBest
    run_name: str

    def __init__(self, folder: RunFolder, safe_types: list[Any], team: Replicas) -> None:
        super().__init__(folder, safe_types, team)
        self.reasons: list[str] = []

    def _look(self) -> str | None:
        for _ in file_names.listings(self.folder.path):
            entries = _find_scored(self.folder, self.rule, self.run_name)
            try:
                self.found = loading.load_present(
                    entries[0].path, self._types, maps=True, share=self.folder.share
                )
            except FileNotFoundError:
                continue
            self.reasons = _explain(entries, self.rule)
            break
        return None if self.found is None else self.found.path.name

    def _pass_over(self, path: Path, damage: str) -> None:
        raise DamagedCheckpointError(damage)


def _find_scored(folder: RunFolder, rule: KeepBest, run_name: str) -> list[Entry]:
    """Return the checkpoints with the score, the best one first.

    Raises:
        CheckpointError: if there is none.
    """
    present = [each for each in folder.entries() if file_names.belongs_to(each.path, run_name)]
    known = [with_sidecar(entry) for entry in present]
    scored = find_best(known, dataclasses.replace(rule, count=max(1, len(known))))
    if not scored:
        names = sorted({name for entry in known for name in entry.metrics})
        raise CheckpointError(
            f'Trainer.test(checkpoint="best") needs a checkpoint of the run {run_name!r} with the '
            f"score {rule.metric!r}, but there is none. {_describe(folder)}Their scores: "
            f"{', '.join(names) or 'none'}. Correct the metric, or set chkpt_frequency and "
            "valid_frequency so that a checkpoint follows a validation."
        )
    return scored


def _explain(entries: Sequence[Entry], rule: KeepBest) -> list[str]:
    best, *others = entries
    score = best.metrics[rule.metric]
    reasons = [
        f"the best of {len(entries)} checkpoints by {rule.metric} ({rule.mode}): {score:.6g}"
    ]
    equal = [each.path.name for each in others if each.metrics[rule.metric] == score]
    if equal:
        reasons.append(f"the earliest with this score (equal: {', '.join(equal)})")
    return reasons


def _describe(folder: RunFolder | None) -> str:
    """Return a sentence that names the newest checkpoints of a folder; empty without a folder."""
    if folder is None:
        return ""
    names = [path.name for path in file_names.find_checkpoints(folder.path)]
    if not names:
        return f"{folder.path} holds no checkpoint. "
    more = f", and {len(names) - _MAX_NAMES} older ones" if len(names) > _MAX_NAMES else ""
    return f"{folder.path} holds {', '.join(reversed(names[-_MAX_NAMES:]))}{more}. "
