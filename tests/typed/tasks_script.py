"""The ways to extend a run that ``extending_script`` leaves out, with types."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import Dataset, TensorDataset

from helios import DataLoaderParams, DataModule, Model, Plugin, Trainer, TrainingState
from helios.data import create_dataloader
from helios.engines import Engine
from helios.loops import OptimizerLoop

Batch: TypeAlias = tuple[Tensor, Tensor]


class Pool(Dataset[Batch]):
    """Points, of which some are shown."""

    def __init__(self, shown: list[int]) -> None:
        self.shown = shown

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, place: int) -> Batch:
        x = torch.tensor([self.shown[place] / 8.0])
        return x, x.sin()


class Points(DataModule):
    def setup(self) -> None:
        self.pool = Pool(list(range(8)))
        params = DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(self.pool, params)


class Fold(DataModule):
    """All points but every third, beginning with one."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def setup(self) -> None:
        pool = Pool([point for point in range(9) if point % 3 != self.first])
        self._train_dataset = self._create_dataset(pool, DataLoaderParams(batch_size=3))


class Sine(Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Batch, state: TrainingState) -> Tensor | dict[str, Tensor] | None:
        return mse_loss(self.net(batch[0]), batch[1])


class Losses(Sine):
    """Two losses, one optimizer."""

    def train_step(self, batch: Batch, state: TrainingState) -> dict[str, Tensor]:
        outputs: Tensor = self.net(batch[0])
        return {"error": mse_loss(outputs, batch[1]), "size": outputs.square().mean()}


def project(parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    """Leave out of the second gradient what opposes the first one."""
    for parameter, first, second in zip(parameters, *gradients, strict=True):
        product = (first * second).sum().clamp(max=0)
        parameter.grad = first + second - product / (first * first).sum() * first


class Sharpness(OptimizerLoop):
    """Takes the gradient at a point nearby."""

    def losses(self, batch: Batch) -> Iterator[Any]:
        optimizer = self.session.context.optimizers["optimizer"]
        parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        yield from super().losses(batch)
        found = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        yield from super().losses(batch)
        with torch.no_grad():
            for parameter, before in zip(parameters, found, strict=True):
                parameter.copy_(before)


class SurgeryEngine(Engine):
    def backward_losses(self, losses: Mapping[str, Tensor], parameters: list[Tensor]) -> None:
        gradients: list[list[Tensor]] = []
        for loss in losses.values():
            self.backward_loss(loss, retain_graph=True)
            gradients.append([each.grad for each in parameters if each.grad is not None])
            for each in parameters:
                each.grad = None
        project(parameters, gradients)


class WithEngine(Losses):
    def backward(self, losses: Mapping[str, Tensor]) -> None:
        assert isinstance(self.engine, SurgeryEngine)
        self.engine.backward_losses(losses, list(self.net.parameters()))


class Learner(Plugin[Sine]):
    """Shows the points of which the model knows least."""

    def __init__(self, data: Points) -> None:
        super().__init__("learner")
        self.data = data

    def setup(self) -> None: ...

    def on_training_epoch_start(self, current_epoch: int) -> None:
        hidden = [point for point in range(16) if point not in self.data.pool.shown]
        with torch.no_grad():
            x = torch.tensor(hidden)[:, None] / 8.0
            errors = (self.context.model.net(x) - x.sin()).abs().flatten()
        self.data.pool.shown += [hidden[int(place)] for place in errors.topk(4).indices]


class Gan(Model):
    def setup(self, fast_init: bool = False) -> None:
        self.generator, self.critic = nn.Linear(2, 1), nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters())
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters())

    def losses(self, real: Tensor) -> tuple[Tensor, Tensor]:
        fake: Tensor = self.generator(torch.randn(len(real), 2))
        critic = softplus(-self.critic(real)) + softplus(self.critic(fake.detach()))
        return critic.mean(), fake

    def train_step(self, batch: Batch, state: TrainingState) -> Iterator[Tensor] | None:
        return self.steps(batch)

    def steps(self, batch: Batch) -> Iterator[Tensor]:
        loss, fake = self.losses(batch[0])
        yield loss
        yield softplus(-self.critic(fake)).mean()


