"""``Sweep``: many runs with parameters that Optuna suggests, which survive kills as a run does.

The only memory of a sweep is a file, Optuna's journal. A suggestion is a function of the journal,
the seed of the sweep, the number of the trial and the name of the parameter, so a killed sweep
makes the same suggestions. A trial that a process left unfinished is still running by the journal;
a process that finds it without a lock trains it to its end.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from helios.best import Mode, check_mode, is_better
from helios.cli.output import table
from helios.core import rng
from helios.errors import (
    ArgumentError,
    FolderInUseError,
    RunMismatchError,
    UsageError,
)
from helios.launch.launcher import Launch
from helios.launch.rank import refuse_nested_start
from helios.plugins.early_stopping import read_score
from helios.plugins.plugin import Plugin
from helios.storage import files
from helios.storage.folder_lock import LOCK_NAME, FolderLock
from helios.text import count_text, number_text

try:
    import optuna
    from optuna.distributions import BaseDistribution, distribution_to_json
    from optuna.pruners import BasePruner, MedianPruner
    from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.study import StudyDirection
    from optuna.trial import TrialState
except ImportError as error:
    raise ImportError('helios.sweep needs Optuna: pip install "helios-trainer[sweep]"') from error

_LOGGER = logging.getLogger(__name__)

_STUDY = "sweep"
_JOURNAL, _PICTURE, _PARAMS = "journal.jsonl", "sweep.png", "params.json"
_RUNS, _LOCKS = "runs", "locks"
_SETTINGS, _DECISION = "helios", "helios:{}"
_DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
"""The states of trials, as tables list them."""
_PATIENCE = 60.0
"""Seconds to wait for a lock that is held for a moment, or by ranks that end with their script."""
_BETWEEN_TRIES = 0.01
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep.

    Attributes:
        number: its number, from 0.
        params: its parameters, by name.
        score: the result of the objective, or the last report of a pruned trial; ``None`` if there
            is none.
        state: ``"finished"``, ``"pruned"``, ``"failed"`` or ``"running"``.
        folder: its folder, which holds the run.
    """

    number: int
    params: dict[str, Any]
    score: float | None
    state: str
    folder: Path


