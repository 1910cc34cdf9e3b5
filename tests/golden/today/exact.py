"""What the scripts share: data, networks and records that are exact on every processor."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from helios import DataLoaderParams, DataModule, Model, Plugin, Trainer
from helios.core import rng
from helios.state import TrainingState

WIDTH = 4


def draw() -> list[int]:
    from_numpy = rng.get_default_numpy_rng().generator.random()
    return [int(torch.randint(0, 256, (1,))), int(random.random() * 256), int(from_numpy * 256)]


def bits(value: Any) -> str:
    """Return the bits of a tensor, with its type and shape; of anything else, its text."""
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().cpu().contiguous().numpy().tobytes().hex()
    return f"{str(value.dtype)[6:]}{list(value.shape)}:{content}"


class Numbers(Dataset):
    """Four small integers for each index, each moved a little by a draw."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        drawn = torch.tensor([value % 4 for value in [*draw(), index]])
        base = torch.tensor([(index * factor) % 8 - 4 for factor in (1, 3, 5, 7)])
        return index, base + drawn


class Exact(nn.Module):
    """A linear map of small integers, with buffers that training moves.

    The loss is a sum of absolute values, so that a gradient is a sum of small integers, whose signs
    depend on the weights.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-4, 5, (WIDTH,)).to(dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5, affine=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.int64), persistent=False)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        if self.training:
            self.seen += ids.sum()
            self.last += numbers.sum(0)
            # For its counter alone: what else it holds is rounded.
            self.norm(numbers.float())
        return numbers.to(self.weight.dtype) @ self.weight + self.bias

    def loss(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return (self(ids, numbers) - ids).abs().sum() / 16

    def describe(self) -> dict[str, str]:
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: bits(value) for name, value in named if "running" not in name}


class NumberData(DataModule):
    """Numbers to train and to validate on.

    Args:
        length: how many to train on.
        valid: how many to validate on.
        valid_params: how; by default in batches of the size of the training.
        **params: how they are trained on.
    """

    def __init__(
        self, length: int, valid: int = 0, valid_params: Any = None, **params: Any
    ) -> None:
        super().__init__()
        self.lengths = length, valid
        self.all_params = params, valid_params or {"batch_size": params["batch_size"]}

    def setup(self) -> None:
        datasets = [
            self._create_dataset(Numbers(length), DataLoaderParams(**params)) if length else None
            for length, params in zip(self.lengths, self.all_params, strict=True)
        ]
        self._train_dataset, self._valid_dataset = datasets


def fit(root: Path, model: Model, data: DataModule, **options: Any) -> None:
    """Train by iterations, with a checkpoint at each, unless the options say something else."""
    given = {"train_unit": "iteration", "chkpt_frequency": 1, "chkpt_root": root}
    trainer = Trainer(**{**given, "print_banner": False, "use_cpu": True, **options})
    trainer.fit(model, data)


class Record:
    """What a training did, in lines of text.

    Attributes:
        steps: a line for each training step of each replica of this process.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []
        self.end: list[str] = []

    def step(self, number: int, ids: Tensor, numbers: Tensor, loss: Tensor, *more: Any) -> None:
        content = f"{number} {ids.tolist()} {numbers.tolist()} loss {bits(loss)} drew {draw()}"
        self.steps.append(" ".join([content, *map(bits, more)]))

    def line(self, name: str, *content: Any) -> None:
        self.lines.append(" ".join([name, *map(bits, content)]))

    def result(self) -> dict[str, list[str]]:
        return {"steps": self.steps, "lines": self.lines, "end": self.end}


def counters(state: Any) -> str:
    return (
        f"{state.current_iteration}/{state.global_iteration}/{state.global_epoch} "
        f"{state.validation_cycles}/{state.dataset_iter}/{state.early_stop_count} "
        f"{state.running_iter}/{state.is_step_boundary}/{state.is_step_committed}/"
        f"{state.global_step}"
    )


