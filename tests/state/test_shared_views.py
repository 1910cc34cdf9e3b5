"""Buffers and parameters that training lets share memory otherwise than setup are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helios.plugins import Plugin
from tests.ordinary.harness import WIDTH, Case, Regression, assert_ordinary, train


class Net(nn.Module):
    """A layer and two buffers, one of which scales what the layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("other", torch.arange(8.0))
        self.scale: Tensor
        self.other: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) * (1 + self.scale.mean())
        return out


class Sharing(Regression):
    """Lets tensors look at other memory at the second iteration, and writes there from then on."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.large: Any = torch.arange(8.0)
        self.build()

    def make_net(self) -> nn.Module:
        return Net()

    def train_step(self, batch: Any, state: Any) -> Any:
        if state.global_iteration == 2:
            self.change()
        if state.global_iteration >= 2:
            self.write()
        return super().train_step(batch, state)

    def build(self) -> None:
        """Make what is special in setup."""

    def change(self) -> None:
        """Let tensors look elsewhere."""

    def write(self) -> None:
        self.large += 0.125


class OfATensor(Sharing):
    def change(self) -> None:
        self.net.scale = self.large[2:5]


class OfATensorSinceSetup(Sharing):
    def build(self) -> None:
        self.net.scale = self.large[2:5]


class OfATensorParted(OfATensorSinceSetup):
    def change(self) -> None:
        self.net.scale = self.net.scale.clone()


class OfAParameterParted(Sharing):
    def build(self) -> None:
        weight = self.net.layer.weight
        self.large = torch.arange(10.0) / 8
        weight.data, self.net.other = self.large[:6].view_as(weight), self.large[5:]

    def change(self) -> None:
        self.net.layer.weight.data = self.net.layer.weight.data.clone()


class OfAnArray(Sharing):
    def build(self) -> None:
        self.large = np.arange(8, dtype=np.float32)

    def change(self) -> None:
        self.net.scale = torch.from_numpy(self.large)[2:5]


class OfABuffer(Sharing):
    def change(self) -> None:
        self.net.scale = self.net.other[2:5]

    def write(self) -> None:
        self.net.other += 0.125


class OfABufferSinceSetup(OfABuffer):
    def build(self) -> None:
        super().change()

    def change(self) -> None:
        """All is done."""


class OfABufferParted(OfABufferSinceSetup):
    def change(self) -> None:
        self.net.scale = self.net.scale.clone()


class Overlapping(Sharing):
    def change(self) -> None:
        memory = torch.arange(8.0)
        self.net.scale, self.net.other = memory[2:5], memory[3:8]

    def write(self) -> None:
        self.net.scale += 0.125


class OneForAll(Sharing):
    """Parameters that are parts of one vector, as evolution strategies have them."""

    def change(self) -> None:
        self.large = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        nn.utils.vector_to_parameters(self.large, self.net.parameters())


@pytest.mark.shows("S56")
def test_a_buffer_that_looked_at_a_value_is_parted_from_it(tmp_path: Path) -> None:
    assert_ordinary(Case(OfATensorParted), tmp_path)


class AroundTheTensor(OfAnArray):
    def change(self) -> None:
        self.net.scale = torch.from_numpy(self.large[2:5])


class Looking(Plugin):
    """Lets a buffer of its own network look at one of the model."""

    def __init__(self) -> None:
        super().__init__("looking")

    def setup(self) -> None:
        self.large = nn.BatchNorm1d(3)

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.large.running_mean = self.context.model.net.other[2:5]


_SHARING = [
    Case(OfATensor),
    Case(OfAParameterParted),
    Case(OfAnArray),
    Case(OfABuffer),
    Case(OfABufferParted),
    Case(Overlapping),
    Case(OneForAll),
    Case(AroundTheTensor),
    Case(Sharing, options=lambda _: {"plugins": [Looking()]}),
]


@pytest.mark.shows("S56")
@pytest.mark.parametrize("case", _SHARING)
def test_memory_that_cannot_be_shared_again_is_named(case: Case, tmp_path: Path) -> None:
    outcome = train(case, tmp_path)
    (text,) = outcome.warnings
    assert "share" in text
    names = [str(sidecar["missing"]) for sidecar in outcome.sidecars]
    assert all("large" in each or "net." in each for each in names)
