"""Networks whose tensors change in training: resumed everywhere, or refused at the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios import DataLoaderParams, DataModule, Trainer
from helios.errors import StateError
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.resume import copy_checkpoint
from tests.support.runs import digest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.register_buffer("queue", torch.zeros(1))
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) * (1 + self.queue.mean())
        return x if self.shift is None else x - self.shift


class Changing(helios.Model):
    """Becomes float64 and channels_last, and its queue grows with every step."""

    def __init__(self) -> None:
        super().__init__("changing")

    def setup(self, fast_init: bool = False) -> None:
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        x = batch[0].to(self.net.conv.weight.dtype)
        return self.net(x).square().mean()

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        mean = self.net.conv.weight.detach().mean().reshape(1)
        self.net.queue = torch.cat([self.net.queue, mean])
        if state.global_iteration == 2:
            self.net.shift = mean
        if state.global_iteration == 3:
            self.net.to(torch.float64, memory_format=torch.channels_last)
            self.optimizer.state.clear()
        if state.global_iteration == 5:
            self.net.register_buffer("seen", torch.ones(1))


class Pruning(Changing):
    """Replaces a layer."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        if state.global_iteration == 3:
            self.net.conv = nn.Conv2d(1, 2, 2)


class Data(DataModule):
    def setup(self) -> None:
        pictures = torch.arange(11.0 * 9).reshape(11, 1, 3, 3).sin()
        data = torch.utils.data.TensorDataset(pictures)
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=3))


class End(Plugin):
    """Keeps a digest of all that was trained."""

    def __init__(self) -> None:
        super().__init__("end")
        self.end = ""

    def setup(self) -> None:
        pass

    def on_training_end(self) -> None:
        model = self.trainer.model
        assert isinstance(model, Changing)
        strides = [part.stride() for part in model.net.parameters()]
        self.end = digest([dict(model.net.state_dict()), model.optimizer.state_dict(), strides])


def train_to_end(
    folder: Path, model: helios.Model, num_replicas: int | None = None, *plugins: Plugin
) -> str:
    """Train in a folder, from what lies there; returns a digest of the end."""
    end = End()
    trainer = Trainer(
        chkpt_root=folder,
        plugins=[end, *plugins],
        train_unit="iteration",
        total_steps=7,
        chkpt_frequency=1,
        use_cpu=True,
        print_banner=False,
        random_seed=1,
        num_replicas=num_replicas,
    )
    trainer.fit(model, Data())
    return end.end


@pytest.mark.shows("S59")
@pytest.mark.parametrize("num_replicas", [None, 2])
def test_what_training_makes_of_tensors_resumes_everywhere(
    num_replicas: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train_to_end(tmp_path / "whole", Changing(), num_replicas)
    checkpoints = sorted((tmp_path / "whole").glob("*/*.pth"))
    assert len(checkpoints) == 7
    for number, path in enumerate(checkpoints):
        if "_iter_7" not in path.stem:
            folder = copy_checkpoint(path, tmp_path / f"resumed-{number}")
            assert train_to_end(folder, Changing(), num_replicas) == whole, path.stem
    assert "incomplete" not in caplog.text


@pytest.mark.shows("S51")
def test_what_no_resume_can_make_again_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match=r"match what setup\(\) creates.*optimizer \(updates tensors that no"
    ):
        train_to_end(tmp_path, Pruning())
    (*_, last) = sorted(tmp_path.glob("*/*.pth"))
    assert "_iter_2" in last.stem
