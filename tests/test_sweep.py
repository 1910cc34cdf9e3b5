"""Sweeps: killed anywhere, they suggest and train what an undisturbed one does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401 - which each child would import
import optuna
import pytest
import torch
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch.utils.data import TensorDataset

import helios
from helios.cli import main
from helios.distributed.collectives import TORCHRUN_VARIABLES
from helios.storage import files
from helios.storage.content_hash import fingerprint
from helios.sweep import Sweep, Trial, TrialResult
from tests.support import tier
from tests.support.kills import kill_self, run_in_child
from tests.support.scripts import call, run_as_python

KILLED = -signal.SIGKILL
Objective = Callable[[Trial], float]
MAKERS: dict[str, Callable[[], BaseSampler]] = {
    "random": lambda: RandomSampler(seed=3),
    "tpe": lambda: TPESampler(n_startup_trials=3),
    "tpe-group": lambda: TPESampler(n_startup_trials=3, multivariate=True, group=True),
    "grid": lambda: GridSampler({"x": [-2, 0, 3.5], "kind": ["a", "b"], "n": [1, 4]}),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let Optuna log nothing."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


class Data(helios.DataModule):
    """Points of a line, in four batches."""

    def setup(self) -> None:
        x = torch.linspace(-1, 1, 16).unsqueeze(1)
        self.train_dataset = self.create_dataset(
            TensorDataset(x, x.sin()), batch_size=4, shuffle=True
        )
        self.valid_dataset = self.create_dataset(TensorDataset(x, x.sin()), batch_size=8)


class Net(helios.Model):
    """A small network whose size and rate are parameters."""

    def __init__(self, rate: float, width: int) -> None:
        super().__init__()
        self.rate, self.width = rate, width

    def setup(self) -> None:
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, self.width), torch.nn.Dropout(0.2), torch.nn.Linear(self.width, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate, momentum=0.5)

    def train_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def valid_step(self, batch: Any) -> None:
        self.log("error", self.train_step(batch))


class Ticking(helios.Plugin):
    """Calls a function after each batch."""

    unsaved = ("tick",)

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__("ticking")
        self.tick = tick

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        self.tick()


def train(
    folder: Path, rate: float, width: int, *plugins: helios.Plugin, **options: Any
) -> tuple[Net, helios.Trainer]:
    options = {"use_cpu": True, "print_banner": False, "max_epochs": 3} | options
    model = Net(rate, width)
    trainer = helios.Trainer(chkpt_root=folder, plugins=plugins, **options)
    trainer.fit(model, Data())
    return model, trainer


def nothing() -> None:
    """Do nothing."""


def train_trial(trial: Trial, tick: Callable[[], None] = nothing, **options: Any) -> float:
    rate = trial.suggest_float("rate", 1e-3, 0.5, log=True)
    width = trial.suggest_int("width", 2, 8)
    plugins = (trial.pruning("error"), Ticking(tick))
    model, _ = train(trial.folder, rate, width, *plugins, params=trial.params, **options)
    return float(model.metrics["error"])


def compute(trial: Trial) -> float:
    """Answer without training, after three reports and more."""
    x = trial.suggest_float("x", -4, 4)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    n = trial.suggest_int("n", 1, 5)
    score = x * x + (kind == "a") + n / 4
    assert trial.folder.is_dir()
    for step in range(1, 4 + trial.number):
        trial.report(score + 1 / step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return score


def read(folder: Path) -> list[dict[str, Any]]:
    """Return all that a sweep says of its trials, and the bits of their newest checkpoints."""
    (study,) = optuna.get_all_study_summaries(
        storage := JournalStorage(JournalFileBackend(str(folder / "journal.jsonl")))
    )
    found = []
    for trial in optuna.load_study(study_name=study.study_name, storage=storage).trials:
        (run,) = (folder / "runs").glob(f"{trial.number:04d}-*")
        found.append(
            {
                "number": trial.number,
                "state": trial.state.name,
                "params": trial.params,
                "values": trial.values,
                "reported": trial.intermediate_values,
                "folder": run.name,
                "weights": read_weights(run),
            }
        )
    return found


def read_weights(run: Path) -> str | None:
    """Return a fingerprint of the model in the newest checkpoint of a trial, if there is one."""
    path = helios.find_last_checkpoint(run / "net")
    return None if path is None else fingerprint(helios.load_checkpoint(path)["model"])


class Stagnation(optuna.pruners.BasePruner):
    """Prunes a trial whose last score is no better than the one before."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        scores = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        return len(scores) > 1 and scores[-1] >= scores[-2]


