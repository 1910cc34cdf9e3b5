"""Twenty habits from Lightning, accelerate and the HF Trainer, and what the user is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from helios import DataModule, Model, Trainer

POINTS = TensorDataset(torch.linspace(-1, 1, 16).unsqueeze(1), torch.ones(16, 1))


class Line(Model):
    def setup(self) -> None:
        self.network = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, batch: Any) -> Any:
        return mse_loss(self.network(batch[0]), batch[1])


def _train(model: Any, data: Any = None, **options: Any) -> None:
    data = data or DataModule.from_datasets(train=POINTS, valid=POINTS, batch_size=8)
    Trainer(max_epochs=1, use_cpu=True, print_banner=False, **options).fit(model, data)


class TrainingStep(Model):
    setup = Line.setup

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.network(batch[0]), batch[1])


class ConfigureOptimizers(Line):
    def setup(self) -> None:
        self.network = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.parameters(), lr=0.1)


class ValidationStep(Line):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class BareData(DataModule):
    def setup(self) -> None:
        self.train_dataset = POINTS


class NoReturn(Line):
    def train_step(self, batch: Any) -> None:
        super().train_step(batch)


class ReturnsNumber(Line):
    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch).item()


class ReturnsOtherName(Line):
    def train_step(self, batch: Any) -> Any:
        return {"train_loss": super().train_step(batch)}


class OwnBackward(Line):
    def train_step(self, batch: Any) -> Any:
        loss: Tensor = super().train_step(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class OwnSchedule(Line):
    def setup(self) -> None:
        super().setup()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()


class StepsScheduler(OwnSchedule):
    def train_step(self, batch: Any) -> Any:
        if self.optimizer.state:  # else PyTorch warns of it
            self.scheduler.step()
        return Line.train_step(self, batch)


class LogsInHook(Line):
    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.log("epoch", 1.0)


class LogsVector(Line):
    def train_step(self, batch: Any) -> Any:
        self.log("output", self.network(batch[0]))
        return super().train_step(batch)


class LogsOnTheBar(Line):
    def train_step(self, batch: Any) -> Any:
        self.log("output", 1.0, prog_bar=True)  # type: ignore[call-arg]
        return super().train_step(batch)


class NoSuper(Line):
    def __init__(self) -> None:
        self.width = 3


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "Lightning: training_step": (
        lambda: _train(TrainingStep()),
        r"must override train_step.*Write train_step\(self, batch\)",
    ),
    "Lightning: configure_optimizers": (
        lambda: _train(ConfigureOptimizers()),
        r"must have an optimizer as an attribute.*Build it in setup\(\)",
    ),
    "Lightning: prog_bar": (
        lambda: _train(LogsOnTheBar()),
        r"log\(\) got an unexpected keyword argument 'prog_bar'",
    ),
    "Lightning: a loader in fit": (
        lambda: _train(Line(), DataLoader(POINTS, 8)),
        r"must be a DataModule, got .*DataLoader.*DataModule\.from_datasets\(train=",
    ),
    "Lightning: the data before the model": (
        lambda: _train(DataModule.from_datasets(train=POINTS, batch_size=8), Line()),
        r"fit\(model=\.\.\.\) must be a Model",
    ),
    "Lightning: accelerator": (
        lambda: _train(Line(), accelerator="gpu"),
        r"no argument 'accelerator'. Did you mean use_cpu and gpus",
    ),
    "Lightning: callbacks and logger": (
        lambda: _train(Line(), callbacks=[], logger=None),
        r"(?s)no argument 'callbacks'. Did you mean plugins\?.*no argument 'logger'",
    ),
    "Lightning: a step without return": (
        lambda: _train(NoReturn()),
        r"returned None in all 2 batches.*Did you forget `return loss`",
    ),
    "Lightning: a log outside of a step": (
        lambda: _train(LogsInHook()),
        r"self\.log\('epoch'.*self\.context\.log",
    ),
    "Lightning: a log of a tensor of many": (
        lambda: _train(LogsVector()),
        r"self\.log\('output', \.\.\.\) must get a number or a tensor of one element, got \(8, 1\)",
    ),
    "Lightning: no length": (
        lambda: Trainer(use_cpu=True).fit(Line(), BareData()),
        r"max_epochs",
    ),
    "torch: a constructor without super": (
        lambda: _train(NoSuper()),
        r"NoSuper\.__init__ must call super\(\)\.__init__\(\)",
    ),
    "torch: a bare data set": (
        lambda: _train(Line(), BareData()),
        r"must be created by self\.create_dataset.*Write self\.train_dataset = self\.create_data",
    ),
    "accelerate: backward in the step": (
        lambda: _train(OwnBackward()),
        r"remove loss\.backward\(\) and optimizer\.step\(\) from train_step",
    ),
    "accelerate: a detached loss": (
        lambda: _train(OwnSchedule()),
        r"train_step.*(detached|no graph|requires_grad)",
    ),
    "accelerate: scheduler.step in the step": (
        lambda: _train(StepsScheduler()),
        r"stepped outside the training loop.*remove your call of step\(\)",
    ),
    "accelerate: loss.item()": (
        lambda: _train(ReturnsNumber()),
        r"train_step must return a scalar loss tensor.*got float",
    ),
    "HF Trainer: data sets as arguments": (
        lambda: _train(Line(), train_dataset=POINTS),
        r"no argument 'train_dataset'. Did you mean trainer\.fit\(model, datamodule\)",
    ),
    "HF Trainer: names of TrainingArguments": (
        lambda: _train(Line(), num_train_epochs=3, save_steps=10, max_grad_norm=1.0),
        r"(?s)Did you mean max_epochs\?.*chkpt_frequency\?.*clip_norm\?",
    ),
    "HF Trainer: a loss of another name": (
        lambda: _train(ReturnsOtherName()),
        r"got a dict of 'train_loss'. Add the losses under 'loss'",
    ),
}


@pytest.mark.parametrize(("run", "words"), ERRORS.values(), ids=ERRORS)
def test_a_habit_from_elsewhere_is_an_error_that_says_what_to_write(
    run: Callable[[], Any], words: str
) -> None:
    with pytest.raises(Exception, match=words) as raised:
        run()
    text = str(raised.value)
    assert len(text.splitlines()[0]) <= 330


class ValDataset(DataModule):
    def setup(self) -> None:
        self.train_dataset = self.create_dataset(POINTS, batch_size=8)
        self.val_dataset = self.create_dataset(POINTS, batch_size=8)


def test_a_data_set_of_another_name_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _train(Line(), ValDataset())
    said = capsys.readouterr().err
    assert "ValDataset.val_dataset is a data set that Helios does not read; did you mean " in said
    assert "valid_dataset?" in said
