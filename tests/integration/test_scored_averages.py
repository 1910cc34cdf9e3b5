"""The sidecar names the plugins whose averages were scored, and evaluations and exports use that.

The reference is a network that is filled and evaluated by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios import CheckpointStore, DataLoaderParams, KeepBest, Trainer
from helios.cli import main
from helios.plugins import EMA, SWA, Plugin
from tests.support.graded import make


class Pair(helios.Model):
    """Two networks, the first with buffers that change."""

    def setup(self, fast_init: bool = False) -> None:
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        parameters = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, int]]:
        difference = self.head(self.body(batch[0])) - batch[1]
        return {"error": (difference.double().square().sum(), len(batch[0]))}

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, int]]:
        return self.valid_step(batch, step)

    def predict_step(self, batch: Any, step: int) -> Any:
        return self.head(self.body(batch[0]))


X = torch.linspace(-2, 2, 36).reshape(12, 3).sin()
Y = X.sum(dim=1, keepdim=True)


class Rows(helios.DataModule):
    def setup(self) -> None:
        data = TensorDataset(X, Y)
        params = DataLoaderParams(batch_size=4)
        self._train_dataset = self._create_dataset(data, params)
        self._valid_dataset = self._test_dataset = self._train_dataset
        self._predict_dataset = self._train_dataset


BEST = CheckpointStore(keep_best=KeepBest(1, "error", "min"))


def trainer_of(root: Path, *plugins: Plugin, **options: Any) -> Trainer:
    return make(root, *plugins, **{"store": BEST, **options})


def train(root: Path, *plugins: Plugin, **options: Any) -> Path:
    """Train, and return the best checkpoint."""
    options = {"total_steps": 2, "valid_frequency": 1, "chkpt_frequency": 1, **options}
    assert trainer_of(root, *plugins, **options).fit(Pair("pair"), Rows())
    path = helios.find_best_checkpoint(root / "pair")
    assert path is not None
    return path


def averages_in(path: Path) -> list[str] | None:
    found: list[str] | None = json.loads(path.with_suffix(".json").read_text()).get("averages")
    return found


def fill_by_hand(path: Path, averages: dict[str, str]) -> Pair:
    """Return networks with the weights of a file, and the averages of plugins in their place."""
    content, model = helios.load_checkpoint(path), Pair("pair")
    model.setup()
    for name in ("body", "head"):
        network = getattr(model, name)
        network.load_state_dict(content["model"]["objects"][name])
        if name in averages:
            average = content["plugins"][averages[name]]["averages"][name]
            network.load_state_dict({**network.state_dict(), **average})
    return model


def evaluate_by_hand(model: Pair) -> tuple[float, list[Tensor]]:
    with torch.inference_mode():
        model.body.eval()
        outputs = [model.head(model.body(x)) for x in X.split(4)]
    parts = zip(outputs, Y.split(4), strict=True)
    errors = [(output - y).double().square().sum() for output, y in parts]
    return float(sum(errors, torch.zeros((), dtype=torch.float64))) / 12, outputs


SETS: dict[str, tuple[list[Plugin], dict[str, str]]] = {
    "buffers": ([EMA(0.5, averages_buffers=True)], {"body": "ema", "head": "ema"}),
    "two": ([EMA(0.5, network="body"), SWA(2, network="head")], {"body": "ema", "head": "swa"}),
}


@pytest.mark.shows("P134")
@pytest.mark.parametrize("name", SETS)
def test_the_best_is_tested_with_the_average_that_was_scored(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins, averages = SETS[name]
    path = train(tmp_path, *plugins)
    ids = sorted({*averages.values()})
    assert averages_in(path) == ids
    error, outputs = evaluate_by_hand(fill_by_hand(path, averages))
    assert error != evaluate_by_hand(fill_by_hand(path, {}))[0]
    trainer, model, data = trainer_of(tmp_path), Pair("pair"), Rows()
    capsys.readouterr()
    trainer.test(model, data, checkpoint="best")
    said = capsys.readouterr().err
    assert model.test_scores["error"] == error
    assert all(f"with the average of plugin {each!r}" in said for each in ids)
    trainer.validate(model, data, checkpoint="best")
    assert model.metrics["error"] == error
    found = trainer.predict(model, data, checkpoint="best")
    assert all(map(torch.equal, found, outputs))
    own = fill_by_hand(path, {})
    for network in ("body", "head"):
        here, there = (getattr(each, network).state_dict() for each in (model, own))
        assert all(map(torch.equal, here.values(), there.values())), "own weights are put back"
    assert list(trainer.plugins) == []


@pytest.mark.shows("P134")
def test_an_export_without_the_average_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(tmp_path, SWA(2, network="head"))

    def export(*words: str) -> str:
        out = str(tmp_path / "weights.pt")
        assert main(["export", *words, "--to", "pt", "--out", out, "--force"]) == 0
        return capsys.readouterr().err

    capsys.readouterr()
    text = f"the scores of {path.name} are those of the average of plugin 'swa', which is not"
    for source in ([str(path)], ["--best", str(tmp_path / "pair")]):
        assert text in export(*source)
        assert "--average swa" in export(*source)
        assert export(*source, "--average", "swa") == ""
    assert text in export(str(path), "--network", "head")
    assert export(str(path), "--network", "body") == "", "it has no average"
    assert main(["inspect", str(path)]) == 0
    assert "averages" in capsys.readouterr().out