class Sweep:
    """Trains many runs with parameters that a sampler of Optuna suggests.

    Kill the script anywhere and run it again: finished trials are not repeated, and the interrupted
    one resumes, with its parameters, to the same bits. Several processes, on any machines that
    share the folder, may run the same script: each trial is trained by one of them.

    Args:
        folder: folder of the sweep: the journal, a plot, and ``runs/``, a folder per trial.
        mode: ``"min"`` if small scores are good, ``"max"`` if large ones are; required.
        random_seed: seed of the suggestions; ``None`` for 6691. A seed of the sampler has no
            effect, except for the order of a ``GridSampler``.
        sampler: a ``RandomSampler``, ``TPESampler`` or ``GridSampler`` of Optuna; ``None`` for
            ``TPESampler()``.
        pruner: ends trials for which :meth:`Trial.pruning` reports poor scores; ``None`` for
            ``MedianPruner()``.

    Raises:
        ArgumentError: for another sampler, whose suggestions would change after a kill, and for
            other invalid values.
        ArgumentTypeError: for a folder that is not a path.

    Attributes:
        folder: the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        mode: Mode,
        *,
        random_seed: int | None = None,
        sampler: BaseSampler | None = None,
        pruner: BasePruner | None = None,
    ) -> None:
        self.folder = files.as_local_path("Sweep(folder=...)", folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(
                f"Sweep(folder=...) must be a folder, got the file {str(folder)!r}. Pass another."
            )
        check_mode(mode, "Sweep")
        seed = rng.get_default_seed() if random_seed is None else random_seed
        if type(seed) is not int:
            raise ArgumentError(
                f"Sweep(random_seed=...) must be an int or None, got {seed!r}. Pass e.g. 1."
            )
        self._mode, self._seed = mode, seed
        self._sampler = TPESampler() if sampler is None else sampler
        self._pruner = MedianPruner() if pruner is None else pruner
        if type(self._sampler) not in (RandomSampler, TPESampler, GridSampler):
            raise ArgumentError(
                "Sweep(sampler=...) must be a RandomSampler, TPESampler or GridSampler of Optuna, "
                f"got {type(sampler).__name__}: after a kill it would not suggest what it would "
                "have suggested without. Pass one of these three."
            )
        if not isinstance(self._pruner, BasePruner):
            raise ArgumentError(
                f"Sweep(pruner=...) must be a pruner of Optuna, got {pruner!r}. Pass e.g. "
                "optuna.pruners.NopPruner() for none."
            )

    def run(
        self,
        objective: Callable[[Trial], float],
        num_trials: int | None = None,
        *,
        catch: tuple[type[Exception], ...] = (),
    ) -> list[TrialResult]:
        """Train trials until there are ``num_trials`` in the sweep; then print a table of them.

        An interruption or an error ends the script, and the next start resumes the trial.

        Args:
            objective: gets a :class:`Trial`, trains with ``Trainer(chkpt_root=trial.folder, ...)``
                and returns a score. It may depend on the parameters only.
            num_trials: number of trials over all starts and processes; for a ``GridSampler``, at
                most the size of the grid, and ``None`` for all of it.
            catch: exceptions that make a trial fail instead of ending the sweep.

        Returns:
            All trials, the best first.

        Raises:
            UsageError: under torchrun or srun, or if the objective does not return a number.
            RunMismatchError: if the sweep was started with another seed, mode, sampler, pruner or
                grid, or a trial with other parameters, or with another range of one.
            BaseException: whatever the objective raises.
        """
        refuse_nested_start()
        if Launch.read().is_given:
            raise UsageError(
                "A sweep must be started with plain Python. To train each trial in several "
                "processes, pass Trainer(nproc=...) in its objective; to train several trials at "
                "once, start the script several times."
            )
        number = self._count(num_trials)
        journal = _Journal(self.folder, self._pruner)
        journal.begin(self._mode, self._describe())
        while True:
            with journal.taking(number, self._sampler, self._seed) as trial:
                if trial is None:
                    break
                _perform(trial, objective, catch)
        return self._conclude(journal)

    def _count(self, num_trials: int | None) -> int:
        """Return how many trials there are to be.

        Raises:
            ArgumentError: if it is not a number of trials.
        """
        grid = _find_grid(self._sampler)
        is_number = type(num_trials) is int and num_trials > 0
        if not is_number and (num_trials is not None or grid is None):
            raise ArgumentError(
                "Sweep.run(num_trials=...) must be a positive int, or None with a GridSampler, got "
                f"{num_trials!r}. Pass e.g. 20."
            )
        size = math.inf if grid is None else math.prod(map(len, grid.values()))
        return int(min(size, math.inf if num_trials is None else num_trials))

    def _describe(self) -> dict[str, Any]:
        """Return what defines the sweep, as JSON has it."""
        settings = {
            "mode": self._mode,
            "random_seed": self._seed,
            "sampler": type(self._sampler).__name__,
            "pruner": type(self._pruner).__name__,
            "grid": _find_grid(self._sampler),
        }
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return plain

    def _conclude(self, journal: _Journal) -> list[TrialResult]:
        """Print and draw the trials of the sweep, and return them."""
        with journal.lock:
            results = journal.list_results()
            running = sorted(each.number for each in results if each.state == "running")
            if not running:
                files.remove_folder(self.folder / _LOCKS)
            _print("\n".join(_make_table(results)))
            try:
                _draw(results, self._mode, self.folder / _PICTURE)
            except ImportError:
                _print(f'For a picture, {_PICTURE}: pip install "helios-trainer[report]"')
        if running:
            _print(
                f"Still running in other processes: {count_text(len(running), 'trial')} "
                f"({', '.join(map(str, running))}). If they end early, run the script again."
            )
        return results


class Trial(optuna.Trial):
    """A trial: Optuna's, with a folder.

    Its ``suggest_*`` methods return the parameters. Call them before you read :attr:`folder`.
    """

    def __init__(self, journal: _Journal, study: optuna.Study, trial_id: int, seed: int) -> None:
        super().__init__(study, trial_id)
        self._journal = journal
        self._seed = seed
        self._suggested: dict[str, Any] = {}
        self._folder: Path | None = None
        self._is_pruned: bool | None = None
        _reseed(study.sampler, seed, self.number, "")
        # Samples now what Optuna samples together, before something else draws.
        _ = self.relative_params

    @property
    def folder(self) -> Path:
        """Folder of the trial, named after its number and a hash of its parameters.

        Pass it as ``Trainer(chkpt_root=trial.folder)``.

        Raises:
            RunMismatchError: if the trial was started with other parameters.
        """
        if self._folder is None:
            self._folder = self._journal.open_folder(self.number, self._suggested)
        return self._folder

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that this start has suggested so far, by name."""
        return dict(self._suggested)

    def pruning(self, metric: str, *, plug_id: str = "pruning") -> Plugin:
        """Return a plugin that reports a score after each validation, and ends a poor trial.

        The run is then finished after that validation, and ``fit`` returns; the score that the
        objective returns is ignored. A resumed run repeats validations; each counts once.

        Args:
            metric: name of the validation score.
            plug_id: unique id of the plugin.
        """
        return _Pruning(self._journal, self._trial_id, metric, plug_id)

    def report(self, value: float, step: int) -> None:
        """Report a score at a step, for the pruner; a repeated report counts once.

        Only objectives that do not use :meth:`pruning` need it.
        """
        self._is_pruned = self._journal.report(self._trial_id, step, float(value))

    def should_prune(self) -> bool:
        """Return whether the pruner has ended the trial, at the last step that was reported."""
        if self._is_pruned is None:
            return self._journal.is_pruned(self._trial_id)
        return self._is_pruned

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if self._folder is not None and name not in self._suggested:
            raise UsageError(
                f"Trial {self.number} must suggest all parameters before its folder is read, which "
                f"is named after them, but {name!r} comes later. Move it up."
            )
        self._check_range(name, distribution)
        _reseed(self.study.sampler, self._seed, self.number, name)
        value = super()._suggest(name, distribution)
        # As the journal returns it after a kill: a grid may hold 1 where the parameter is 1.0.
        value = distribution.to_external_repr(distribution.to_internal_repr(value))
        self._suggested[name] = value
        return value

    def _check_range(self, name: str, distribution: BaseDistribution) -> None:
        """Refuse another range than that of earlier trials, and of earlier starts of this one.

        Raises:
            RunMismatchError: with both ranges.
        """
        for trial in self.study.get_trials(deepcopy=False):
            before = trial.distributions.get(name)
            if before and distribution_to_json(before) != distribution_to_json(distribution):
                raise RunMismatchError(
                    f"The range of {name!r} must be the same in all trials of a sweep, but in "
                    f"trial {trial.number} it was {before}, and now it is {distribution}. Restore "
                    "it, give the parameter another name, or pass another folder to the sweep. A "
                    "range must not depend on other parameters."
                )


