"""Runs whose steps learn nothing, and runs that only look like that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios.data import DataLoaderParams
from helios.errors import UsageError

FORGOTTEN = "Did you forget `return loss`?"


class Points(helios.DataModule):
    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.length = length

    def setup(self) -> None:
        chance = torch.Generator().manual_seed(1)
        points = torch.randn(self.length, 2, generator=chance)
        params = DataLoaderParams(batch_size=2, num_workers=0)
        self._train_dataset = self._create_dataset(TensorDataset(points), params)


class Net(helios.Model):
    def __init__(self, step: Callable[[Any, Tensor], Any], *, has_batch_norm: bool = False) -> None:
        super().__init__("net")
        self.step = step
        self.has_batch_norm = has_batch_norm

    def setup(self, fast_init: bool = False) -> None:
        parts = (nn.BatchNorm1d(2),) if self.has_batch_norm else ()
        self.net = nn.Sequential(*parts, nn.Linear(2, 1))
        self.net.register_buffer("centers", torch.zeros(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        return self.step(self, batch[0])


def forget(model: Any, x: Tensor) -> None:
    model.net(x).square().mean()


def fit(model: helios.Model, folder: Path | None = None, length: int = 8, **options: Any) -> None:
    if folder is not None:
        options = {"chkpt_root": folder, "chkpt_frequency": 1, **options}
    options = {"total_steps": 1, "use_cpu": True, "print_banner": False, **options}
    helios.Trainer(**options).fit(model, Points(length))


@pytest.mark.shows("U35")
@pytest.mark.parametrize("has_batch_norm", [False, True])
def test_a_forgotten_loss_is_an_error_before_anything_is_saved(
    has_batch_norm: bool, tmp_path: Path
) -> None:
    for unit in ("epoch", "iteration"):
        folder = tmp_path / unit
        with pytest.raises(UsageError, match=r"in all \d batches.*Did you forget `return loss`\?"):
            fit(Net(forget, has_batch_norm=has_batch_norm), folder, train_unit=unit, total_steps=3)
        assert not list(folder.rglob("*.pth"))


_SEEN: list[int] = []


@pytest.mark.shows("U35")
def test_a_long_first_epoch_ends_after_100_batches() -> None:
    # A list of the function around the step would count as something learned.
    _SEEN.clear()
    with pytest.raises(UsageError, match="None in all 100 batches"):
        fit(Net(lambda model, x: _SEEN.append(1)), length=1000)
    assert len(_SEEN) == 100


class KMeans(helios.Model):
    """Lloyd's algorithm: sums of an epoch, and new centers at its end."""

    def setup(self, fast_init: bool = False) -> None:
        self.centers = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        self.sums, self.counts = torch.zeros(2, 2), torch.zeros(2)

    def train_step(self, batch: Any, state: helios.TrainingState) -> None:
        nearest = torch.cdist(batch[0], self.centers).argmin(1)
        self.sums.index_add_(0, nearest, batch[0])
        self.counts.index_add_(0, nearest, torch.ones(len(nearest)))

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.centers = self.sums / self.counts.clamp(min=1)[:, None]
        self.sums.zero_()
        self.counts.zero_()


class WarmUp(helios.Model):
    """Collects a buffer before it trains on it."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.replay: list[Tensor] = []

    def train_step(self, batch: Any, state: helios.TrainingState) -> None:
        self.replay.append(batch[0])
        if len(self.replay) > 120:
            self.optimizer.zero_grad()
            self.net(torch.cat(self.replay[-8:])).square().mean().backward()
            self.optimizer.step()


@pytest.mark.shows("U35")
@pytest.mark.parametrize("kind", [KMeans, WarmUp])
def test_a_script_that_learns_without_a_loss_is_right(
    kind: type[helios.Model], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (2, 3):
        fit(kind("own"), tmp_path, length=300, total_steps=total)
    said = capsys.readouterr().err
    assert FORGOTTEN not in said
    assert "ERROR" not in said
