"""Every published member of Model and Trainer, read where users read it, each with its type.

A type that degrades to ``Any``, and a member that a smaller class does not have, fail the checkers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from helios import (
    Context,
    DataLoaderParams,
    DataModule,
    Engine,
    Model,
    Phase,
    Plugin,
    Precision,
    Trainer,
    TrainingState,
    Unit,
    WeightedLoss,
)
from helios import (
    Scores as Evaluated,
)
from helios.find_lr import LearningRates
from helios.ledger import Replay
from helios.loops import BatchLoop, EvaluationLoop, FitLoop
from helios.model import BatchProcessor, Processed
from helios.schedule import Schedule
from helios.state import Cursor

Scores = dict[str, tuple[Any, Any]] | Processed | None


class Numbers(DataModule):
    def setup(self) -> None:
        assert_type(self.trainer, Trainer)
        assert_type(self.trainer.datamodule, DataModule | None)
        assert_type(self.trainer.model, Model | None)
        assert_type(self.trainer.plugins["reader"], Plugin)
        assert_type(self.trainer.global_rank, int)
        inputs = torch.arange(4, dtype=torch.float32).reshape(4, 1)
        data = TensorDataset(inputs)
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=2))
        self._valid_dataset = self._test_dataset = self._predict_dataset = self._train_dataset


class Forward(BatchProcessor):
    def forward(self, model: Model, batch: Any) -> tuple[Any, Tensor | None]:
        assert_type(model.context.model.trainer, Trainer)
        assert isinstance(model, Line)
        outputs = model.net(batch[0])
        return outputs, outputs.mean()


class Line(Model):
    def setup(self, fast_init: bool = False) -> None:
        assert_type(self.trainer.local_rank, int)
        assert_type(self.engine, Engine)
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.batch_processor = Forward()

    def on_fit_start(self) -> None:
        read_context(self.context)

    def on_training_epoch_end(self, current_epoch: int) -> None:
        assert_type(self.trainer.exit_code, int)


class Batches(BatchLoop):
    def on_run_start(self, *args: Any) -> None:
        assert_type(self.session.model, Model)
        assert_type(self.session.model.trainer, Trainer)
        assert_type(self.session.model.save_name, str)
        assert_type(self.session.engine, Engine)
        assert_type(self.session.engine.device, torch.device)
        assert_type(self.session.state, TrainingState)
        assert_type(self.session.cursor, Cursor)
        assert_type(self.session.schedule, Schedule)
        assert_type(self.session.context, Context)
        assert_type(self.session.context.model.trainer.fit_loop, FitLoop)
        assert_type(self.session.replicas.num_replicas, int)
        assert_type(self.session.agree(), bool)
        self.session.hooks.emit("on_training_batch_start", self.session.state)


class Reader(Plugin):
    def __init__(self) -> None:
        super().__init__("reader")

    def configure_trainer(self, trainer: Trainer) -> None:
        super().configure_trainer(trainer)
        assert_type(trainer.plugins["reader"], Plugin)

    def configure_model(self, model: Model) -> None:
        assert_type(model.save_name, str)

    def setup(self) -> None:
        assert_type(self.trainer, Trainer | None)

    def on_training_epoch_end(self, current_epoch: int) -> None:
        assert self.trainer is not None
        read_trainer(self.trainer)
        self.trainer.request_stop("all is seen")
        read_model(self.context.model)

    def on_fit_end(self) -> None:
        call_events(self.context)


def read_context(context: Context) -> None:
    assert_type(context.model, Model)
    assert_type(context.model.trainer, Trainer)
    assert_type(context.model.context, Context)
    assert_type(context.engine, Engine)
    assert_type(context.engine.device, torch.device)
    assert_type(context.engine.precision, Precision)
    assert_type(context.engine.rank, int)
    assert_type(context.engine.world_size, int)
    assert_type(context.engine.is_master_process, bool)
    assert_type(context.state, TrainingState)
    assert_type(context.phase, Phase)
    assert_type(context.place, Cursor)
    assert_type(context.loss, Tensor | None)
    assert_type(context.optimizers, Mapping[str, Optimizer])
    assert_type(context.lr_schedulers, Mapping[str, LRScheduler])
    assert_type(context.dataloader, DataLoader[Any] | None)
    assert_type(context.agree(False), bool)
    assert_type(context.num_replicas, int)


def read_trainer(trainer: Trainer) -> None:
    """While ``fit`` runs."""
    assert_type(trainer.model, Model | None)
    assert_type(trainer.datamodule, DataModule | None)
    assert_type(trainer.plugins["reader"], Plugin)
    assert_type(trainer.plugins["reader"].trainer, Trainer | None)
    assert_type(trainer.train_exceptions, list[type[BaseException]])
    assert_type(trainer.test_exceptions, list[type[BaseException]])
    assert_type(trainer.fit_loop, FitLoop)
    assert_type(trainer.validate_loop, EvaluationLoop)
    assert_type(trainer.test_loop, EvaluationLoop)
    assert_type(trainer.predict_loop, EvaluationLoop)
    assert_type(trainer.gpu_ids, list[int])
    assert_type(trainer.global_rank, int)
    assert_type(trainer.rank, int)
    assert_type(trainer.local_rank, int)
    assert_type(trainer.queue, Any)
    assert_type(trainer.exit_code, int)
    trainer.request_checkpoint()


def call_trainer(plugin: Plugin, model: Model, data: DataModule) -> Replay:
    """After ``fit``, whose trainer is still known to everything that it has used."""
    assert plugin.trainer is not None
    assert_type(plugin.trainer.fit(model, data), bool)
    assert_type(plugin.trainer.validate(model, data, checkpoint="newest"), Evaluated)
    assert_type(model.trainer.test(model, data), Evaluated)
    assert_type(data.trainer.predict(model, data), list[Any])
    assert_type(plugin.trainer.find_lr(model, data, num_steps=10), LearningRates)
    plugin.trainer.fit_loop = FitLoop()
    plugin.trainer.test_loop = model.trainer.test_loop
    plugin.trainer.register_plugin(Other("other"))
    return assert_type(model.trainer.replay(model, data, start=0, stop=1), Replay)


class Other(Plugin):
    def setup(self) -> None:
        pass


def read_model(model: Model) -> None:
    """In an event, between two steps."""
    assert_type(model.save_name, str)
    assert_type(model.device, torch.device)
    assert_type(model.engine, Engine)
    assert_type(model.trainer, Trainer)
    assert_type(model.context, Context)
    assert_type(model.is_distributed, bool)
    assert_type(model.map_loc, str | dict[str, str])
    assert_type(model.global_rank, int)
    assert_type(model.rank, int)
    assert_type(model.local_rank, int)
    assert_type(model.unsaved, tuple[str, ...])
    assert_type(model.unscored, tuple[str, ...])
    assert_type(model.batch_processor, BatchProcessor | None)
    assert_type(model.scheduler_interval, Mapping[str, str])
    assert_type(model.train_mode, Literal["all", "keep"] | None)
    assert_type(model.metrics, dict[str, Any])
    assert_type(model.val_scores, dict[str, Any])
    assert_type(model.loss_items, dict[str, Any])
    if model.global_rank < 0:
        model.log("nothing", 1.0, weight=2)
    assert_type(model.test_scores, dict[str, Any])
    assert_type(model.shard(), Sequence[nn.Module | Unit] | None)
    assert_type(model.init_unit(nn.Linear(1, 1), "net"), bool | None)
    assert_type(model.trained_state_dict(), dict[str, Any])
    assert_type(model.types_for_safe_load(), list[Any])
    assert_type(model.append_metadata_to_chkpt_name("name"), str)
    assert_type(model.append_to_banner("banner"), str)
    assert_type(model.have_metrics_improved(), bool)
    assert_type(model.should_training_stop(), bool)
    assert_type(model.batch_to_device(torch.zeros(1), Phase.TRAINING), Any)
    model.eval()
    model.train()
    state = assert_type(model.state_dict(), dict[str, Any])
    model.load_state_dict(state, fast_init=True)
    model.load_for_testing()


def call_model(model: Model, state: TrainingState) -> None:
    """The steps, as loops call them."""
    batch = [torch.ones(1, 1)]
    model.setup(fast_init=True)
    assert_type(
        model.train_step(batch, state),
        Tensor | WeightedLoss | dict[str, Any] | Processed | Iterator[Any] | None,
    )
    model.backward({"loss": torch.ones(1, requires_grad=True).sum()})
    assert_type(model.valid_step(batch, 0), Scores)
    assert_type(model.test_step(batch, 0), Scores)
    assert_type(model.predict_step(batch, 0), Any)


def call_events(context: Context) -> None:
    model, state = context.model, context.state
    optimizer = context.optimizers["optimizer"]
    call_model(model, state)
    model.on_training_start()
    model.on_training_resume(state)
    model.on_training_epoch_start(1)
    model.on_training_step_start(state)
    model.on_training_batch_start(state)
    model.on_forward_start(context)
    model.on_forward_end(context)
    model.on_backward_start(torch.zeros(1))
    model.on_backward_end()
    model.on_optimizer_step_start(optimizer)
    model.on_before_zero_grad(optimizer)
    model.on_optimizer_step_end(optimizer, committed=True)
    model.on_training_batch_end(state, should_log=True)
    model.on_training_step_end(state, committed=True)
    model.on_training_epoch_end(1)
    model.on_training_end()
    model.on_log({"loss": 1.0}, state)
    model.on_validation_start(0)
    model.on_validation_batch_start(0)
    model.on_validation_batch_end(0)
    model.on_validation_end(0)
    model.on_testing_start()
    model.on_testing_batch_start(0)
    model.on_testing_batch_end(0)
    model.on_testing_end()
    model.on_predicting_start()
    model.on_predicting_batch_start(0)
    model.on_predicting_batch_end(0, None)
    model.on_predicting_end()
    model.on_save_checkpoint({})
    model.on_load_checkpoint({})
    model.on_checkpoint_loaded()
    model.on_exception(ValueError())
    model.on_fit_start()
    model.on_fit_end()
    model.teardown()


def read_all(root: Path) -> Replay:
    """Train once, and read everything."""
    model, data, reader = Line("line"), Numbers(), Reader()
    trainer = Trainer(
        total_steps=1,
        train_unit="epoch",
        chkpt_frequency=1,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
    )
    reader.configure_trainer(trainer)
    reader.configure_model(model)
    assert trainer.fit_loop.epoch_loop is not None
    trainer.fit_loop.epoch_loop.connect(batch_loop=Batches())
    assert trainer.fit(model, data)
    return call_trainer(reader, model, data)