class Death:
    """Counts what a sweep does; kills the process at the n-th time.

    Args:
        at: when; 0 for never.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            kill_self()

    def watch_journal(self) -> None:
        """Count before and after each line of the journal; a kill leaves one half written."""
        append = JournalFileBackend.append_logs

        def append_counting(backend: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
            if self.count + 1 == self.at:
                with Path(backend._file_path).open("ab") as journal:
                    journal.write(json.dumps(logs[0]).encode()[:40])
            self.tick()
            append(backend, logs)
            self.tick()

        JournalFileBackend.append_logs = append_counting

    def watch_files(self) -> None:
        """Count the file operations of saves, in this process."""
        for name in ("fsync", "replace", "unlink", "make_folder"):
            setattr(files, name, self._counted(getattr(files, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return operation(*args, **kwargs)

        return counted


def sweep_in_child(
    folder: Path,
    death: Death,
    num_trials: int,
    objective: Callable[[Trial, Death], float],
    **options: Any,
) -> tuple[int, int]:
    """Run a sweep in a forked child; returns its exit code, and how far it has counted."""

    def work() -> int:
        death.watch_journal()
        death.watch_files()
        Sweep(folder, "min", **options).run(lambda trial: objective(trial, death), num_trials)
        return death.count

    outcome = folder.with_suffix(".count")
    code = run_in_child(work, outcome)
    return code, pickle.loads(outcome.read_bytes()) if code == 0 else 0


def check_kills(folder: Path, num_trials: int, num_kills: int) -> None:
    """Kill a sweep so many times; it must end as an undisturbed one."""

    def objective(trial: Trial, death: Death) -> float:
        return train_trial(trial, death.tick)

    def start(name: str, at: int) -> tuple[int, int]:
        options = {"sampler": TPESampler(n_startup_trials=3), "pruner": MedianPruner(2)}
        return sweep_in_child(folder / name, Death(at), num_trials, objective, **options)

    # What a first run imports, each child would import.
    train(folder / "warm", 0.1, 2)
    code, count = start("whole", 0)
    assert code == 0
    whole = read(folder / "whole")
    assert {"COMPLETE", "PRUNED"} == {trial["state"] for trial in whole}
    assert all(trial["weights"] for trial in whole)
    places = random.Random(6)
    for _ in range(num_kills):
        # All of them together do not reach the end.
        code, _ = start("killed", places.randint(1, count // (num_kills + 1)))
        assert code == KILLED
    assert start("killed", 0)[0] == 0
    assert read(folder / "killed") == whole
    assert {path.name for path in (folder / "killed").iterdir()} == {
        *("journal.jsonl", "runs", "sweep.png")
    }


def test_a_sweep_killed_four_times_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    check_kills(tmp_path, 4, 4)


@pytest.mark.full
def test_thirty_trials_killed_twenty_times_end_as_undisturbed_ones(tmp_path: Path) -> None:
    check_kills(tmp_path, 30, 20)


def test_a_kill_at_any_line_of_the_journal_is_survived(tmp_path: Path) -> None:
    def objective(trial: Trial, death: Death) -> float:
        return compute(trial)

    def start(name: str, death: Death) -> tuple[int, int]:
        options = {"sampler": TPESampler(n_startup_trials=2)}
        options["pruner"] = SuccessiveHalvingPruner(1, 2)
        return sweep_in_child(tmp_path / name, death, 4, objective, **options)

    code, count = start("whole", Death())
    assert code == 0
    whole = read(tmp_path / "whole")
    assert "PRUNED" in {trial["state"] for trial in whole}
    for at in range(1, count + 1, 1 if tier.is_full() else 31):
        name = f"killed-{at}"
        assert start(name, Death(at))[0] == KILLED
        assert start(name, Death())[0] == 0
        assert read(tmp_path / name) == whole, at


class Stopped(BaseException):
    """Ends a start of a sweep in this process."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_is_suggested_does_not_depend_on_starts(
    make: Callable[[], BaseSampler], tmp_path: Path
) -> None:
    """Each trial is interrupted once before its last parameter, and once behind it."""
    starts: dict[int, int] = {}

    def disturbed(trial: Trial) -> float:
        starts[trial.number] = starts.get(trial.number, 0) + 1
        if starts[trial.number] == 1:
            trial.suggest_float("x", -4, 4)
            raise Stopped
        score = compute(trial)
        if starts[trial.number] == 2:
            raise Stopped
        return score

    def start(name: str, objective: Objective) -> list[TrialResult]:
        sweep = Sweep(tmp_path / name, "min", random_seed=5, sampler=make(), pruner=NopPruner())
        return sweep.run(objective, 10)

    whole = start("whole", compute)
    while True:
        with contextlib.suppress(Stopped):
            results = start("disturbed", disturbed)
            break
    assert [vars(each) | {"folder": each.folder.name} for each in results] == [
        vars(each) | {"folder": each.folder.name} for each in whole
    ]
    assert starts == dict.fromkeys(range(10), 3)
    assert len({json.dumps(each.params) for each in whole}) == 10
    assert all(each.folder.is_dir() for each in whole)
    assert [each.score for each in whole] == sorted(each.score for each in whole)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: MedianPruner(2),
        lambda: SuccessiveHalvingPruner(1, 2),
        lambda: HyperbandPruner(1, "auto", 2),
    ],
    ids=["median", "halving", "hyperband"],
)
def test_what_is_pruned_does_not_depend_on_starts(
    make: Callable[[], optuna.pruners.BasePruner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial is interrupted once in its suggestions, in each decision and after each report."""
    passed = set()
    decide = type(make()).prune

    def stop_once(*place: Any) -> None:
        if place not in passed:
            passed.add(place)
            raise Stopped

    def decide_and_stop(pruner: Any, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        decision = decide(pruner, study, trial)
        stop_once("decision", trial.number, trial.last_step)
        return decision

    def disturbed(trial: Trial) -> float:
        report = trial.report

        def report_and_stop(value: float, step: int) -> None:
            report(value, step)
            stop_once("report", trial.number, step)

        trial.report = report_and_stop
        trial.suggest_float("x", -4, 4)
        stop_once("x", trial.number)
        return compute(trial)

    def start(name: str, objective: Objective) -> None:
        sampler = TPESampler(n_startup_trials=3)
        Sweep(tmp_path / name, "min", sampler=sampler, pruner=make()).run(objective, 12)

    start("whole", compute)
    with monkeypatch.context() as patch:
        patch.setattr(type(make()), "prune", decide_and_stop)
        while True:
            with contextlib.suppress(Stopped):
                start("disturbed", disturbed)
                break
    whole = read(tmp_path / "whole")
    assert read(tmp_path / "disturbed") == whole
    assert {"COMPLETE", "PRUNED"} == {trial["state"] for trial in whole}
    assert len(passed) == 12 + 2 * sum(len(trial["reported"]) for trial in whole)


def test_another_seed_suggests_other_parameters_and_is_refused_in_the_same_folder(
    tmp_path: Path,
) -> None:
    def start(folder: str, **options: Any) -> dict[str, Any]:
        (found,) = Sweep(tmp_path / folder, "min", **options).run(compute, 1)
        return found.params

    assert start("a") == start("b", random_seed=6691) != start("c", random_seed=2)
    with pytest.raises(helios.RunMismatchError, match="random_seed: 6691 -> 2"):
        start("a", random_seed=2)
    with pytest.raises(helios.RunMismatchError, match="sampler: TPESampler -> RandomSampler"):
        start("a", sampler=RandomSampler())


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_other_samplers_and_wrong_uses_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(helios.ArgumentError, match="QMCSampler"):
        Sweep(tmp_path, "min", sampler=optuna.samplers.QMCSampler())
    with pytest.raises(helios.ArgumentError, match="mode"):
        Sweep(tmp_path, "best")  # type: ignore[arg-type]
    with pytest.raises(helios.ArgumentError, match="num_trials"):
        Sweep(tmp_path, "min").run(compute)
    with pytest.raises(helios.UsageError, match="None of trial 0"):
        Sweep(tmp_path, "min").run(lambda trial: None, 1)
    late = lambda trial: trial.folder and trial.suggest_float("late", 0, 1)  # noqa: E731
    with pytest.raises(helios.UsageError, match="'late'"):
        Sweep(tmp_path / "late", "min").run(late, 1)
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2" if name.endswith("SIZE") else "0")
    with pytest.raises(helios.UsageError, match="nproc"):
        Sweep(tmp_path, "min").run(compute, 1)


def test_a_trial_with_other_parameters_than_before_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    def stop(trial: Trial) -> float:
        trial.suggest_float("x", -4, 4)
        trial.suggest_int("dropped", 1, 5)
        assert trial.folder.parent == tmp_path / "runs"
        raise Stopped

    def edited(trial: Trial) -> float:
        trial.suggest_float("x", -4, 4)
        trial.suggest_int("added", 3, 3)
        return float(len(trial.folder.name))

    with pytest.raises(Stopped):
        Sweep(tmp_path, "min").run(stop, 1)
    with pytest.raises(helios.RunMismatchError, match=r"added: none -> 3, dropped: \d -> none"):
        Sweep(tmp_path, "min").run(edited, 1)


def test_an_edited_range_is_refused_in_a_new_trial(tmp_path: Path) -> None:
    def compute_below(highest: int, trial: Trial) -> float:
        return float(trial.suggest_int("n", 1, highest))

    sweep = Sweep(tmp_path, "min")
    sweep.run(partial(compute_below, 5), 1)
    with pytest.raises(helios.RunMismatchError, match=r"range of 'n' .*high=5, .*\(high=3, "):
        sweep.run(partial(compute_below, 3), 2)


def test_a_trial_that_fails_as_expected_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def objective(trial: Trial) -> float:
        if trial.number == 1:
            raise FloatingPointError("diverged")
        return [compute(trial), 0.0, float("nan")][trial.number]

    sweep = Sweep(tmp_path, "min")
    results = sweep.run(objective, 3, catch=(FloatingPointError,))
    assert [(each.number, each.state) for each in results] == [
        (0, "finished"),
        (1, "failed"),
        (2, "failed"),
    ]
    assert sweep.run(objective, 3) == results
    assert capsys.readouterr().err.count("Trial 1 failed") == 1


def test_a_pruned_run_ends_regularly_and_stays_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = []

    def objective(trial: Trial) -> float:
        rate = [0.1, 0.0][trial.suggest_int("kind", 0, 1)]
        model, trainer = train(trial.folder, rate, 4, trial.pruning("error"))
        lengths.append(trainer.exit_code)
        assert trial.should_prune() == (rate == 0.0)
        return float(model.metrics["error"])

    sampler = GridSampler({"kind": [0, 1]}, seed=2)
    pruner = Stagnation()
    results = Sweep(tmp_path, "min", sampler=sampler, pruner=pruner).run(objective)
    assert {each.params["kind"]: each.state for each in results} == {0: "finished", 1: "pruned"}
    assert Sweep(tmp_path, "min", sampler=sampler, pruner=pruner).run(objective) == results
    assert lengths == [0, 0]
    pruned = read(tmp_path)[results[1].number]
    assert len(pruned["reported"]) == 2
    assert results[1].score == pruned["reported"][1]
    printed = capsys.readouterr().err
    assert "ERROR" not in printed
    assert "the trial is pruned" in printed


def _train_here(folder: Path, num_trials: int) -> int:
    def work() -> None:
        Sweep(folder, "min", sampler=RandomSampler()).run(train_trial, num_trials)

    return run_in_child(work, folder.with_suffix(f".{os.getpid()}"))


def test_several_workers_train_each_trial_once_as_a_lone_run(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_train_here, args=(folder, 4)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    trials = read(folder)
    assert len(trials) == 4
    for trial in trials:
        num_epochs = len(trial["reported"])
        place = tmp_path / "lone" / trial["folder"]
        train(place, **trial["params"], max_epochs=num_epochs)
        assert read_weights(place) == trial["weights"] is not None
        starts = (folder / "runs" / trial["folder"] / "net" / "run.jsonl").read_text()
        assert starts.count('"event": "start"') == 1


def test_a_living_trial_is_left_alone_and_a_dead_one_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def wait(trial: Trial) -> float:
        trial.suggest_float("x", -4, 4)
        begun.set()
        signal.pause()
        return 0.0

    def start() -> list[tuple[int, str]]:
        sweep = Sweep(tmp_path, "min", pruner=NopPruner())
        return [(each.number, each.state) for each in sweep.run(compute, 2)]

    worker = context.Process(target=lambda: Sweep(tmp_path, "min", pruner=NopPruner()).run(wait, 2))
    worker.start()
    assert begun.wait(60)
    assert start() == [(1, "finished"), (0, "running")]
    assert "other processes: 1 trial (0)" in capsys.readouterr().err
    worker.kill()
    worker.join()
    worker.close()
    assert sorted(start()) == [(0, "finished"), (1, "finished")]


@pytest.mark.full
def test_trials_in_two_processes_are_those_in_one(tmp_path: Path) -> None:
    for count in (1, 2):
        sweep = Sweep(tmp_path / str(count), "min", pruner=Stagnation())
        sweep.run(partial(train_trial, num_replicas=2, nproc=count), 1)
    assert read(tmp_path / "2") == read(tmp_path / "1")


def test_the_end_is_a_table_a_picture_and_runs_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Sweep(tmp_path, "min").run(train_trial, 2)
    head, *rows = capsys.readouterr().err.splitlines()[-3:]
    assert head.split() == ["trial", "score", "rate", "width", "state", "folder"]
    assert [row.split()[0] for row in rows] == [str(each.number) for each in results]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert all((each.folder / "net" / "run.jsonl").is_file() for each in results)
    assert main(["compare", *map(str, (tmp_path / "runs").iterdir())]) == 0
    printed = capsys.readouterr().out
    assert all(each.folder.name in printed for each in results)
    assert "width" in printed


def test_nothing_else_imports_optuna_and_a_missing_extra_is_named(tmp_path: Path) -> None:
    code = f"""
import sys
import helios, helios.cli, helios.plugins
helios.Trainer
print([name for name in ("optuna", "helios.sweep") if name in sys.modules])
sys.modules["optuna"] = None
try:
    import helios.sweep
except ImportError as error:
    print(error)
del sys.modules["optuna"]
sys.modules["matplotlib"] = None
from helios.sweep import Sweep
print(len(Sweep({str(tmp_path)!r}, "min").run(lambda trial: trial.suggest_float("x", 0, 1), 2)))
"""
    ran = call(run_as_python, "-c", code)
    assert ran.returncode == 0, ran.stderr
    imported, error, count = ran.stdout.splitlines()
    assert imported == "[]"
    assert 'pip install "helios-trainer[sweep]"' in error
    assert count == "2"
    assert 'pip install "helios-trainer[report]"' in ran.stderr
    assert not (tmp_path / "sweep.png").exists()
