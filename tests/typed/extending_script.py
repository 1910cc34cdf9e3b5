"""What a user writes who extends Helios, with types: loops, an engine, a model, hooks, yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import TensorDataset
from typing_extensions import assert_type

from helios import Context, DataLoaderParams, DataModule, Model, Plugin, Trainer, TrainingState
from helios.engines import Engine, Precision
from helios.loops import BatchLoop, OptimizerLoop, YieldLoop
from helios.model import BatchProcessor
from helios.plugins import HookContext, PipelineHooks

Batch: TypeAlias = tuple[Tensor, Tensor]


class Numbers(DataModule):
    def setup(self) -> None:
        inputs = torch.arange(16, dtype=torch.float32).reshape(16, 1) / 16
        data = TensorDataset(inputs, 2 * inputs)
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=4))


class Line(Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def train_step(self, batch: Batch, state: TrainingState) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = self.net(inputs)
        return {"error": mse_loss(outputs, targets), "size": outputs.square().mean()}

    def backward(self, losses: Mapping[str, Tensor]) -> None:
        for loss in losses.values():
            self.engine.backward_loss(loss, retain_graph=True)


class Pair(Model):
    def setup(self, fast_init: bool = False) -> None:
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), lr=1e-3)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=1e-3)

    def train_step(self, batch: Batch, state: TrainingState) -> Iterator[Any]:
        outputs = self.first(batch[0])
        yield mse_loss(outputs, batch[1])
        is_due = state.global_iteration % 2 == 0
        yield softplus(self.second(outputs.detach())).mean() if is_due else YieldLoop.SKIP


class Counting(OptimizerLoop):
    def __init__(self) -> None:
        super().__init__()
        self.num_losses = 0

    def losses(self, batch: Batch) -> Iterator[Any]:
        for loss in super().losses(batch):
            yield loss
            self.num_losses += 1


class Twice(BatchLoop):
    def advance(self, batch: Batch) -> None:
        prepared = self.prepare(batch)
        self.optimizer_loop.run(prepared)
        self.optimizer_loop.run(prepared)

    @property
    def done(self) -> bool:
        return self.session.context.loss is not None


class SignEngine(Engine):
    def clip_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()


class Fitting(BatchProcessor):
    def forward(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert isinstance(model, Processed)
        outputs = model.net(batch[0])
        return outputs, mse_loss(outputs, batch[1])


class Processed(Model):
    batch_processor = Fitting()

    def setup(self, fast_init: bool = False) -> None:
        self.net: nn.Module = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)


class Watching(HookContext):
    def on_enter(self, ctx: Context) -> None:
        self.number = ctx.micro_step_id

    def on_exit(self, ctx: Context) -> None:
        if ctx.loss is not None:
            ctx.log({"watched": ctx.loss})


class Reading(Plugin[Line]):
    """Knows its model."""

    def __init__(self) -> None:
        super().__init__("reading")
        self.size = 0.0

    def setup(self) -> None: ...

    def on_training_end(self) -> None:
        assert_type(self.context, Context[Line])
        assert_type(self.context.model.net, nn.Linear)
        self.size = self.context.model.net.weight.item()


class Ignorant(Plugin):
    def __init__(self) -> None:
        super().__init__("ignorant")

    def setup(self) -> None:
        assert_type(self.context.model, Model)


class Counted(HookContext[Line]):
    def on_enter(self, ctx: Context[Line]) -> None:
        self.bias = assert_type(ctx.model, Line).net.bias


def make_trainer(hooks: PipelineHooks, engine: Engine | None = None) -> Trainer:
    return Trainer(
        total_steps=1,
        engine=engine or Engine("cpu", precision=Precision.FP32),
        plugins=[hooks],
        print_banner=False,
    )


def train() -> int:
    hooks, loop = PipelineHooks(), Counting()
    hooks.register("on_batch", Watching())
    of_line = PipelineHooks("of-line")
    of_line.register("on_loop", Counted())
    trainer = make_trainer(hooks, SignEngine("cpu"))
    trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    trainer.fit_loop.epoch_loop.connect(batch_loop=Twice())
    reading = Reading()
    trainer.register_plugin(reading)
    trainer.register_plugin(of_line)
    assert trainer.fit(Line("line"), Numbers())
    assert reading.size
    assert make_trainer(hooks).fit(Pair("pair"), Numbers())
    assert make_trainer(hooks).fit(Processed("processed"), Numbers())
    return loop.num_losses
