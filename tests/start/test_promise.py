"""The level that a run reaches: what banner and sidecars say, and what stands in its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import helios
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.distributed.train_script import Module, Net, parse


class Counting(Net):
    count = 0

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.count += 1
        return super().train_step(batch, state)


class Synced(Net):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)


def fit(
    folder: Path,
    *plugins: Plugin,
    model: type[Net] = Net,
    data: type[Module] = Module,
    **options: Any,
) -> None:
    trainer = helios.Trainer(
        **{
            "train_unit": "iteration",
            "total_steps": 2,
            "chkpt_frequency": 1,
            "chkpt_root": folder,
            "use_cpu": True,
            "plugins": plugins,
            **options,
        }
    )
    trainer.fit(model("net"), data(parse([])))


def levels(folder: Path) -> list[str]:
    paths = sorted((folder / "net").glob("*_iter_*.json"))
    return [json.loads(path.read_text())["level"] for path in paths]


@pytest.mark.shows("S58")
def test_what_a_step_changes_lowers_the_level_at_once_and_is_named_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the sidecar, whose banner was shown before."""
    fit(tmp_path, model=Counting, num_replicas=2)
    assert levels(tmp_path) == ["restart", "restart"]
    assert "reproducibility:" not in capsys.readouterr().err
    fit(tmp_path, model=Counting, total_steps=3)
    assert "reproducibility: restart (train_step changes count)" in capsys.readouterr().err


def test_synchronised_batch_norm_needs_a_process_for_each_replica(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"SyncBatchNorm \(net\.1\) needs a process for each .*2"):
        fit(tmp_path, model=Synced, num_replicas=2)
    assert levels(tmp_path) == []
