"""Finds the checkpoint that a call begins with, locks the folder, and loads it in all processes.

A run's folder belongs to one run; ``changes`` says what identifies it. One run writes to a
folder at a time: rank 0 writes, and every process reads at the next start.

The folder is read twice. :func:`find_stored` returns the number of replicas, on which the number of
processes depends: only these processes can take the lock, and until then another run may change the
folder. Therefore :func:`find_origin` searches again under the lock, in one listing, and its
:class:`Origin` holds everything that the run needs from then on.

An evaluation takes no lock: a run may be writing to the folder, and deletes old checkpoints. A
file that disappears while it is loaded, in one process or between two, is not an error: a newer one
was committed before, and is searched for then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from helios.checkpoint import file_names, loading
from helios.checkpoint.record import Record
from helios.checkpoint.retention import Ranking, rank_checkpoints, with_sidecar
from helios.checkpoint.store import CheckpointStore, Loaded, RunFolder, find_damaged
from helios.core.sharded_tensors import RowShare
from helios.counters import Phase
from helios.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DamagedCheckpointError,
    RunMismatchError,
)
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.start.options import Options
from helios.start.processes import Stored
from helios.storage import files
from helios.storage.files import as_local_path
from helios.storage.folder_lock import FolderLock
from helios.text import number_text, some_text

if TYPE_CHECKING:
    from helios.start.run import Run

_LOGGER = logging.getLogger(__name__)

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
        path, facts = team.on_first(look)
        if path is None:
            return None, facts
        reports = team.on_each(partial(load, path))
        damage = next((damage for _, damage in reports if damage), "")
        has_loaded = [is_loaded for is_loaded, _ in reports]
        if damage:
            team.on_first(partial(pass_over, path, damage))
        elif all(has_loaded):
            return found, facts
        elif not team.on_first(partial(file_names.is_gone, path)):
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


def load_given(
    path: Path, safe_types: list[Any], team: Replicas, share: RowShare | None = None
) -> Loaded | None:
    """Load a file that was named in all processes of a team."""

    def load() -> tuple[Loaded | None, None]:
        return loading.load(path, safe_types, maps=True, share=share), None

    return load_together(load, safe_types, team, share, pass_over=_refuse_damaged)[0]


def _refuse_damaged(path: Path, damage: str) -> None:
    raise DamagedCheckpointError(damage)


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


# ---- what an evaluation loads


Choice: TypeAlias = Literal["auto", "best", "newest"] | str | Path | None
"""``"auto"``, ``"best"``, ``"newest"``, a file, or ``None`` for none."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The choice of the checkpoint that an evaluation loads.

    Attributes:
        path: this file; ``None`` for one in the run's folder.
        is_none: whether none is loaded.
        is_best: whether it is the best one, or else the newest.
        is_required: whether it is an error if there is none.
    """

    path: Path | None = None
    is_none: bool = False
    is_best: bool = False
    is_required: bool = False


def choose_checkpoint(run: Run, asked: Choice, *, has_fitted: bool) -> CheckpointChoice:
    """Return what the argument of an evaluation means.

    Args:
        run: the call.
        asked: the argument.
        has_fitted: whether the trainer has trained: its newest checkpoint comes from
            ``resume=<path>`` then, otherwise that file itself is meant.

    Raises:
        ArgumentTypeError: if it is neither a string nor a path.
        ArgumentError: for a URL, and if there is no folder to look in.
    """
    options = run.options
    if asked is None:
        return CheckpointChoice(is_none=True)
    if asked == "auto" and not has_fitted and options.resume_path is not None:
        asked = options.resume_path
    if asked == "auto":
        has_own = type(run.model).load_for_testing is not Model.load_for_testing
        return CheckpointChoice(is_required=run.trained is None and not has_own)
    if not isinstance(asked, str | Path):
        raise ArgumentTypeError(
            'checkpoint=... must be "best", "newest", a file or None, got '
            f"{asked!r}. Omit it for the newest one."
        )
    if asked not in ("best", "newest"):
        path = as_local_path("checkpoint=...", asked)
        return CheckpointChoice(path, is_required=True)
    if options.chkpt_root is None:
        raise ArgumentError(
            f"checkpoint={asked!r} must be used with a folder of checkpoints, got "
            "none. Pass Trainer(chkpt_root=...), or the path of a file."
        )
    return CheckpointChoice(is_best=asked == "best", is_required=True)


_MAX_NAMES = 8
_UNTRAINED = "To evaluate a model that was never trained, pass checkpoint=None."


def require_present(run: Run) -> None:
    """Check that there is the checkpoint that an evaluation loads, without loading it.

    Raises:
        CheckpointError: if there is none; it names those there are.
        ArgumentError: if nothing decides which one is the best.
    """
    choice, folder = run.choice, open_folder(run.options, run.model.save_name)
    if choice.path is not None:
        if not file_names.is_present(choice.path):
            raise CheckpointError(
                'checkpoint=... must be "best", "newest" or a checkpoint file, but '
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
            _rank(folder, run)


def find_chosen(run: Run) -> tuple[Loaded | None, list[str]]:
    """Load the checkpoint of an evaluation, which rank 0 searches, in all its processes.

    Returns:
        The checkpoint, ``None`` if there is none; and why it was chosen.

    Raises:
        CheckpointError: if there is none that fits, or if it cannot be used.
        ArgumentError: if nothing decides which one is the best.
    """
    choice, team, share = run.choice, run.team, run.share
    if choice.is_none:
        return None, []
    if choice.is_required:
        team.on_first(partial(require_present, run))
    safe_types = run.model.types_for_safe_load()
    if choice.path is not None:
        return load_given(choice.path, safe_types, team, share), []
    folder = open_folder(run.options, run.model.save_name)
    if folder is None:
        return None, []
    folder.share = share
    if choice.is_best:
        load_best = partial(_load_best, folder, run, safe_types)
        return load_together(load_best, safe_types, team, share, pass_over=_refuse_damaged)

    def load_newest() -> tuple[Loaded | None, list[str]]:
        # A run may be training in the folder, so no file is changed.
        return folder.load_newest(safe_types, renames_damaged=False), []

    pass_over = partial(folder.pass_over, renames=False)
    loaded, reasons = load_together(load_newest, safe_types, team, share, pass_over=pass_over)
    if run.options.run_name and loaded is not None:
        check_run_name(loaded, run.name, folder)
    return loaded, reasons


def _load_best(
    folder: RunFolder, run: Run, safe_types: list[Any]
) -> tuple[Loaded | None, list[str]]:
    """Load the best checkpoint of a folder; returns it with the reasons why it is."""
    for _ in file_names.listings(folder.path):
        ranking = _rank(folder, run)
        path = ranking.entries[0].path
        try:
            loaded = loading.load_present(path, safe_types, maps=True, share=folder.share)
        except FileNotFoundError:
            continue
        if ranking.lacks_best:
            _LOGGER.warning(
                "The best validation of the run has no checkpoint: %s. The best checkpoint is %s. "
                "CheckpointStore(keep_best=...) saves each best validation.",
                ranking.best,
                path.name,
            )
        return loaded, _explain(ranking)
    return None, []


def _rank(folder: RunFolder, run: Run) -> Ranking:
    """Return the checkpoints of a run by their scores; there is at least one.

    Raises:
        CheckpointError: if there is no checkpoint with the score.
        ArgumentError: if nothing decides.
    """
    present = file_names.list_checkpoints(folder.path)
    known = [with_sidecar(path) for path in present if file_names.belongs_to(path, run.name)]
    # Without a rule, what the run was trained with decides.
    ranking = rank_checkpoints(known, run.options.find_rule(run.plugins.values()))
    if ranking.entries:
        return ranking
    if ranking.rule is None:
        raise ArgumentError(
            'checkpoint="best" needs one score that decides, but the run has none or several. Pass '
            'Trainer(store=CheckpointStore(keep_best=KeepBest(1, "loss", '
            'mode="min"))), as for the training.'
        )
    names = sorted({name for entry in known for name in entry.metrics})
    metric = ranking.rule.metric
    best = "" if ranking.best is None else f"The best validation: {ranking.best}. "
    raise CheckpointError(
        f'checkpoint="best" needs a checkpoint of the run {run.name!r} with the '
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
    return f"The runs there are: {some_text(names, _MAX_NAMES)}. Pass the save_name of one."


def _describe(folder: RunFolder | None) -> str:
    """Return a sentence that names the newest checkpoints of a folder; empty without a folder."""
    if folder is None:
        return ""
    names = [path.name for path in file_names.find_checkpoints(folder.path)]
    if not names:
        return f"{folder.path} holds no checkpoint. "
    more = f", and {len(names) - _MAX_NAMES} older ones" if len(names) > _MAX_NAMES else ""
    return f"{folder.path} holds {', '.join(reversed(names[-_MAX_NAMES:]))}{more}. "


# ---- where a run starts


def require_writable(run: Run) -> None:
    """Refuse a folder that cannot be written to, before the first save would fail.

    Raises:
        ArgumentError: if the run saves, and its folder cannot be created or written to.
    """
    options = run.options
    folder = open_folder(options, run.model.save_name)
    if folder is None or not options.can_save:
        return
    try:
        files.check_writable(folder.path)
    except OSError as error:
        raise ArgumentError(
            "Trainer(chkpt_root=...) must be a folder that can be created and written to, got "
            f"{str(options.chkpt_root)!r}: {error}. Pass another one, or fix its permissions. "
            "Omit chkpt_root to train without checkpoints."
        ) from error


def _lock_folder(folder: RunFolder, run: Run) -> FolderLock:
    """Lock the folder of a run for this call, before anything in it is read; rank 0 holds the lock.

    A run that only loads creates no folder, but locks an existing one, because it also moves
    damaged files aside.

    Raises:
        FolderInUseError: in all processes, if another run holds it.
        CheckpointError: in all processes, if one of them does not see the folder for saving.
    """
    lock, can_save, team = FolderLock(folder.path), run.options.can_save, run.replicas
    run.settings.callback(lock.release)

    def take() -> str:
        if can_save or folder.path.is_dir():
            lock.acquire()
        return lock.owner

    owner = team.on_first(take)
    if can_save and owner:
        team.on_each(lambda: _require_sight(lock.path, owner, team))
    return lock


PATIENCE = 10.0
"""Seconds within which a network file system shows a new file to all machines."""


def _require_sight(path: Path, owner: str, team: Replicas) -> None:
    """Check that a process sees the folder that rank 0 has locked: it must resume from there."""
    deadline = time.monotonic() + PATIENCE
    while team.rank != 0:
        with contextlib.suppress(OSError):
            # A failed lookup is cached until the folder is opened.
            os.scandir(path.parent.parent).close()
            os.scandir(path.parent).close()
            if path.read_text() == owner:
                return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Rank 0 of {team.num_processes} saves to {path.parent}, but rank {team.rank} "
                f"does not see the same folder. {SHARING}"
            )
        time.sleep(0.1)


@dataclass(frozen=True)
class Origin:
    """The place where a run starts.

    Attributes:
        folder: the run's folder; ``None`` without ``chkpt_root``.
        loaded: the checkpoint to continue from; ``None`` for a first start.
        path: the path of ``resume=<path>`` from which the run was started, if any.
        is_branch: whether this is the first start from that path, which is another run's.
        goes_back: whether that path is an older checkpoint of this run; what is newer is to be set
            aside before training continues.
        changes: changes that were allowed, in earlier starts of the run.
        lock: keeps a second run out of the folder during the call; rank 0 holds it.
    """

    folder: RunFolder | None = None
    loaded: Loaded | None = None
    path: str | None = None
    is_branch: bool = False
    goes_back: bool = False
    changes: tuple[str, ...] = ()
    lock: FolderLock | None = None

    @property
    def record(self) -> Record | None:
        """The content of the checkpoint, until it is released."""
        return None if self.loaded is None else self.loaded.record

    @property
    def iteration(self) -> int:
        """The iteration of the checkpoint; 0 for the beginning."""
        return 0 if self.record is None else self.record.place[1]

    def describe_rescue(self) -> str:
        """Return what an error leaves to the user before anything was trained."""
        if self.loaded is None:
            return ""
        return f"Nothing was trained; {self.loaded.path} is unchanged."


def _read_stored(safe_types: list[Any], path: Path) -> Stored | None:
    """Read a checkpoint's sidecar, or its content if it has none; ``None`` if it is damaged.

    The content decides whether a run resumes, not the age of a file.
    """
    try:
        sidecar = loading.read_sidecar(path)
        if sidecar is not None:
            return Stored(sidecar.num_replicas, path, sidecar.resumed_from)
        record = loading.load_present(path, safe_types, maps=True).record
    except DamagedCheckpointError:
        # An older one says the same; loading the run reports the damage.
        return None
    return Stored(record.num_replicas, path, record.resumed_from)


def find_stored(run: Run) -> Stored | None:
    """Return what the run was started with; ``None`` for a new run.

    An evaluation uses the newest checkpoint, whatever ``resume`` says.

    Raises:
        CheckpointError: if the newest checkpoint is undamaged, but cannot be used.
    """
    is_fit, options = run.phase is Phase.TRAINING, run.options
    folder, safe_types = open_folder(options, run.model.save_name), run.model.types_for_safe_load()
    if folder is None or (is_fit and options.resume == "never"):
        return None
    # Any checkpoint of the run will do, so one listing is enough, unless it holds none: a training
    # in progress commits one and deletes an older one, and a listing may miss both.
    listed = file_names.list_checkpoints(folder.path) or None
    stored = file_names.search(folder.path, partial(_read_stored, safe_types), listed=listed)
    origin = options.resume_path if is_fit else None
    if origin is not None and (stored is None or stored.origin != str(origin.absolute())):
        return find_replicas(origin, safe_types)
    return stored if stored is not None and stored.num_replicas else None


def find_replicas(path: Path, safe_types: list[Any]) -> Stored | None:
    """Return what a file says of the number of replicas; ``None`` without a file, or if unknown."""
    stored = _read_stored(safe_types, path) if file_names.is_present(path) else None
    return stored if stored is not None and stored.num_replicas else None


def find_origin(run: Run) -> Origin:
    """Find the checkpoint that ``resume`` selects, and lock the run's folder for the call.

    Rank 0 searches, and all processes load the same file.

    Raises:
        FolderInUseError: if another run writes to the folder.
        RunMismatchError: if the newest checkpoint belongs to a run of another name, or of another
            number of replicas.
        CheckpointError: if there is a checkpoint that cannot be used.
    """
    folder = open_folder(run.options, run.model.save_name)
    if folder is None:
        return Origin()
    lock = _lock_folder(folder, run)
    types, folder.share = run.model.types_for_safe_load(), run.share

    def choose() -> tuple[Loaded | None, Origin]:
        origin = _choose_origin(folder, run.options, run.name, types)
        loaded, count = origin.loaded, run.replicas.num_replicas
        if loaded is not None and loaded.record.num_replicas not in (0, count):
            raise RunMismatchError(
                f"{loaded.path} was saved with {loaded.record.num_replicas} replicas, but newer "
                f"files of the run were saved with {count}. Move the files of one kind out of "
                "the folder."
            )
        return loaded, replace(origin, loaded=None)

    def pass_over(path: Path, damage: str) -> None:
        if path.parent != folder.path or folder.share is None:
            # Rank 0 has verified all of it: nothing is wrong with the file.
            raise DamagedCheckpointError(damage)
        folder.pass_over(path, damage)

    loaded, origin = load_together(choose, types, run.replicas, run.share, pass_over=pass_over)
    return replace(origin, folder=folder, loaded=loaded, lock=lock)


def _choose_origin(
    folder: RunFolder, options: Options, run_name: str, safe_types: list[Any]
) -> Origin:
    """Find the origin, and move or delete files as ``resume`` requires; runs in one process."""
    listed = folder.clean()
    if options.resume == "never":
        _move_aside(folder)
        return Origin()
    if options.resume_path is None:
        origin = Origin(loaded=folder.load_newest(safe_types, listed=listed))
    else:
        origin = _start_from_path(folder, options.resume_path, safe_types, listed)
        origin = replace(origin, goes_back=origin.goes_back and options.can_save)
    loaded = origin.loaded
    if loaded is not None:
        if not origin.is_branch:
            check_run_name(loaded, run_name, folder)
        changes, path = (), loaded.record.resumed_from
        if loaded.sidecar is not None:
            changes, path = tuple(loaded.sidecar.changes), loaded.sidecar.resumed_from
        origin = replace(origin, changes=changes, path=origin.path or path)
    if origin.path is not None:
        # The user's command names it: without it, the same command would fail.
        folder.protect(Path(origin.path))
    return origin


def _start_from_path(
    folder: RunFolder, path: Path, safe_types: list[Any], listed: list[Path]
) -> Origin:
    given = str(path.absolute())
    stored = file_names.search(folder.path, partial(_read_stored, safe_types), listed=listed)
    if stored is None or stored.origin == given:
        try:
            newest = folder.load_newest(safe_types, listed=listed)
            if newest is not None:
                return Origin(loaded=newest, path=given)
        except DamagedCheckpointError as error:
            # The file that they were started from is the next older one.
            if not file_names.is_present(path):
                raise
            _LOGGER.warning("%s The run starts again from %s.", error, path)
    if not file_names.is_present(path):
        raise CheckpointError(
            'Trainer(resume=...) must be "auto", "never" or a checkpoint file, but there is no '
            f"file at {path}. Fix the path, or omit resume to continue from the newest."
        )
    loaded = folder.load(path, safe_types)
    if path.resolve().parent == folder.path.resolve():
        return Origin(loaded=loaded, path=given, goes_back=True)
    _move_aside(folder)
    return Origin(loaded=loaded, path=given, is_branch=True)


def _move_aside(folder: RunFolder) -> None:
    moved = folder.move_aside()
    if moved is not None:
        _LOGGER.warning("Moved the existing checkpoints of the run to %s.", moved)


def set_newer_aside(origin: Origin) -> None:
    """Move what is newer than the checkpoint that a run goes back to, before training continues."""
    if origin.goes_back and origin.folder is not None and origin.loaded is not None:
        moved = origin.folder.move_newer_aside(origin.iteration)
        if moved is not None:
            _LOGGER.warning(
                "The run goes back to %s. Moved newer checkpoints and a copy of the ledger to %s.",
                origin.loaded.path.name,
                moved,
            )
