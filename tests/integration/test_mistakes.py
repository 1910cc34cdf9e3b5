"""Frequent mistakes, and habits from other trainers: the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import helios
from helios import DataModule, Model, Trainer
from helios.loops import OptimizerLoop
from helios.model import BatchProcessor
from tests.support.quiet import Quiet

POINTS = TensorDataset(torch.linspace(-1, 1, 16).unsqueeze(1), torch.ones(16, 1))


class Line(Model):
    def setup(self) -> None:
        self.network = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, batch: Any) -> Any:
        return mse_loss(self.network(batch[0]), batch[1])


def _train(model: Any, data: Any = None, loop: Any = None, **options: Any) -> None:
    data = data or DataModule.from_datasets(train=POINTS, valid=POINTS, batch_size=8)
    where = {} if "engine" in options else {"use_cpu": True}
    trainer = Trainer(max_epochs=1, print_banner=False, **where, **options)
    if loop is not None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    trainer.fit(model, data)


def _with_step(step: Callable[[Any, Any], Any]) -> Model:
    """Return a model whose step does something else with the loss."""

    class Stepping(Line):
        def train_step(self, batch: Any) -> Any:
            return step(self, super().train_step(batch))

    return Stepping()


class TrainingStep(Model):
    setup = Line.setup

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.network(batch[0]), batch[1])


class ConfigureOptimizers(Line):
    def setup(self) -> None:
        self.network = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.parameters(), lr=0.1)


class BareData(DataModule):
    def setup(self) -> None:
        self.train_dataset = POINTS


def _step_by_hand(model: Any, loss: Tensor) -> Any:
    loss.backward()
    model.optimizer.step()
    return loss


class StepsScheduler(Line):
    def setup(self) -> None:
        super().setup()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def train_step(self, batch: Any) -> Any:
        if self.optimizer.state:  # else PyTorch warns of it
            self.scheduler.step()
        return super().train_step(batch)


class StepWithIndex(Line):
    def train_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return super().train_step(batch)


class LogsInHook(Line):
    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.log("epoch", 1.0)


class NoSuper(Line):
    def __init__(self) -> None:
        self.width = 3


class YieldsOnce(Line):
    def setup(self) -> None:
        super().setup()
        self.other = torch.optim.SGD(self.network.parameters(), lr=0.01)

    def train_step(self, batch: Any) -> Any:
        yield super().train_step(batch)


class Exchanged(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        outputs = model.network(batch[0])
        return outputs.mean(), outputs


class Processed(Model):
    def setup(self) -> None:
        Line.setup(self)  # type: ignore[arg-type]
        self.batch_processor = Exchanged()


class Late(Quiet):
    def on_training_batch_end(self, state: Any) -> None: ...


class DoneIsAMethod(OptimizerLoop):
    def done(self) -> bool:  # type: ignore[override]
        return True


class Silent(helios.Engine):
    def optimizer_step(self, optimizer: Any) -> Any:
        super().optimizer_step(optimizer)


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
        lambda: _train(_with_step(lambda model, loss: model.log("loss", loss, prog_bar=True))),
        r"log\(\) got an unexpected keyword argument 'prog_bar'",
    ),
    "Lightning: batch_idx": (
        lambda: _train(StepWithIndex()),
        r"StepWithIndex\.train_step must take \(batch, state\).*takes \(batch.*batch_idx",
    ),
    "Lightning: stage": (
        lambda: _train(Line(), type("Staged", (BareData,), {"setup": lambda self, stage: None})()),
        r"Staged\.setup must take \(\), but takes \(stage\)",
    ),
    "torch: a folder of checkpoints": (
        lambda: helios.load_checkpoint("."),
        r"must be a checkpoint, got the folder \..*find_last_checkpoint",
    ),
    "Lightning: val": (
        lambda: DataModule.from_datasets(train=POINTS, val=POINTS, batch_size=8),
        r"from_datasets\(val=\.\.\.\) must be.*Did you mean valid\?",
    ),
    "Lightning: a loader in fit": (
        lambda: _train(Line(), DataLoader(POINTS, 8)),
        r"must be a DataModule, got .*DataLoader.*DataModule\.from_datasets\(train=",
    ),
    "Lightning: the data before the model": (
        lambda: _train(DataModule.from_datasets(train=POINTS, batch_size=8), Line()),
        r"fit\(model=\.\.\.\) must be a Model",
    ),
    "Lightning: a log outside of a step": (
        lambda: _train(LogsInHook()),
        r"self\.log\('epoch'.*self\.context\.log",
    ),
    "Lightning: a log of a tensor of many": (
        lambda: _train(_with_step(lambda model, loss: model.log("output", torch.zeros(8, 1)))),
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
    "torch: a batch size by position": (
        lambda: BareData().create_dataset(POINTS, 8),  # type: ignore[arg-type]
        r"create_dataset\(dataset, params\) must get a DataLoaderParams, got 8",
    ),
    "torch: workers below zero": (
        lambda: DataModule.from_datasets(train=POINTS, num_workers=-1),
        r"DataLoaderParams\(num_workers=\.\.\.\) must be an int of at least 0, got -1",
    ),
    "torch: a loss for each sample": (
        lambda: _train(_with_step(lambda model, loss: loss.expand(2, 1))),
        r"scalar loss.*shape \(2, 1\).*loss\.mean\(\)",
    ),
    "accelerate: backward in the step": (
        lambda: _train(_with_step(_step_by_hand)),
        r"remove loss\.backward\(\) and optimizer\.step\(\) from train_step",
    ),
    "accelerate: a detached loss": (
        lambda: _train(_with_step(lambda model, loss: loss.detach())),
        r"train_step.*requires_grad=False.*do not detach",
    ),
    "accelerate: scheduler.step in the step": (
        lambda: _train(StepsScheduler()),
        r"stepped outside the training loop.*remove your call of step\(\)",
    ),
    "accelerate: loss.item()": (
        lambda: _train(_with_step(lambda model, loss: loss.item())),
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
        lambda: _train(_with_step(lambda model, loss: {"train_loss": loss})),
        r"got a dict of 'train_loss'. Add the losses under 'loss'",
    ),
    "a yield for one of two optimizers": (
        lambda: _train(YieldsOnce()),
        r"one loss for each.*optimizer, other.*'other'.*yield",
    ),
    "a processor that returns the loss first": (
        lambda: _train(Processed()),
        r"\(outputs, loss\).*\(8, 1\)",
    ),
    "a hook without an argument": (
        lambda: _train(Line(), plugins=[Late("late")]),
        r"\(state, should_log\).*takes \(state.*Fix",
    ),
    "a plugin that is a class": (
        lambda: _train(Line(), plugins=[Late]),
        r"list of Plugin objects.*Late.*derive from helios",
    ),
    "a loop whose done is a method": (
        lambda: _train(Line(), loop=DoneIsAMethod()),
        r"property.*got a method.*@property",
    ),
    "an engine that does not say whether it stepped": (
        lambda: _train(Line(), engine=Silent("cpu")),
        r"True or False.*got None.*Return",
    ),
    "a device as engine": (
        lambda: _train(Line(), engine="cuda"),
        r"must be an Engine.*Engine\.auto.*'cuda'",
    ),
}


@pytest.mark.shows("K45")
@pytest.mark.parametrize(("run", "words"), ERRORS.values(), ids=ERRORS)
def test_an_error_says_what_to_write(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(Exception, match=words) as raised:
        run()
    assert len(str(raised.value).splitlines()[0]) <= 330