class YieldingGan(Gan):
    def train_step(self, batch: Batch, state: TrainingState) -> Iterator[Tensor]:
        yield from self.steps(batch)


class ManualGan(Gan):
    def train_step(self, batch: Batch, state: TrainingState) -> None:
        pairs = zip(
            self.steps(batch), (self.critic_optimizer, self.generator_optimizer), strict=True
        )
        for loss, optimizer in pairs:
            for each in (self.critic_optimizer, self.generator_optimizer):
                self.engine.zero_grad(each)
            self.engine.backward_loss(loss)
            self.engine.optimizer_step(optimizer)
        self.engine.close_window()


class Closing(Sine):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.lbfgs: Any = torch.optim.LBFGS(self.net.parameters(), max_iter=2)
        self.optimizer = self.lbfgs

    def train_step(self, batch: Batch, state: TrainingState) -> None:
        def closure() -> Tensor:
            self.lbfgs.zero_grad()
            loss = mse_loss(self.net(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        self.loss_items["loss"] = self.lbfgs.step(closure)


class Noisy(Plugin[Sine]):
    """Three generators and a buffer."""

    def __init__(self) -> None:
        super().__init__("noisy")
        self.buffer: list[Tensor] = []
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(2)
        self.torch = torch.Generator().manual_seed(3)

    def setup(self) -> None: ...

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer) -> None:
        drawn = torch.rand(1, generator=self.torch) + self.python.random() + self.numpy.random()
        self.buffer = [*self.buffer[-3:], drawn]
        optimizer.param_groups[0]["lr"] = 0.01 * float(torch.stack(self.buffer).mean())


class Short(Plugin):
    """Ends each epoch before its second batch."""

    def __init__(self) -> None:
        super().__init__("short")

    def setup(self) -> None: ...

    def on_training_batch_start(self, state: TrainingState) -> None:
        if self.context.micro_step_id == 1:
            raise StopIteration


def train_scripted() -> Mapping[str, Any]:
    """An engine, and no trainer."""
    engine = Engine("cpu")
    engine.setup_process()
    network = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 8).unsqueeze(1)
    loader, sampler = create_dataloader(TensorDataset(x, x.sin()), 17, batch_size=4, shuffle=True)
    assert sampler is not None
    sampler.set_epoch(0)
    loss = torch.zeros(())
    for inputs, targets in loader:
        with engine.autocast():
            loss = mse_loss(network(inputs), targets)
        engine.backward_loss(loss)
        engine.optimizer_step(optimizer)
        engine.zero_grad(optimizer)
        engine.close_window()
    metrics = engine.sync_metrics({"loss": loss.item()}, weight=4)
    engine.deinit_components()
    return metrics


def fit(
    model: Model,
    *plugins: Plugin,
    data: DataModule | None = None,
    engine: Engine | None = None,
    make_loop: Callable[[], OptimizerLoop] | None = None,
) -> bool:
    trainer = Trainer(
        total_steps=2,
        engine=engine or Engine("cpu"),
        plugins=list(plugins),
        print_banner=False,
    )
    if make_loop is not None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=make_loop())
    return trainer.fit(model, data or Points())


def train() -> Mapping[str, Any]:
    data = Points()
    assert fit(Sine("loop"), make_loop=Sharpness)
    assert fit(WithEngine("engine"), engine=SurgeryEngine("cpu"))
    assert fit(Sine("learning"), Learner(data), data=data)
    assert len(data.pool) == 16
    assert all(fit(Sine(f"fold-{number}"), data=Fold(number)) for number in range(3))
    assert fit(YieldingGan("gan"))
    assert fit(ManualGan("manual"))
    assert fit(Closing("lbfgs"))
    assert fit(Sine("noisy"), Noisy())
    assert fit(Sine("short"), Short())
    return train_scripted()
