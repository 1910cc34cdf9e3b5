"""What a user writes, with types: it must pass strict checkers and run as it stands."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from helios import (
    ArgumentError,
    CheckpointStore,
    Context,
    DataLoaderParams,
    DataModule,
    Engine,
    HeliosError,
    KeepBest,
    Model,
    Plugin,
    Trainer,
    TrainingState,
    Unit,
)
from helios.plugins import EarlyStopping, HookContext, PipelineHooks

Batch: TypeAlias = tuple[Tensor, Tensor]


class Numbers(DataModule):
    def setup(self) -> None:
        inputs = torch.arange(16, dtype=torch.float32).reshape(16, 1)
        data = TensorDataset(inputs, 2 * inputs)
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=4))
        self._valid_dataset = self._create_dataset(data, DataLoaderParams(batch_size=8))


class Line(Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def shard(self) -> list[Unit]:
        return [Unit(self.net, checkpoint=True)]

    def train_step(self, batch: Batch, state: TrainingState) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def valid_step(self, batch: Batch, step: int) -> dict[str, tuple[Tensor, int]]:
        inputs, targets = batch
        return {"error": ((self.net(inputs) - targets).abs().sum(), len(inputs))}

    def on_training_epoch_end(self, current_epoch: int) -> None:
        super().on_training_epoch_end(current_epoch)

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer) -> None:
        assert optimizer.param_groups


class Watch(Plugin):
    def __init__(self) -> None:
        super().__init__("watch")
        self.losses: list[float] = []
        self.rates: list[float] = []

    def setup(self) -> None:
        self.is_first = self.global_rank == 0 and self.local_rank == 0

    def process_training_batch(self, batch: Batch, state: TrainingState) -> Batch:
        inputs, targets = batch
        return inputs + 0, targets

    def on_forward_end(self, context: Context) -> None:
        if context.loss is not None:
            self.losses.append(context.loss.item())

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        context = self.context
        optimizer = context.optimizers["optimizer"]
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        assert context.model.save_name == "line"
        assert context.engine.device.type == "cpu"
        assert context.dataloader is not None
        context.log({"train/rate": self.rates[-1]})

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["seen"] = len(self.losses)


class Show(HookContext):
    def on_enter(self, ctx: Context) -> None:
        assert ctx.global_rank == ctx.rank


def train(root: str) -> tuple[Watch, Line]:
    watch, hooks, model = Watch(), PipelineHooks(), Line("line")
    hooks.register("on_epoch", Show())
    trainer = Trainer(
        total_steps=2,
        valid_frequency=1,
        chkpt_frequency=1,
        chkpt_root=root,
        use_cpu=True,
        train_unit="epoch",
        precision="fp32",
        on_incomplete="raise",
        allow_changes=("length", "batch_size"),
        store=CheckpointStore(keep_best=KeepBest(1, metric="error", mode="min")),
        plugins=[watch, hooks, EarlyStopping("error", mode="min", patience=3)],
        print_banner=False,
    )
    assert trainer.fit(model, Numbers())
    return watch, model


def refuse() -> HeliosError:
    try:
        Engine(clip_norm=-1.0)
    except ArgumentError as error:
        return error
    raise AssertionError
