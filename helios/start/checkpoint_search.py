"""The search for a checkpoint: which one is asked for, and how all processes load the same one.

A training may be writing to the folder, and deletes old checkpoints. A file that disappears while
it is loaded, in one process or between two, is not an error: a newer one was committed before, and
is searched for then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

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
from helios.start.options import Options
from helios.storage.files import as_local_path
from helios.text import number_text

Choice: TypeAlias = Literal["auto", "best", "newest"] | str | Path | None
"""``"auto"``, ``"best"``, ``"newest"``, a file, or ``None`` for none."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The choice of the checkpoint that an evaluation loads.

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
        ArgumentError: for a URL, and if there is no folder to look in.
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
    return CheckpointChoice(is_best=True, rule=options.find_rule(plugins), is_required=True)


SHARING = (
    "All processes must see the same files: put them on a file system that the machines share, "
    "under the same path."
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


def load_together(
    choose: Callable[[], tuple[Loaded | None, Facts]],
    safe_types: list[Any],
    team: Replicas,
    share: RowShare | None = None,
    *,
    pass_over: Callable[[Path, str], None],
) -> tuple[Loaded | None, Facts]:
    """Load the checkpoint that rank 0 chooses in all processes, which call this together.

    Args:
        choose: loads it on rank 0; returns it, ``None`` if there is none, and small facts.
        safe_types: types that may be built.
        team: the processes.
        share: what this process reads of sharded tensors; ``None`` for everything.
        pass_over: called on rank 0, before it chooses again, where another process has found its
            part damaged; it may raise.

    Raises:
        CheckpointError: in all processes, if one does not see what rank 0 has found, or if it is
            damaged there.
    """
    found: Loaded | None = None

    def look() -> tuple[Path | None, Facts]:
        nonlocal found
        found, facts = choose()
        return None if found is None else found.path, facts

    def load(path: Path) -> tuple[bool, str]:
        nonlocal found
        damage = ""
        if team.rank != 0:
            found, damage = _try_to_load(path, safe_types, share)
        return found is not None, damage

    while True:
        path, facts = on_first(team, look)
        if path is None:
            return None, facts
        reports = on_each(team, partial(load, path))
        damage = next((damage for _, damage in reports if damage), "")
        has_loaded = [is_loaded for is_loaded, _ in reports]
        if damage:
            on_first(team, partial(pass_over, path, damage))
        elif all(has_loaded):
            return found, facts
        elif not on_first(team, partial(file_names.is_gone, path)):
            # Rank 0 still sees it.
            raise CheckpointError(
                f"Rank 0 of {team.num_processes} loads {path}, but rank {has_loaded.index(False)} "
                f"finds no such file. {SHARING}"
            )


def _try_to_load(
    path: Path, safe_types: list[Any], share: RowShare | None
) -> tuple[Loaded | None, str]:
    """Load a checkpoint; ``None`` if it is gone or damaged, with what is damaged of it."""
    try:
        return loading.load_present(path, safe_types, maps=True, share=share), ""
    except FileNotFoundError:
        return None, ""
    except DamagedCheckpointError as error:
        return None, str(error)


def _refuse_damaged(path: Path, damage: str) -> None:
    raise DamagedCheckpointError(damage)


def _load_best(
    folder: RunFolder, rule: BestRule | None, run_name: str, safe_types: list[Any]
) -> tuple[Loaded | None, list[str]]:
    """Load the best checkpoint of a folder; returns it with the reasons why it is."""
    for _ in file_names.listings(folder.path):
        ranking = _rank(folder, rule, run_name)
        path = ranking.entries[0].path
        try:
            loaded = loading.load_present(path, safe_types, maps=True, share=folder.share)
        except FileNotFoundError:
            continue
        _warn_of_better(ranking)
        return loaded, _explain(ranking)
    return None, []


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
    if choice.path is not None:
        return load_given(choice.path, safe_types, team, share), []
    folder = open_folder(options, save_name)
    if folder is None:
        return None, []
    folder.share = share
    if choice.is_best:
        load_best = partial(_load_best, folder, choice.rule, run_name, safe_types)
        return load_together(load_best, safe_types, team, share, pass_over=_refuse_damaged)

    def load_newest() -> tuple[Loaded | None, list[str]]:
        # A run may be training in the folder, so no file is changed.
        return folder.load_newest(safe_types, renames_damaged=False), []

    pass_over = partial(folder.pass_over, renames=False)
    loaded, reasons = load_together(load_newest, safe_types, team, share, pass_over=pass_over)
    if options.run_name and loaded is not None:
        check_run_name(loaded, run_name, folder)
    return loaded, reasons


def load_given(
    path: Path, safe_types: list[Any], team: Replicas, share: RowShare | None = None
) -> Loaded | None:
    """Load a file that was named in all processes of a team."""

    def load() -> tuple[Loaded | None, None]:
        return loading.load(path, safe_types, maps=True, share=share), None

    return load_together(load, safe_types, team, share, pass_over=_refuse_damaged)[0]


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
        f"score{'' if metric is None else f' {metric!r}'}, but there is none. "
        f"{best}{_describe(folder)}Their scores: {', '.join(names) or 'none'}. Fix the metric, or "
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
    return f"The runs there are: {', '.join(names[:_MAX_NAMES])}{more}. Pass the save_name of one."


def _describe(folder: RunFolder | None) -> str:
    """Return a sentence that names the newest checkpoints of a folder; empty without a folder."""
    if folder is None:
        return ""
    names = [path.name for path in file_names.find_checkpoints(folder.path)]
    if not names:
        return f"{folder.path} holds no checkpoint. "
    more = f", and {len(names) - _MAX_NAMES} older ones" if len(names) > _MAX_NAMES else ""
    return f"{folder.path} holds {', '.join(reversed(names[-_MAX_NAMES:]))}{more}. "
