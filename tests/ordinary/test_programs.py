"""Whole programs: averages, memories, settings, hooks, rates set by hand."""

from __future__ import annotations

import logging
import random
import re
import threading
import types
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from helios.state import TrainingState
from tests.ordinary.harness import WIDTH, Case, Regression, assert_ordinary

State = TrainingState


class ByTorch(Regression):
    """Keeps PyTorch's average, and its learning rate."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scheduler = SWALR(self.optimizer, swa_lr=0.01, anneal_epochs=4)

    def on_training_batch_end(self, state: State, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.average.update_parameters(self.net)


class Agent(Regression):
    """Learns from what it remembers, drawn by Python's generator."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.replay: deque[tuple[Any, ...]] = deque(maxlen=9)

    def loss(self, batch: Any) -> Tensor:
        for inputs, target in zip(*batch, strict=True):
            self.replay.append((inputs.numpy(), target.item(), np.float32(1), (1, False)))
        inputs, targets, rewards, _ = zip(*random.sample(list(self.replay), 2), strict=True)
        known = torch.tensor(np.stack(inputs)), torch.tensor(targets).unsqueeze(1)
        return super().loss(known) * float(np.mean(rewards))


class Task:
    """A plain helper that changes never."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.scale = lambda value: value * factor


class Configured(Regression):
    """Holds what never changes: objects, functions, settings, tables, locks, loggers."""

    names = ("first", "second")
    weights: ClassVar[list[float]] = [0.5, 0.25]

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.task = Task(0.5)
        self.criterion = nn.SmoothL1Loss()
        self.activation = torch.tanh
        self.clamp = partial(torch.clamp, max=2.0)
        self.vocabulary = {f"word{number}": number for number in range(50)}
        self.table = np.linspace(0, 1, WIDTH, dtype=np.float32)
        self.targets = iter(range(3))
        self.settings = types.SimpleNamespace(rate=0.1, sizes=[1, 2])
        self.pattern = re.compile("net.*weight")
        self.log = logging.getLogger("ordinary")
        self.lock = threading.Lock()
        self.kinds = {nn.Linear: "linear", nn.Tanh: "tanh"}
        self.layers = [self.net[0], self.net[2]]

    def loss(self, batch: Any) -> Tensor:
        with self.lock:
            inputs = self.clamp(self.activation(batch[0]) + torch.from_numpy(self.table))
        return self.task.scale(self.criterion(self.net(inputs), batch[1])) * self.weights[0]


class Hooked(Regression):
    """Looks into its network by hooks, of setup and for the time of a step."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.features: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(self.keep)
        self.norms: list[float] = []

    def keep(self, module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        self.features["first"] = outputs.detach()

    def note(self, module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        self.norms.append(outputs.detach().norm().item())

    def loss(self, batch: Any) -> Tensor:
        handle = self.net[2].register_forward_hook(self.note)
        loss = super().loss(batch)
        handle.remove()
        return loss + 0.01 * self.features["first"].mean()


class Rated(Regression):
    """Sets its learning rate by hand, and steps by a scaler."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def train_step(self, batch: Any, state: State) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / state.global_iteration
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        self._loss_items["loss"] = loss.detach()


MODELS = [ByTorch, Agent, Configured, Hooked, Rated]


@pytest.mark.shows("S43")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
def test_a_program_resumes_without_a_warning(kind: type[Regression], tmp_path: Path) -> None:
    assert_ordinary(Case(kind, options={"valid_frequency": 4}), tmp_path)