def _perform(
    trial: Trial, objective: Callable[[Trial], float], catch: tuple[type[Exception], ...]
) -> None:
    """Train a trial, and write into the journal how it has ended."""
    score: float | None = None
    try:
        score = _get_score(trial, objective)
        state = TrialState.FAIL if math.isnan(score) else TrialState.COMPLETE
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except catch as error:
        state = TrialState.FAIL
        _LOGGER.warning("Trial %d: %s: %s", trial.number, type(error).__name__, error)
    if isinstance(trial.study.sampler, GridSampler):
        # At its end, a grid stops what does not run here: Study.optimize.
        trial.study.sampler = RandomSampler()
    told = trial.study.tell(trial, score if state is TrialState.COMPLETE else None, state)
    params = ", ".join(f"{name} {_as_text(value)}" for name, value in told.params.items())
    shown = "" if told.value is None else f" with {number_text(told.value)}"
    _print(f"Trial {trial.number} {_STATES[state]}{shown}: {params}")


def _get_score(trial: Trial, objective: Callable[[Trial], float]) -> float:
    """Train a trial, and return its score.

    Raises:
        TrialPruned: if the pruner has ended it, whatever the objective returns.
        UsageError: if the objective returns no number.
    """
    value: Any = objective(trial)
    if trial.should_prune():
        raise optuna.TrialPruned
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"The objective of a sweep must return a number, got {value!r} of trial "
            f"{trial.number}. Return the score, such as model.metrics['loss']."
        ) from None


