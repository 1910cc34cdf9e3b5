"""Each row of the options holds: a bad value, an idle one, ranks that differ, a changed resume."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import helios
from helios.errors import ArgumentError, ArgumentTypeError, RunMismatchError
from helios.replicas.replicas import Replicas
from helios.start.options import ROWS, Options, Scope, find_changeable
from helios.start.processes import options_that_must_match
from helios.state import Phase
from tests.start import test_arguments
from tests.support.models import Fitting

BAD: dict[str, Any] = {
    **dict.fromkeys(("src_root", "chkpt_root", "log_path", "run_path"), 3),
    **dict.fromkeys(("enable_deterministic", "enable_cudnn_benchmark", "enable_tensorboard"), 1),
    **dict.fromkeys(("enable_file_logging", "capture_warnings", "enable_progress_bar"), None),
    **dict.fromkeys(("valid_frequency", "chkpt_frequency", "print_frequency"), 0),
    **dict.fromkeys(("accumulation_steps", "num_replicas", "nproc"), 0),
    **dict.fromkeys(("max_epochs", "max_steps"), 0),
    **dict.fromkeys(("clip_norm", "clip_value", "hang_timeout"), -1.0),
    **dict.fromkeys(("init", "on_incomplete", "ledger", "sharding"), "maybe"),
    **dict.fromkeys(("early_stop_cycles", "sanity_steps", "max_restarts", "random_seed"), -1),
    **dict.fromkeys(("store", "engine", "signals", "plugins"), "one"),
    "run_name": "a/b",
    "params": 3,
    "import_prefix": None,
    "train_unit": "epochs",
    "total_steps": 2.5,
    "print_banner": 0,
    "resume": None,
    "allow_changes": ("everything",),
    "skip_batches": 3,
    "use_cpu": "yes",
    "gpus": "all",
    "precision": "fp8",
    "batch_limits": {Phase.TRAINING: 0},
}

_SAVES: dict[str, Any] = {"chkpt_root": Path("runs"), "chkpt_frequency": 1}
OTHER: dict[str, dict[str, Any]] = {
    "run_name": {"run_name": "other"},
    "random_seed": {"random_seed": 3},
    "init": {"init": "keyed"},
    "params": {"params": {"width": 3}},
    "plugins": {"plugins": [helios.plugins.LearningRateMonitor()]},
    "src_root": {"src_root": Path()},
    "import_prefix": {"import_prefix": "src", "src_root": Path()},
    "train_unit": {"train_unit": "epoch"},
    "total_steps": {"total_steps": 3},
    "max_epochs": {"max_epochs": 3},
    "max_steps": {"max_epochs": 3, "max_steps": 3},
    "valid_frequency": {"valid_frequency": 3},
    "chkpt_frequency": {**_SAVES, "chkpt_frequency": 3},
    "print_frequency": {"print_frequency": 3},
    "accumulation_steps": {"accumulation_steps": 3},
    "early_stop_cycles": {"early_stop_cycles": 3, "valid_frequency": 1},
    "enable_deterministic": {"enable_deterministic": True},
    "enable_cudnn_benchmark": {"enable_cudnn_benchmark": True},
    "enable_tensorboard": {"enable_tensorboard": True, "run_path": Path("tb")},
    "enable_file_logging": {"enable_file_logging": True, "log_path": Path("logs")},
    "capture_warnings": {"capture_warnings": True},
    "enable_progress_bar": {"enable_progress_bar": True},
    "print_banner": {"print_banner": True},
    "log_path": {"enable_file_logging": True, "log_path": Path("logs")},
    "run_path": {"enable_tensorboard": True, "run_path": Path("tb")},
    "chkpt_root": {"chkpt_root": Path("others")},
    "store": {**_SAVES, "store": helios.CheckpointStore(keep_last=3)},
    "resume": {**_SAVES, "resume": "never"},
    "allow_changes": {**_SAVES, "allow_changes": ("seed",)},
    "on_incomplete": {**_SAVES, "on_incomplete": "raise"},
    "ledger": {**_SAVES, "ledger": "off"},
    "skip_batches": {"skip_batches": (200,)},
    "signals": {"signals": helios.Signals(())},
    "engine": {"engine": helios.Engine(torch.device("cpu")), "use_cpu": None},
    "use_cpu": {"use_cpu": None},
    "gpus": {"gpus": None},
    "precision": {"precision": "bf16"},
    "clip_norm": {"clip_norm": 3.0},
    "clip_value": {"clip_value": 3.0},
    "num_replicas": {"num_replicas": 3},
    "nproc": {"nproc": 1},
    "sharding": {"sharding": "full"},
    "sanity_steps": {"sanity_steps": 3},
    "batch_limits": {"batch_limits": {Phase.VALIDATION: 3}},
    "max_restarts": {"max_restarts": 3, "nproc": 1},
    "hang_timeout": {"hang_timeout": 300.0},
}
"""Another value of each option, with what it needs."""

REFUSED_BY_NAME = {"run_name", "params"}
"""They define a run, too, but are compared in ways of their own."""
LEAVES_THE_RUN = {"chkpt_root", "resume"}
"""Another value does not continue the run from its newest checkpoint."""
ELSEWHERE = {
    *("max_epochs", "max_steps"),
    *("num_replicas", "nproc", "sharding", "gpus", "reproducibility"),
    *("src_root", "import_prefix"),
}
"""What needs several processes, a GPU or a package, or compares other things."""


def make(**options: Any) -> Options:
    given = {} if options.keys() & {"max_epochs", "max_steps"} else {"train_unit": "iteration"}
    return test_arguments.make(**{"use_cpu": True, **given, **options})


def test_each_option_has_a_bad_value_and_another_one_here() -> None:
    assert set(BAD) == set(ROWS)
    assert set(OTHER) == set(ROWS)


@pytest.mark.shows("P149")
@pytest.mark.parametrize("name", ROWS)
def test_a_bad_value_is_refused_by_the_name_of_its_option(name: str) -> None:
    given = {"use_cpu": None} if name in ("gpus", "engine") else {}
    form = rf"^Trainer\({name}=\.\.\.\) must be .+, got .+\. \w.+"
    with pytest.raises((ArgumentError, ArgumentTypeError), match=form):
        make(**{**given, name: BAD[name]})


@pytest.mark.shows("P149")
@pytest.mark.parametrize("name", ROWS)
def test_an_option_is_idle_without_what_its_row_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {key: value for key, value in OTHER[name].items() if key == name}
    if ROWS[name].idle_without:
        make(**alone)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(f"Trainer({name}=...) has no effect without ")
    caplog.clear()
    if name != "enable_cudnn_benchmark":
        make(**OTHER[name])
        assert not caplog.records


@pytest.mark.shows("P149")
@pytest.mark.parametrize("name", ROWS)
def test_ranks_that_differ_are_told_by_the_name_of_the_option(name: str) -> None:
    needed = {key: value for key, value in OTHER[name].items() if key != name}
    needed |= {"enable_tensorboard": False} if name == "run_path" else {}
    needed |= {"enable_file_logging": False} if name == "log_path" else {}
    own = options_that_must_match(make(**needed), {}, Replicas())
    other = options_that_must_match(make(**OTHER[name]), {}, Replicas())
    differing = {key for key in own | other if own.get(key) != other.get(key)}
    said = f"Trainer({name}=...)"
    if ROWS[name].scope is not Scope.NONE:
        assert said in differing
    else:
        assert not {key for key in differing if key.startswith("Trainer(")}


class Data(helios.DataModule):
    def setup(self) -> None:
        numbers = TensorDataset(torch.arange(60.0).reshape(12, 5))
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(numbers, params)
        self._valid_dataset = self._create_dataset(numbers, params)


class Scored(Fitting):
    def valid_step(self, batch: Any, step: int) -> dict[str, Any]:
        return {"score": (self.net(batch[0]).sum(), 1)}


def _fit(**options: Any) -> bool:
    given = {"train_unit": "iteration", "total_steps": 2, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **_SAVES, **options}).fit(Scored(), Data())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was trained for a step."""
    folder = tmp_path_factory.mktemp("saved")
    _fit(total_steps=1, params={"width": 1}, chkpt_root=folder / "runs")
    return folder / "runs"


@pytest.mark.shows("P149")
@pytest.mark.parametrize("name", sorted(ROWS.keys() - LEAVES_THE_RUN - ELSEWHERE))
def test_another_value_stops_a_resume_if_it_defines_the_run(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "runs")
    options = {"params": {"width": 1}, **OTHER[name]}
    if ROWS[name].scope is not Scope.RUN and name not in REFUSED_BY_NAME:
        assert _fit(**options)
        return
    with pytest.raises(RunMismatchError) as caught:
        _fit(**options)
    if name in REFUSED_BY_NAME:
        return
    assert f"{name}: " in str(caught.value)
    assert name in find_changeable()
    assert _fit(**options, allow_changes=(name,))