class Recorder(Plugin):
    """Writes a line for each event; draws random numbers in some of them."""

    unsaved = ("record",)

    def __init__(self, record: Record) -> None:
        super().__init__("recorder")
        self.record = record

    def setup(self) -> None: ...

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.record.line("on_optimizer_step_start", *gradients)

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        self.record.line("on_optimizer_step_end", rates, committed)


def _make_hook(name: str, count: int, *, draws: bool) -> Callable[..., None]:
    def hook(self: Recorder, *given: Any) -> None:
        known = [counters(x) if isinstance(x, TrainingState) else x for x in given[:count]]
        self.record.line(name, *known, *([draw()] if draws else []))

    return hook


_DRAWING = {
    **dict.fromkeys(("on_fit_start", "on_training_start", "on_training_end"), 0),
    **dict.fromkeys(("on_training_epoch_start", "on_training_epoch_end", "on_training_resume"), 1),
    **dict.fromkeys(("on_training_batch_start", "on_training_batch_end"), 1),
    **dict.fromkeys(("on_validation_start", "on_validation_batch_end"), 1),
}
"""Hooks that draw, and how many of their arguments are recorded."""
_OTHERS = {
    **dict.fromkeys(("on_checkpoint_loaded", "on_save_checkpoint", "on_fit_end"), 0),
    "on_training_step_start": 1,
    "on_validation_end": 1,
    "on_training_step_end": 2,
}
for _name, _count in (_DRAWING | _OTHERS).items():
    setattr(Recorder, _name, _make_hook(_name, _count, draws=_name in _DRAWING))


class Counting(Plugin):
    unsaved = ("sums", "last")

    def __init__(self, plug_id: str = "counting") -> None:
        super().__init__(plug_id)
        self.sums: dict[int, int] = {}
        self.last: Tensor | None = None

    def setup(self) -> None: ...

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        number = state.global_iteration
        self.sums[number % 5] = self.sums.get(number % 5, 0) + sum(draw())
        self.last = torch.tensor([number, len(self.sums)])

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums, self.last = state_dict["sums"], state_dict["last"]

    def describe(self) -> str:
        return f"counting {self.sums} {bits(self.last)}"


class Plain(Plugin):
    """A plugin without ``state_dict`` that training changes: what becomes of it is not compared."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.count = 0

    def setup(self) -> None: ...

    def on_training_batch_start(self, state: Any) -> None:
        self.count += 1


class ExactModel(Model):
    """A model whose steps and ends are recorded."""

    unsaved: tuple[str, ...] = ("record",)

    def __init__(self, record: Record, name: str) -> None:
        super().__init__(name)
        self.record = record

    def train_step(self, batch: Any, state: Any) -> Any:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_batch_end(self, state: Any, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        losses = {name: bits(value) for name, value in self.loss_items.items()}
        self.record.line("model.on_training_batch_end", losses, draw())

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, numbers = batch
        error = (self.net(ids, numbers) - ids).abs().sum()
        self.record.line("valid_step", ids, numbers, error, draw())
        return {"error": (error, len(ids))}

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        self.record.line("model.on_validation_end", sorted(self.metrics.items()), draw())

    def describe(self, *networks: str) -> None:
        for name in networks:
            network = getattr(self, name)
            self.record.end += [f"{name}.{k} {v}" for k, v in network.describe().items()]
            grads = [(k, p.requires_grad, bits(p.grad)) for k, p in network.named_parameters()]
            self.record.end.append(f"{name} {grads}")

    def note(self, **values: Any) -> None:
        self.record.end += [f"{name} {bits(value)}" for name, value in values.items()]


def describe_optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the options and the exact state of an optimizer, in its parameters' order."""
    # Only these: versions of PyTorch differ in the rest.
    names = ("lr", "initial_lr", "momentum")
    groups = [[(name, g.get(name)) for name in names] for g in optimizer.param_groups]
    members = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        sorted((key, bits(value)) for key, value in optimizer.state[member].items())
        for member in members
    ]
    return [groups, states]