class _Pruning(Plugin):
    """Reports scores of a trial to its sweep, in the rank that has them.

    Args:
        journal: the journal of the sweep.
        trial_id: the trial.
        metric: name of the score.
        plug_id: unique id of the plugin.
    """

    _internals: ClassVar[str] = "_is_training _journal _metric _trial_id"

    monitor = True

    def __init__(self, journal: _Journal, trial_id: int, metric: str, plug_id: str) -> None:
        super().__init__(plug_id)
        self._journal = journal
        self._trial_id = trial_id
        self._metric = metric
        self._is_training = False

    def setup(self) -> None:
        """Wait for the start of training."""
        self._is_training = False

    def on_training_start(self) -> None:
        """Start reporting: after a sanity check, and not in ``Trainer.validate``."""
        self._is_training = not self.context.is_replay

    def on_validation_end(self, validation_cycle: int) -> None:
        """Report the score, and request the end of the run if the pruner decides so."""
        if not self._is_training:
            return
        own = read_score(self.context.model.metrics, self._metric, "Trial.pruning")
        score = self.context.gather(own)[0]
        is_pruned = self.context.global_rank == 0 and self._journal.report(
            self._trial_id, validation_cycle, score
        )
        if self.context.agree(is_pruned):
            self.context.request_stop(f"the trial is pruned: {self._metric} is {score}")

    def teardown(self) -> None:
        """Stop reporting."""
        self._is_training = False


def _reseed(sampler: BaseSampler, seed: int, number: int, name: str) -> None:
    """Seed a sampler for one parameter of a trial; for all that it samples together, ``""``."""
    key = rng.key(seed, "sweep", number, name)
    # Optuna's reseed_rng takes no seed.
    parts = [sampler] if isinstance(sampler, RandomSampler | TPESampler) else []
    if isinstance(sampler, TPESampler):
        parts.append(sampler._random_sampler)  # noqa: SLF001
    for part in parts:
        part._rng.rng.seed([key & _MASK32, key >> 32])  # noqa: SLF001


def _find_grid(sampler: BaseSampler) -> Mapping[str, Sequence[Any]] | None:
    """Return the values of a grid by parameter; ``None`` for another sampler."""
    return sampler._search_space if isinstance(sampler, GridSampler) else None  # noqa: SLF001


class _Storage(JournalStorage):
    """Optuna's storage, which can hold back what a pruner writes.

    Attributes:
        held: what is held back, by name; ``None`` to write it.
    """

    held: dict[str, Any] | None = None

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        if self.held is None:
            super().set_trial_system_attr(trial_id, key, value)
        else:
            self.held[key] = value


class _JournalLock(JournalFileOpenLock):
    """The lock of a sweep's folder: it ends with its process, and may be acquired again inside.

    Args:
        path: the journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._folder_lock = FolderLock(path.parent)
        self._depth = 0

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> bool:
        if self._depth == 0:
            _wait_for(self._folder_lock)
            self._cut_unfinished_line()
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._folder_lock.release()

    def _cut_unfinished_line(self) -> None:
        """Cut off a line that a kill has left unfinished: the next one would be appended to it."""
        if not self._path.exists():
            return
        with self._path.open("rb") as journal:
            journal.seek(max(journal.seek(0, os.SEEK_END) - 1, 0))
            is_finished = journal.read() in (b"", b"\n")
        if not is_finished:
            files.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)


def _wait_for(lock: FolderLock) -> None:
    """Acquire a lock that will be free soon.

    Raises:
        FolderInUseError: if it is not.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            lock.acquire()
        except FolderInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_BETWEEN_TRIES)
        else:
            return


