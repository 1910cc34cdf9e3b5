"""Five trainings that extend Helios, written from its pages alone, and what each has left.

Each is started by :func:`start` with a folder and a number of replicas; what is in the folder goes
on. Their checkpoints and ledgers are compared on bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import Dataset

import helios
from helios import DataLoaderParams, DataModule, Engine, Model, Plugin, Trainer
from helios.core import rng
from helios.ledger.book import FILE_NAME
from helios.loops import OptimizerLoop
from tests.support.runs import digest_checkpoint


class Points(Dataset[Any]):
    """Points on two curves, of which a part is shown; what is shown may grow."""

    def __init__(self, shown: list[int]) -> None:
        self.shown = shown

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, place: int) -> Any:
        x = torch.tensor([self.shown[place] / 8.0])
        noise = 0.01 * torch.rand(1) + 0.01 * random.random() + 0.01 * float(np.random.normal())
        return x + noise, x.sin(), x.cos()


class Data(DataModule):
    """Twelve points, four batches of each replica of two."""

    def setup(self) -> None:
        params = DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Points(list(range(16))), params)


class Tasks(Model):
    """Two heads on one trunk, and dropout."""

    def setup(self, fast_init: bool = False) -> None:
        self.trunk = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2))
        self.sine, self.cosine = nn.Linear(8, 1), nn.Linear(8, 1)
        networks = nn.ModuleList([self.trunk, self.sine, self.cosine])
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        x, sine, cosine = batch
        features = self.trunk(x)
        return {
            "sine": mse_loss(self.sine(features), sine),
            "cosine": mse_loss(self.cosine(features), cosine),
        }


class Curve(Tasks):
    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        return sum(super().train_step(batch, state).values())


class Surgery(Tasks):
    """Gradient surgery: of two gradients that oppose each other only the first one counts."""

    def backward(self, losses: Mapping[str, Tensor]) -> None:
        parameters, gradients = self.optimizer.param_groups[0]["params"], []
        for loss in losses.values():
            self.engine.backward_loss(loss, retain_graph=True)
            gradients.append(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            )
            self.optimizer.zero_grad()
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            parameter.grad = first + second if (first * second).sum() >= 0 else first


class Sharpness(OptimizerLoop):
    """Takes the gradient at a point nearby, and counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def losses(self, batch: Any) -> Iterator[Any]:
        # As often for each replica of a process as for one.
        self.num_steps = self.session.state.global_step
        model: Any = self.session.model
        parameters = model.optimizer.param_groups[0]["params"]
        yield from super().losses(batch)
        found = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=0.1 / (1 + self.num_steps))
        model.optimizer.zero_grad()
        yield from super().losses(batch)
        with torch.no_grad():
            for p, before in zip(parameters, found, strict=True):
                p.copy_(before)


class Growing(DataModule):
    def setup(self) -> None:
        self.points = Points(list(range(8)))
        params = DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(self.points, params)


class Learner(Curve):
    """Asks for the points of which it knows least, before each epoch but the first."""

    def on_training_epoch_start(self, current_epoch: int) -> None:
        points = self.trainer.datamodule.points  # type: ignore[union-attr]
        if current_epoch == 1:
            return
        hidden = [number for number in range(40) if number not in points.shown]
        with torch.no_grad():
            x = torch.tensor(hidden)[:, None] / 8.0
            self.trunk.eval()
            errors = (self.sine(self.trunk(x)) - x.sin()).abs().flatten()
            self.trunk.train()
        points.shown += [hidden[place] for place in errors.topk(4).indices.tolist()]


class ManualGan(Model):
    """Two networks; makes two updates of its critic per batch, by hand."""

    def setup(self, fast_init: bool = False) -> None:
        self.generator = nn.Linear(2, 1)
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.05)
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.05)
        self.generator, self.critic = map(self.engine.wrap, (self.generator, self.critic))

    def losses(self, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(torch.randn(len(real), 2))
        critic = softplus(-self.critic(real)) + softplus(self.critic(fake.detach()))
        return critic.mean(), fake

    def train_step(self, batch: Any, state: helios.TrainingState) -> None:
        for _ in range(2):
            loss, fake = self.losses(batch[0])
            self._step(loss, self.critic_optimizer)
        self._loss_items["critic"] = loss.detach()
        loss = softplus(-self.critic(self.generator(torch.randn(len(fake), 2)))).mean()
        self._step(loss, self.generator_optimizer)
        self._loss_items["generator"] = loss.detach()
        self.engine.close_window()

    def _step(self, loss: Tensor, optimizer: Any) -> None:
        for each in (self.critic_optimizer, self.generator_optimizer):
            self.engine.zero_grad(each)
        self.engine.backward_loss(loss)
        self.engine.optimizer_step(optimizer)


class NoisyEngine(Engine):
    """Adds decaying noise to the gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_steps = 0

    def optimizer_step(self, optimizer: Any) -> bool:
        generator = torch.Generator().manual_seed(rng.key(0, "noise", self.num_steps))
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                noise = torch.empty_like(parameter.grad).normal_(generator=generator)
                parameter.grad.add_(noise, alpha=0.01 / (1 + self.num_steps))
        is_committed = super().optimizer_step(optimizer)
        self.num_steps += is_committed
        return is_committed


@dataclass(frozen=True)
class Extension:
    """What a training is made of; ``refused`` is the error where a process has two replicas."""

    make_model: Callable[[str], Model]
    make_data: Callable[[], DataModule] = Data
    make_engine: Callable[..., Engine] | None = None
    make_loop: Callable[[], OptimizerLoop] | None = None
    refused: str = ""
    accumulation: int = 2


EXTENSIONS: dict[str, Extension] = {
    "gradient surgery": Extension(Surgery),
    "active learning": Extension(Learner, Growing),
    "a loop with state": Extension(Curve, make_loop=Sharpness),
    "a GAN by hand": Extension(ManualGan, accumulation=1, refused="one process per replica"),
    "an engine": Extension(Curve, make_engine=NoisyEngine),
}


def start(folder: Path, name: str, *plugins: Plugin, num_replicas: int = 2) -> None:
    """Start a training, or go on with it."""
    extension = EXTENSIONS[name]
    torch.set_num_threads(1)
    where: dict[str, Any] = {"use_cpu": True}
    if extension.make_engine is not None:
        where = {"engine": extension.make_engine("cpu", clip_norm=1.0)}
    trainer = Trainer(
        total_steps=12 // extension.accumulation,
        train_unit="iteration",
        accumulation_steps=extension.accumulation,
        chkpt_frequency=1,
        chkpt_root=folder,
        num_replicas=num_replicas,
        print_banner=False,
        plugins=plugins,
        **where,
    )
    if extension.make_loop is not None:
        batch_loop = trainer.fit_loop.epoch_loop.batch_loop  # type: ignore[union-attr]
        batch_loop.connect(optimizer_loop=extension.make_loop())  # type: ignore[union-attr]
    trainer.fit(extension.make_model("extended"), extension.make_data())


def read_bits(folder: Path) -> dict[str, str]:
    """Return digests of what the runs of a folder have left."""
    found: dict[str, str] = {}
    for run in sorted(each for each in folder.iterdir() if each.is_dir()):
        newest = helios.find_last_checkpoint(run)
        assert newest is not None
        names = ("cursor", "engine", "rng", "loops", "plugins", "tables")
        parts = digest_checkpoint(helios.load_checkpoint(newest), *names)
        found |= {f"{run.name}/{name}": part for name, part in parts.items()}
        found[f"{run.name}/name"] = newest.name
        found[f"{run.name}/ledger"] = newest.with_name(FILE_NAME).read_text()
    return found
