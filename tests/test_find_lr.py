"""``Trainer.find_lr``: what it measures, and that it leaves no trace."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.core import rng
from helios.errors import ArgumentError
from helios.find_lr import LearningRates
from helios.storage.content_hash import fingerprint
from tests.support.quiet import Quiet


class Points(Dataset[Any]):
    """Counts what is read of it, and keeps it."""

    def __init__(self) -> None:
        self.inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
        self.num_read = 0
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return self.cache.setdefault(index, (self.inputs[index], 3 * self.inputs[index]))


class Data(helios.DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.points = Points()
        self.num_setups = 0

    def setup(self) -> None:
        self.num_setups += 1
        self.train_dataset = self.create_dataset(self.points, batch_size=8, shuffle=True)
        self.valid_dataset = self.create_dataset(self.points, batch_size=8)


class Net(helios.Model):
    num_setups = 0

    def setup(self, fast_init: bool = False) -> None:
        self.num_setups += 1
        self.net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        groups = [{"params": self.net[0].parameters(), "lr": 0.01}, *self.net[1:].children()]
        groups[1:] = [{"params": part.parameters()} for part in groups[1:]]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.rates: list[list[float]] = []

    def train_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        ALL_RATES.append([group["lr"] for group in optimizer.param_groups])

    def valid_step(self, batch: Any) -> Any:
        error = nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum")
        return {"error": (error, len(batch[0]))}


ALL_RATES: list[list[float]] = []


def make_trainer(**options: Any) -> helios.Trainer:
    options = {"max_epochs": 2, "use_cpu": True, "print_banner": False} | options
    return helios.Trainer(**options)


def test_rates_grow_exponentially_and_groups_keep_their_ratio() -> None:
    ALL_RATES.clear()
    found = make_trainer().find_lr(Net(), Data(), lowest=1e-6, highest=1e-3, num_steps=31)
    assert found.rates == pytest.approx(np.logspace(-6, -3, 31).tolist())
    assert len(found.losses) == len(found.smoothed) == 31
    assert [first for first, *_ in ALL_RATES] == found.rates
    for first, *others in ALL_RATES:
        assert others == pytest.approx([10 * first] * 3)


class Quadratic(Net):
    """Its loss falls fastest at a known rate, and diverges at others."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_the_suggestion_lies_where_the_loss_falls_and_the_search_ends_where_it_diverges() -> None:
    found = make_trainer().find_lr(Quadratic(), Data(), lowest=1e-5, highest=1e3, num_steps=200)
    assert 1 < found.rates[-1] < 1e3
    assert found.losses[-1] > 4 * min(found.losses)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1


def bytes_of(value: Any) -> bytes:
    return pickle.dumps(value)


def trace_of(model: Any, data: Any, trainer: Any, folder: Path) -> dict[str, Any]:
    """Return the bytes of everything that a search could leave a trace in."""
    others = {"trainer", "engine", "_discovery"}
    return {
        "model": bytes_of({key: each for key, each in vars(model).items() if key not in others}),
        "identities": {key: id(value) for key, value in vars(model).items()},
        "state": fingerprint(model.state_dict()),
        "data": bytes_of({name: each for name, each in vars(data).items() if name != "trainer"}),
        "trainer": {name: id(value) for name, value in vars(trainer).items()},
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": bytes_of(np.random.get_state(legacy=False)),
        "default": bytes_of(rng.get_rng_state_dict()["numpy"]),
        "threads": torch.get_num_threads(),
        "files": {path.as_posix(): path.read_bytes() for path in folder.rglob("*.*")},
    }


def prepare_nothing(model: Any, data: Any, trainer: Any) -> None:
    """A search before anything else."""


def prepare_fit(model: Any, data: Any, trainer: Any) -> None:
    """A search after a training, whose state is there."""
    trainer.fit(model, data)
    model.note = [1, 2]


class Failing(Quiet):
    """Maps batches, and counts them."""

    def __init__(self, at: int = 0) -> None:
        super().__init__("failing")
        self.at, self.num_seen = at, 0

    def process_training_batch(self, batch: Any, state: Any) -> Any:
        self.num_seen += 1
        if self.num_seen == self.at:
            raise InterruptedError
        return batch


@pytest.mark.parametrize(("prepare", "fails_at"), [(prepare_nothing, 4), (prepare_fit, 0)])
def test_a_search_leaves_no_trace(
    tmp_path: Path, prepare: Callable[..., None], fails_at: int
) -> None:
    plugin = Failing()
    folders = {"chkpt_root": tmp_path / "runs", "log_path": tmp_path / "logs"}
    files = {"run_path": tmp_path / "board", "enable_tensorboard": True}
    trainer = make_trainer(plugins=[plugin], enable_file_logging=True, **folders, **files)
    model, data = Net(), Data()
    prepare(model, data, trainer)
    plugin.at, plugin.num_seen = fails_at, 0
    before = trace_of(model, data, trainer, tmp_path)
    if fails_at:
        with pytest.raises(InterruptedError):
            trainer.find_lr(model, data, num_steps=20)
    else:
        trainer.find_lr(model, data, num_steps=20)
    assert trace_of(model, data, trainer, tmp_path) == before
    assert plugin.num_seen == 0


def test_a_run_after_a_search_has_the_same_files(tmp_path: Path) -> None:
    ledgers = []
    for name in ("searched", "plain"):
        model, data = Net(), Data()
        trainer = make_trainer(chkpt_root=tmp_path / name)
        if name == "searched":
            trainer.find_lr(model, data, num_steps=12)
            assert not (tmp_path / name).exists()
        trainer.fit(model, data)
        assert model.num_setups == data.num_setups == 1
        weights = model.net[0].weight.detach().numpy().tobytes()
        ledger = (tmp_path / name / "net" / "ledger.jsonl").read_bytes()
        ledgers.append((ledger, weights, data.points.num_read))
    assert ledgers[0] == ledgers[1]


class Several(Net):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)
        self.loss_items.update(loss=loss.detach(), other=2 * loss.detach())
        return loss


def test_replicas_have_the_same_bits_whatever_would_run_them() -> None:
    options: list[dict[str, Any]] = [{"num_replicas": 2}, {"nproc": 2}]
    one, other = (
        make_trainer(**each).find_lr(Net(), Data(), highest=1e-3, num_steps=10) for each in options
    )
    assert one == other


class Silent(Net):
    """Steps by itself, and tells no loss."""

    def train_step(self, batch: Any) -> None:
        super().train_step(batch).backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net, {"lowest": 0.0}, r"lowest=\.\.\.\) must be a positive number, got 0\.0"),
        (Net, {"highest": 1e-9}, r"highest=\.\.\.\) must be a number above lowest=1e-07"),
        (Several, {"loss": "lost"}, r"loss=\.\.\.\) must be the name of a loss \(loss, other\)"),
        (Silent, {}, r"must be the name of a loss \(the model has none\)"),
    ],
)
def test_bad_arguments_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_trainer().find_lr(model(), Data(), **options)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    found = LearningRates([1e-3, 1e-2, 1e-1], [2.0, 1.0, 3.0])
    figure = found.plot()
    figure.savefig(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["loss", "smoothed", f"suggestion: {found.suggestion:.2g}"]