class _Journal:
    """The journal of a sweep as this process sees it; the processes of a trial open their own.

    Args:
        folder: the folder of the sweep.
        pruner: a pruner that nobody has asked yet.

    Attributes:
        lock: held while something is written, and while a trial is taken.
    """

    def __init__(self, folder: Path, pruner: BasePruner) -> None:
        files.make_folder(folder)
        self._folder = folder
        self._pruner = pruner
        path = folder / _JOURNAL
        self.lock = _JournalLock(path)
        self._storage = _Storage(JournalFileBackend(str(path), lock_obj=self.lock))
        files.fsync_folder(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Journal, (self._folder, self._pruner)

    @property
    def _study_id(self) -> int:
        return self._storage.get_study_id_from_name(_STUDY)

    def begin(self, mode: Mode, settings: Mapping[str, Any]) -> None:
        """Create the study, or compare its settings.

        Raises:
            RunMismatchError: if it was created with others.
        """
        with self.lock:
            try:
                study = self._study_id
            except KeyError:
                study = self._storage.create_new_study([_DIRECTIONS[mode]], _STUDY)
            before = self._storage.get_study_user_attrs(study).get(_SETTINGS)
            if before is None:
                self._storage.set_study_user_attr(study, _SETTINGS, settings)
        if before not in (None, settings):
            raise RunMismatchError(
                f"The sweep in {self._folder} was started with other settings: "
                f"{_describe_difference(before, settings)}. Restore them, or pass another folder."
            )

    @contextlib.contextmanager
    def taking(self, num_trials: int, sampler: BaseSampler, seed: int) -> Iterator[Trial | None]:
        """Yield a trial that no other process has, locked; ``None`` if there is none.

        That is one that a process has left, or else a new one.

        Args:
            num_trials: number of trials in the sweep.
            sampler: the sampler of the sweep.
            seed: its seed.
        """
        with self.lock:
            found = self._take(num_trials)
        if found is None:
            yield None
            return
        trial_id, number, lock = found
        try:
            # Ranks outlive a killed script for a moment.
            for path in self._list_folders(number, f"*/{LOCK_NAME}"):
                run_lock = FolderLock(path.parent)
                _wait_for(run_lock)
                run_lock.release()
            # What earlier trials left in the memory of a sampler or a pruner must not count.
            study = optuna.load_study(
                study_name=_STUDY,
                storage=self._storage,
                sampler=copy.deepcopy(sampler),
                pruner=copy.deepcopy(self._pruner),
            )
            yield Trial(self, study, trial_id, seed)
        finally:
            lock.release()

    def _take(self, num_trials: int) -> tuple[int, int, FolderLock] | None:
        """Return the id and the number of a trial, and its lock; ``None`` if there is none."""
        study, storage = self._study_id, self._storage
        trials = storage.get_all_trials(study, deepcopy=False)
        for number in range(min(len(trials) + 1, num_trials)):
            if number < len(trials) and trials[number].state is not TrialState.RUNNING:
                continue
            lock = FolderLock(self._folder / _LOCKS / f"{number:04d}")
            with contextlib.suppress(FolderInUseError):
                lock.acquire()
                if number == len(trials):
                    storage.create_new_trial(study)
                trial_id = storage.get_trial_id_from_study_id_trial_number(study, number)
                return trial_id, number, lock
        return None

    def _list_folders(self, number: int, inside: str = "") -> list[Path]:
        """Return the folders of a trial: one, if it had the same parameters at each start."""
        return sorted((self._folder / _RUNS).glob(f"{number:04d}-*/{inside}"))

    def open_folder(self, number: int, params: Mapping[str, Any]) -> Path:
        """Return the folder of a trial, which is created at its first start.

        Raises:
            RunMismatchError: if the trial was started with other parameters.
        """
        folder = self._find_folder(number, params)
        for other in self._list_folders(number):
            if other != folder:
                path = other / _PARAMS
                before = json.loads(path.read_text("utf-8")) if path.is_file() else {}
                raise RunMismatchError(
                    f"Trial {number} was started with other parameters ({other}): "
                    f"{_describe_difference(before, params)}. Restore what suggests them, or pass "
                    "another folder to the sweep."
                )
        files.make_folder(folder)
        if not (folder / _PARAMS).is_file():
            files.write_text_durably(folder / _PARAMS, _as_json(params))
        return folder

    def _find_folder(self, number: int, params: Mapping[str, Any]) -> Path:
        mark = blake2b(_as_json(params).encode(), digest_size=4).hexdigest()
        return self._folder / _RUNS / f"{number:04d}-{mark}"

    def report(self, trial_id: int, step: int, score: float) -> bool:
        """Write a score of a trial, and return whether the trial is to end.

        The pruner decides once about a step. Its decision is written in one line with what it
        remembers of the trial, so that after a kill it decides again from the same state.
        """
        storage, name = self._storage, _DECISION.format(step)
        decision = storage.get_trial(trial_id).system_attrs.get(name)
        if decision is None:
            storage.set_trial_intermediate_value(trial_id, step, score)
            study = optuna.load_study(study_name=_STUDY, storage=storage)
            pruner = copy.deepcopy(self._pruner)
            storage.held = {}
            try:
                is_pruned = pruner.prune(study, storage.get_trial(trial_id))
                decision = {"score": score, "is_pruned": bool(is_pruned), "attrs": storage.held}
            finally:
                storage.held = None
            storage.set_trial_system_attr(trial_id, name, decision)
        elif decision["score"] != score and not math.isnan(score):
            _LOGGER.warning(
                "A trial of the sweep has reported %s at step %d, but %s before it was resumed: "
                "it does not repeat the same bits. The earlier score counts.",
                score,
                step,
                decision["score"],
            )
        known = storage.get_trial(trial_id).system_attrs
        for key, value in decision["attrs"].items():
            if key not in known:
                storage.set_trial_system_attr(trial_id, key, value)
        return bool(decision["is_pruned"])

    def is_pruned(self, trial_id: int) -> bool:
        """Return whether a pruner has ended a trial."""
        trial = self._storage.get_trial(trial_id)
        names = [_DECISION.format(step) for step in trial.intermediate_values]
        return any(trial.system_attrs.get(name, {}).get("is_pruned") for name in names)

    def list_results(self) -> list[TrialResult]:
        """Return the trials of the sweep: the best first, then pruned, failed and running ones."""
        study = self._study_id
        found = [
            TrialResult(
                trial.number,
                trial.params,
                trial.value,
                _STATES[trial.state],
                self._find_folder(trial.number, trial.params),
            )
            for trial in self._storage.get_all_trials(study)
        ]
        is_min = self._storage.get_study_directions(study) == [StudyDirection.MINIMIZE]
        order = [*_STATES.values()]

        def place(each: TrialResult) -> tuple[int, float, int]:
            score = math.inf if each.score is None else each.score if is_min else -each.score
            return order.index(each.state), score, each.number

        return sorted(found, key=place)


def _as_json(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)


def _describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = sorted({*before, *now})
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in names}
    return ", ".join(f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new)


