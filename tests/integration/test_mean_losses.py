"""What people see of losses: means over the iterations since they looked last, also after kills.

The references are added up by hand, from what each step of each replica has returned, in float64.
"""

from __future__ import annotations

import csv
import os
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import helios
from helios.data import DataLoaderParams
from helios.plugins import CSVLogger, Plugin
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks

_LENGTH = 20


class _Data(helios.DataModule):
    def setup(self) -> None:
        values = torch.sin(torch.arange(1.0, _LENGTH + 1)).unsqueeze(1)
        params = DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(values, params)
        self._valid_dataset = self._create_dataset(values[:4], params)


class _Model(helios.Model):
    """Keeps what each step has returned, by iteration; a loss may be rare."""

    unsaved = ("seen",)

    def __init__(self) -> None:
        super().__init__("model")
        self.seen: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        loss = nn.functional.mse_loss(self.net(batch), 2 * batch)
        shown = loss.detach()
        self._keep("loss", state, shown)
        self._loss_items["loss"] = shown
        if state.global_iteration % 4 == 0:
            self._keep("rare", state, shown * 3)
            self._loss_items["rare"] = shown * 3
        beside = self.net[0].weight.detach().sum()
        self._keep("beside", state, beside + loss.detach())
        return {"loss": loss, "beside": beside + loss}

    def _keep(self, name: str, state: TrainingState, value: Tensor) -> None:
        self.seen[name][state.global_iteration].append(float(value))

    def valid_step(self, batch: Tensor, step: int) -> dict[str, Any]:
        return {"error": ((self.net(batch) - 2 * batch).square().sum(), len(batch))}

    def mean(self, name: str, first: int, last: int) -> float:
        """Return the mean over iterations, and in each over its replicas."""
        found = [self.seen[name][number] for number in range(first, last + 1)]
        return float(np.mean([np.mean(each, dtype=np.float64) for each in found if each]))


class _Hearing(Quiet):
    """Keeps what is logged, by iteration."""

    def __init__(self) -> None:
        super().__init__("hearing")
        self.logged: dict[int, dict[str, float]] = {}

    def on_log(self, scalars: Any, state: TrainingState) -> None:
        if any(name.startswith("train/") for name in scalars):
            self.logged[state.global_iteration] = dict(scalars)


def _fit(model: _Model, *plugins: Plugin, **options: Any) -> None:
    options = {"train_unit": "iteration", "total_steps": 14, "print_frequency": 3, **options}
    given = {"use_cpu": True, "print_banner": False, "enable_progress_bar": False}
    helios.Trainer(plugins=plugins, **given, **options).fit(model, _Data())


def _rows(path: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(path.read_text().splitlines()):
        found[int(row["iteration"])][row["name"]] = float(row["value"])
    return dict(found)


def _events(root: Path) -> dict[tuple[str, int], float]:
    (run,) = (path for path in root.iterdir() if path.is_dir())
    events = EventAccumulator(str(run))
    events.Reload()
    return {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }


@pytest.mark.shows("P138")
@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize(
    ("options", "points"),
    [
        ({"print_frequency": 3}, [3, 6, 9, 12]),
        ({"print_frequency": 2, "accumulation_steps": 2, "total_steps": 7}, [4, 8, 12]),
        ({"train_unit": "epoch", "total_steps": 2, "print_frequency": 3}, None),
    ],
    ids=["3", "accumulation", "epochs"],
)
def test_what_is_logged_are_means_since_the_last_point(
    num_replicas: int,
    options: dict[str, Any],
    points: list[int] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model, hearing, path = _Model(), _Hearing(), tmp_path / "log.csv"
    options = {"num_replicas": num_replicas, "enable_tensorboard": True, **options}
    _fit(model, hearing, CSVLogger(path), run_path=tmp_path / "events", **options)
    last = max(model.seen["loss"])
    points = [*range(3, last + 1, 3)] if points is None else points
    rows, events = _rows(path), _events(tmp_path / "events")
    assert [*rows] == [*hearing.logged] == points
    lines = [text for text in caplog.messages if text.startswith("step ")]
    for first, point, line in zip([0, *points[:-1]], points, lines, strict=True):
        names = ["loss", "beside"] + ["rare"] * any(n % 4 == 0 for n in range(first + 1, point + 1))
        expected = {f"train/{name}": model.mean(name, first + 1, point) for name in names}
        assert rows[point] == hearing.logged[point] == pytest.approx(expected, rel=1e-6)
        (shown,) = re.findall(r"  loss ([\d.]+)", line)
        assert float(shown) == pytest.approx(expected["train/loss"], rel=1e-3)
        for name, value in rows[point].items():
            assert events[name, point] == pytest.approx(value, rel=1e-6)


# Points at 7 and 14, saves at 4, 8 and 12, and a kill in step 10.
_RUN = {"print_frequency": 7, "chkpt_frequency": 4, "num_replicas": 2, "valid_frequency": 10}


class _Killed(_Model):
    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        if state.global_iteration == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch, state)


def _train(rank: int, root: Path, kind: type[_Model] = _Model) -> None:
    logs = {"enable_tensorboard": True, "run_path": root / "events", "chkpt_root": root / "run"}
    _fit(kind(), CSVLogger(root / "log.csv"), **_RUN, **logs)


@pytest.mark.shows("P138")
def test_rows_after_a_kill_between_two_points_are_those_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for root in (whole, parts):
        root.mkdir()
    _train(0, whole)
    with pytest.raises(RankError):
        run_ranks(_train, 2, parts, _Killed)
    _train(0, parts)
    assert (parts / "log.csv").read_bytes() == (whole / "log.csv").read_bytes()
    assert [*_rows(whole / "log.csv")] == [7, 10, 14]
    assert _events(parts / "events") == _events(whole / "events")
