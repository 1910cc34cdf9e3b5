"""Ordinary trainings: nothing to declare, no warning, and equal bits after a resume.

Each of them saves about four times in twelve iterations; new objects resume from the first file and
from the last but one. Compared are every loss, and at the end whatever the model's attributes hold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import helios
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.warned import collect_warnings

TOTAL, FREQUENCY = 12, 3
LENGTH, WIDTH = 10, 6
LEVELS = {"order", "restart", "elastic"}
"""``order`` where inductor compiles: its kernels may differ from process to process."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Ten samples, with noise from torch and a shift from Python's generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.sin(torch.arange(WIDTH) * (index + 1.0))
        return inputs + 0.1 * torch.rand(WIDTH) + random.random(), torch.tensor([index / LENGTH])


class Data(helios.DataModule):
    """The samples, or others; the same for validation."""

    def __init__(self, make: Callable[[], Any] = Samples) -> None:
        super().__init__()
        self.make = make

    def setup(self) -> None:
        self.train_dataset = self.create_dataset(self.make(), batch_size=2, shuffle=True)
        self.valid_dataset = self.create_dataset(self.make(), batch_size=2)


class Regression(helios.Model):
    """A small network that learns the numbers of the samples, in automatic steps."""

    def __init__(self) -> None:
        super().__init__("ordinary")

    def setup(self, fast_init: bool = False) -> None:
        self.net = self.make_net()
        self.optimizer = self.make_optimizer(self.net)

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs).float() - targets).square().mean()

    def train_step(self, batch: Any, state: TrainingState) -> Tensor | None:
        loss = self.loss(batch)
        self._loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return {"loss": (self.loss(batch), 1)}


@dataclasses.dataclass
class Case:
    """A training.

    Attributes:
        model: makes the model.
        data: makes the data module.
        options: the arguments of the trainer that are special.
    """

    model: Callable[[], helios.Model]
    data: Callable[[], helios.DataModule] = Data
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Recorder(Quiet):
    """Keeps all losses, and of what the model holds at the end."""

    unsaved = ("losses", "end")

    def __init__(self) -> None:
        super().__init__("recorder")
        self.losses: dict[int, str] = {}
        self.end: dict[str, str] = {}

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        losses = self.context.model.loss_items
        self.losses[state.global_iteration] = repr([float(losses[name]) for name in losses])

    def on_training_end(self) -> None:
        parts = {name: value for name, value in vars(self.context.model).items() if name[0] != "_"}
        self.end = {name: digest(value) for name, value in parts.items() if name != "trainer"}


def digest(value: Any) -> str:
    """Return a digest of bytes, types and order of what an attribute holds."""
    return hashlib.sha256("\n".join(_flat(value, set())).encode()).hexdigest()


def _flat(value: Any, seen: set[int]) -> Iterator[str]:
    yield type(value).__name__
    if isinstance(value, Tensor):
        dense = value.detach().to_dense()
        yield f"{value.dtype}{tuple(value.shape)}{dense.float().numpy().tobytes().hex()}"
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    elif isinstance(value, Enum | int | float | str | None):
        yield repr(value)
    elif id(value) not in seen:
        for name, member in _members(value):
            yield f"{name}:"
            yield from _flat(member, seen | {id(value)})


def _members(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, type | types.FunctionType):
        return []
    read = getattr(value, "state_dict", None)
    return list(read().items()) if read else []


@dataclasses.dataclass
class Outcome:
    """What a training left."""

    losses: dict[int, str]
    end: dict[str, str]
    sidecars: list[dict[str, Any]]
    warnings: list[str]


def train(case: Case, folder: Path) -> Outcome:
    """Train with new objects in a folder, from what lies there."""
    recorder = Recorder()
    settings = {
        "train_unit": "iteration",
        "total_steps": TOTAL,
        "chkpt_frequency": FREQUENCY,
        "random_seed": 1,
        "use_cpu": True,
        "print_banner": False,
        **case.options,
    }
    trainer = helios.Trainer(chkpt_root=folder / "runs", plugins=[recorder], **settings)
    with collect_warnings() as warnings:
        assert trainer.fit(case.model(), case.data())
    sidecars = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/*iter_*.json"))]
    # Some of these trainings grow until they overflow.
    warnings = [text for text in warnings if not text.startswith("loss is inf in epoch")]
    return Outcome(recorder.losses, recorder.end, sidecars, warnings)


def _checkpoints(folder: Path) -> dict[int, Path]:
    return {int(path.stem.split("_iter_")[1]): path for path in folder.glob("runs/*/*.pth")}


def cut_off(whole: Path, iteration: int, folder: Path) -> Path:
    """Copy a run with all its files, but for the checkpoints after an iteration."""
    shutil.copytree(whole, folder)
    for number, path in _checkpoints(folder).items():
        if number > iteration:
            path.unlink()
            path.with_suffix(".json").unlink()
    return folder


def assert_ordinary(case: Case, folder: Path) -> None:
    """Assert equal bits after resumes, a level that nothing lowers, and not a single warning."""
    whole = train(case, folder / "whole")
    assert sorted(whole.losses) == list(range(1, len(whole.losses) + 1))
    assert whole.end, "nothing is compared"
    assert_quiet(whole)
    saves = sorted(_checkpoints(folder / "whole"))
    assert len(saves) >= 3, "the run wrote too few checkpoints to show anything"
    for since in (saves[0], saves[-2]):
        resumed = train(case, cut_off(folder / "whole", since, folder / f"resumed-{since}"))
        tail = {number: loss for number, loss in whole.losses.items() if number > since}
        assert resumed.losses == tail, f"losses differ, resumed after iteration {since}"
        different = {name for name, bits in whole.end.items() if resumed.end.get(name) != bits}
        assert not different, f"{different} differ at the end, resumed after iteration {since}"
        assert resumed.end.keys() == whole.end.keys()
        assert_quiet(resumed)


def assert_quiet(outcome: Outcome) -> None:
    """Assert that nothing was warned of, and that no checkpoint lacks anything."""
    assert outcome.warnings == [], outcome.warnings
    missing = [sidecar["missing"] for sidecar in outcome.sidecars if sidecar.get("missing")]
    assert missing == [], missing
    levels = {sidecar["level"] for sidecar in outcome.sidecars}
    assert levels <= LEVELS, levels
