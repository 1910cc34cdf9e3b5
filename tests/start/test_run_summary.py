"""What the banner says of model and data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from helios import DataLoaderParams, DataModule, Trainer
from helios.data import Stream
from helios.start.run_log import describe_model
from tests.support.quiet import Quiet, QuietModel


@pytest.mark.shows("P77")
def test_networks_are_shown_by_their_parts_and_a_shared_parameter_counts_once() -> None:
    model = QuietModel("holder")
    model.net = nn.Sequential(nn.Linear(1000, 2), nn.ReLU(), nn.Linear(2, 1).double())
    assert describe_model(model).splitlines() == [
        "2,005 parameters (7.8 KiB), all trainable",
        "  net.0  Linear  2,002",
        "  net.2  Linear      3",
    ]
    model.net, model.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    model.other.weight = model.net.weight
    assert describe_model(model).splitlines()[0] == "6 parameters (24 bytes), all trainable"
    model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    lines = describe_model(model).splitlines()
    assert lines[0].endswith("all trainable, 2 in no optimizer")
    assert [line for line in lines[1:] if "in no optimizer" in line] == lines[2:]


def _ones(index: int, count: int) -> list[torch.Tensor]:
    return [torch.ones(1)]


class Small(QuietModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch, state):  # type: ignore[no-untyped-def]
        return self.net(batch[0]).sum()


class Numbered(DataModule):
    """Ten samples in batches, and a validation without an end."""

    def setup(self) -> None:
        data = TensorDataset(torch.ones(10, 1))
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=2))
        self._valid_dataset = self._create_dataset(Stream(_ones), DataLoaderParams(batch_size=3))


class Stopped(Quiet):
    """Ends the run before its first step."""

    def on_fit_start(self) -> None:
        raise InterruptedError


@pytest.mark.shows("P77")
def test_the_banner_has_model_data_and_the_plan_of_the_run_in_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(
        total_steps=1, accumulation_steps=4, num_replicas=2, use_cpu=True, plugins=[Stopped()]
    )
    trainer.train_exceptions.append(InterruptedError)
    with pytest.raises(InterruptedError):
        trainer.fit(Small("small"), Numbered())
    shown = capsys.readouterr().err
    assert "\nplan: 1 epoch of 1 step (batch 2 x 4 x 2 replicas), fp32, not validated" in shown
    assert "\nmodel: 2 parameters (8 bytes), all trainable\n  net  Linear  2\n" in shown
    assert "data: 10 samples in 3 batches per epoch; validation an unknown" in shown