def _as_text(value: Any) -> str:
    return number_text(value) if isinstance(value, float) else str(value)


def _print(text: str) -> None:
    """Print on the error stream, above any progress bars."""
    tqdm.write(text, file=sys.stderr)


def _make_table(results: Sequence[TrialResult]) -> list[str]:
    """Return the lines of a table of trials."""
    names = list(dict.fromkeys(name for each in results for name in each.params))
    columns = {"trial": ">", "score": ">", **dict.fromkeys(names, ">"), "state": "<", "folder": "<"}
    rows = [
        [
            str(each.number),
            "-" if each.score is None else number_text(each.score),
            *(_as_text(each.params[name]) if name in each.params else "-" for name in names),
            each.state,
            each.folder.name,
        ]
        for each in results
    ]
    return [line.rstrip() for line in table(columns, rows)]


def _draw(results: Sequence[TrialResult], mode: Mode, target: Path) -> None:
    """Draw the scores of trials in their order, and the best one so far.

    Raises:
        ImportError: without matplotlib.
    """
    # Only this needs matplotlib.
    from helios.reports.charts import draw_trials

    scores: dict[str, dict[int, float]] = {"finished": {}, "pruned": {}}
    best: dict[int, float] = {}
    newest: float | None = None
    for each in sorted(results, key=lambda each: each.number):
        if each.score is None or not math.isfinite(each.score):
            continue
        scores[each.state][each.number] = each.score
        if each.state == "finished" and is_better(each.score, newest, mode):
            newest = each.score
        if newest is not None:
            best[each.number] = newest
    draw_trials(scores, best, target)
