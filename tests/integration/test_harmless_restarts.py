"""What people change without meaning another run: every start resumes, and says little."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import helios
from helios.checkpoint import loading
from helios.storage import codec
from tests.integration.test_declared_params import Data, fit, newest_options
from tests.integration.test_migrated_runs import MID, RICH, migrated, start
from tests.support import signals
from tests.support.ranks import run_ranks

_STEPS = 1


@dataclasses.dataclass
class Config:
    """What scripts pass on whole."""

    workers: int = 0
    folder: str = "data"
    device: str = "cpu"
    name: str = "first"
    epochs: int = _STEPS
    verbose: bool = False
    lr: float = 0.1


KINDS: dict[str, Any] = {
    "namespace": lambda config: argparse.Namespace(**dataclasses.asdict(config)),
    "dict": dataclasses.asdict,
    "dataclass": lambda config: config,
}
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "workers": {"workers": 1},
    "folder": {"folder": "/elsewhere/data"},
    "device": {"device": "cuda:0"},
    "name": {"name": "second"},
    "epochs": {"epochs": 5},
    "verbose": {"verbose": True},
    "all": {"workers": 1, "folder": "b", "device": "cuda", "name": "c", "verbose": True},
    "all and epochs": {"workers": 1, "folder": "b", "device": "cuda", "name": "c", "epochs": 5},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "a folder that was moved": {},
    "saves": {"chkpt_frequency": 1},
    "lines and a bar": {"print_frequency": 1, "enable_progress_bar": True},
    "what is kept": {"store": helios.CheckpointStore(keep_last=1)},
    "a log file": {"enable_file_logging": True, "log_path": "logs"},
    "no evidence": {"ledger": "off"},
}


class Model(helios.Model):
    def __init__(self, config: Any, given: Any) -> None:
        super().__init__("line")
        self.config, self.given = config, given
        self.trained = 0

    unsaved = ("trained", "config", "given")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.config.lr)

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> torch.Tensor:
        self.trained += 1
        return self.net(batch.unsqueeze(1).float()).square().mean()


def _script(
    folder: Path,
    kind: str,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    total: int,
    **options: Any,
) -> int:
    """Run a script that reads its configuration from the command line."""
    words = [f"--{name}={value}" for name, value in dataclasses.asdict(config).items()]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    model = Model(config, KINDS[kind](config))
    assert _make_trainer(folder, total, **options).fit(model, Data())
    return model.trained


def _make_trainer(folder: Path, total: int, **options: Any) -> helios.Trainer:
    chosen: dict[str, Any] = {"train_unit": "iteration", "chkpt_frequency": 100} | options
    return helios.Trainer(
        total_steps=total, chkpt_root=folder, use_cpu=True, print_banner=False, **chosen
    )


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was logged before the end of the training, but for where it resumes."""
    lines = capsys.readouterr().err.splitlines()
    known = ("Training has ended", "Resumed from")
    return [line for line in lines if " - " in line and not any(map(line.__contains__, known))]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in KINDS:
            _script(folder / kind, kind, Config(), monkeypatch, total=_STEPS)
    return folder


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_that_is_passed_whole_stops_nothing(
    kind: str,
    change: str,
    begun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(begun / kind, tmp_path, dirs_exist_ok=True)
    config = dataclasses.replace(Config(), **CHANGES[change])
    assert _script(tmp_path, kind, config, monkeypatch, total=5) == 4
    lines = _lines(capsys)
    assert all("INFO" in line for line in lines), lines
    # One is that the run is longer, as it must be to go on; the other names what has changed.
    assert sum("total_steps: 1 -> 5" in line for line in lines) == 1
    assert len(lines) <= 2


def test_the_rate_by_world_size_is_one_warning(
    begun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(begun / "namespace", tmp_path, dirs_exist_ok=True)
    assert _script(tmp_path, "namespace", Config(lr=0.05), monkeypatch, total=2) == 1
    text = capsys.readouterr().err
    assert text.count("WARNING") == text.count("optimizer.lr: 0.1 -> 0.05 in setup()") == 1


def test_variables_of_a_launcher_are_not_named(
    begun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(begun / "dict", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1" if os.environ.get("OMP_NUM_THREADS") != "1" else "2")
    assert _script(tmp_path, "dict", Config(), monkeypatch, total=2) == 1
    assert len(_lines(capsys)) == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_options_without_effect_on_the_results_say_nothing(
    option: str,
    begun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = shutil.copytree(begun / "dict", tmp_path / "moved" / "runs")
    monkeypatch.chdir(tmp_path)
    assert _script(root, "dict", Config(), monkeypatch, total=3, **OPTIONS[option]) == 2
    (line,) = [line for line in _lines(capsys) if " - step " not in line]
    assert line.endswith("INFO - Changed since the checkpoint: total_steps: 1 -> 3.")


@pytest.mark.parametrize("name", [MID, RICH])
def test_a_script_of_helios_ml_resumes_its_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    migrated(tmp_path, name)
    start(tmp_path, name)
    *_, order = _lines(capsys)
    assert "The run resumes from a checkpoint of helios-ml" in order


def test_a_script_in_stages_says_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (1, 2, 3):
        fit(tmp_path, total, {"lr": 0.1 * total}, allow_changes=("params",))
    capsys.readouterr()
    for total in (1, 2, 3):
        assert fit(tmp_path, total, {"lr": 0.1 * total}, allow_changes=("params",)) == []
        (line,) = _lines(capsys)
        assert "Nothing to do" in line


def test_a_branch_under_another_name_says_nothing_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "a", 2, {"lr": 0.1})
    capsys.readouterr()
    origin = tmp_path / "a" / "line" / "line_epoch_1_iter_1.pth"
    assert fit(tmp_path / "b", 2, {"lr": 0.1}, resume=origin, name="other") == [2]
    assert _lines(capsys) == []


@pytest.mark.parametrize("version", ["2.6.0", "2.8.0+cu126", "2.11.0"])
def test_another_environment_with_another_pytorch_is_one_warning(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 2)
    (path,) = (tmp_path / "line").glob("*_iter_2.pth")
    manifest = tmp_path / "line" / "run.json"
    stored = json.loads(manifest.read_text())
    facts = stored["sections"][0]["facts"]
    facts["versions"] |= {"torch": version, "torch_build": "0"}
    # PyTorch requires one version of each, so pip changes them as well.
    facts["libraries"] |= {"torch": version, "triton": "3", "sympy": "1", "setuptools": "65"}
    facts["imported"] = [*{*facts["imported"], "triton", "sympy", "setuptools"}]
    # Another environment has other versions of what PyTorch leaves open, maybe on another system.
    facts["versions"]["numpy"] = facts["libraries"]["numpy"] = "1.20"
    facts["system"]["architecture"] = "vax"
    manifest.write_text(json.dumps(stored))
    payload = loading.load(path, []).record.to_payload()
    payload["machine"]["torch"] = version
    # Arguments that this version of the library added.
    for name in ("foreach", "fused", "differentiable"):
        del payload["options"]["found"]["settings"][f"optimizer.{name}"]
    codec.write_file(path, codec.encode(payload, where="record"), hashes=False)
    path.with_suffix(".json").unlink()
    capsys.readouterr()
    assert fit(tmp_path, 3) == [3]
    extended, warning = (line for line in _lines(capsys) if "has no sidecar" not in line)
    assert "total_steps: 2 -> 3" in extended
    assert f"torch {version} -> {torch.__version__}. Order and randomness stay exact" in warning
    assert f"versions.numpy: 1.20 -> {np.__version__} (other versions may" in warning
    assert warning.count("numpy") == 1
    assert "rounding of numbers: system.architecture: vax -> " in warning


class Collector(logging.Handler):
    """Keeps what is logged before the end of the training."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith(("Hook order", "Training has ended")):
            self.lines.append(f"{record.levelname} - {text}")


def _train_by_world_size(folder: Path, total: int, num_ranks: int, rank: int) -> list[str]:
    """Train with a rate and a parameter that are not the same everywhere; returns the log."""
    model = Model(Config(lr=0.1 * num_ranks), None)
    trainer = _make_trainer(folder, total, num_replicas=4, params={"rank": rank})
    collector, logger = Collector(), logging.getLogger("helios")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(collector)
    try:
        assert trainer.fit(model, Data())
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
    assert model.trained >= 1
    known = ("Resumed from", "The command line has changed")
    return [line for line in collector.lines if not any(map(line.__contains__, known))]


def _train_as_rank(rank: int, folder: Path, total: int, num_ranks: int) -> list[str]:
    return _train_by_world_size(folder, total, num_ranks, rank)


_EXTENDED = "INFO - Changed since the checkpoint: total_steps: 1 -> 2."


def _not_taken(new: float, old: float) -> str:
    return (
        f"WARNING - Changed since the checkpoint:\n  optimizer.lr: {old} -> {new} in setup(); "
        f'the run keeps {old} (allow_changes=("optimizer",) takes the new one)'
    )


def test_the_parameters_of_rank_0_count(tmp_path: Path) -> None:
    assert run_ranks(_train_as_rank, 2, tmp_path, 1, 2) == [[], []]
    assert newest_options(tmp_path)["params"] == {"rank": 0}


SCRIPT = """
import json, os, sys
from pathlib import Path
from tests.integration.test_harmless_restarts import _train_by_world_size

folder, total, num_ranks = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
number = int(num_ranks) or int(os.environ["WORLD_SIZE"])
lines = _train_by_world_size(Path(folder), int(total), number, rank)
if rank == 0:
    print(json.dumps(lines))
"""


def _start(tmp_path: Path, total: int, num_ranks: int, *, torchrun: int = 0) -> list[str]:
    """Start a script with python or with torchrun; returns what rank 0 has logged."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    words = [*(launcher if torchrun else []), str(script), str(tmp_path), str(total)]
    done = subprocess.run(
        [sys.executable, *words, str(num_ranks)],
        env=signals.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    return lines


@pytest.mark.full
def test_torchrun_with_fewer_processes_and_a_rate_by_their_number_says_one_line(
    tmp_path: Path,
) -> None:
    _start(tmp_path, 1, 0, torchrun=4)
    lines = _start(tmp_path, 2, 0, torchrun=2)
    assert sorted(lines) == [_EXTENDED, _not_taken(0.2, 0.4)]
    assert newest_options(tmp_path)["params"] == {"rank": 0}


@pytest.mark.full
def test_torchrun_goes_on_with_the_run_of_a_script_without_a_word(tmp_path: Path) -> None:
    _start(tmp_path, 1, 1)
    assert _start(tmp_path, 2, 1, torchrun=2) == [_EXTENDED]


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_more_processes_and_folders_of_their_own_stop_nothing(
    processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The parameters of rank 0 count.
    shared: dict[str, Any] = {"num_replicas": 2, "ledger": "off"}
    fit(tmp_path, 2, {"lr": 0.1}, nproc=3 - processes, **shared)
    capsys.readouterr()
    fit(tmp_path, 3, {"lr": 0.1}, nproc=processes, **shared)
    assert not [line for line in _lines(capsys) if "params" in line or "optimizer" in line]
