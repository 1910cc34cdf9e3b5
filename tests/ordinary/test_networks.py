"""Networks of every usual kind, and what PyTorch offers to change them."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.ordinary.harness import WIDTH, Case, Regression, assert_ordinary


class Tied(nn.Module):
    """An encoder whose weights the decoder shares."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(inputs).tanh()))


class Momentum(nn.Module):
    """A slow copy of an encoder, and a queue of what it saw, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)
        self.head = nn.Linear(4, 1)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for kept, present in zip(
                    self.slow.parameters(), self.encoder.parameters(), strict=True
                ):
                    kept.data = 0.9 * kept.data + 0.1 * present.data
                place = int(self.place)
                self.queue[place : place + len(inputs)] = self.slow(inputs)
                self.place[0] = (place + len(inputs)) % len(self.queue)
        return self.head(self.encoder(inputs) - self.queue.mean(0))


def perceptron(*middle: nn.Module) -> nn.Sequential:
    """Return two layers with something between them."""
    return nn.Sequential(nn.Linear(WIDTH, 4), *middle, nn.Tanh(), nn.Linear(4, 1))


def frozen() -> nn.Module:
    """Return a network of which the first layer does not learn."""
    net = perceptron(nn.BatchNorm1d(4))
    net[0].requires_grad_(False)
    return net


class OfType(nn.Module):
    """A network of another type than its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = perceptron().to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.to(self.dtype))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "frozen layers": frozen,
    "batch norm": lambda: perceptron(nn.BatchNorm1d(4)),
    "a momentum encoder": Momentum,
    "torch.compile": lambda: torch.compile(perceptron(nn.Dropout(0.2)), backend="eager"),
    "bfloat16": lambda: OfType(torch.bfloat16),
}


class WithNetwork(Regression):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def make_net(self) -> nn.Module:
        return NETWORKS[self.name]()

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
        return torch.optim.SGD(learning, lr=0.02, momentum=0.9)


@pytest.mark.shows("S43")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_resumes_without_a_warning(name: str, tmp_path: Path) -> None:
    assert_ordinary(Case(lambda: WithNetwork(name)), tmp_path)


class Lazy(Regression):
    """Layers that learn their sizes from the first batch of the training."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))


@pytest.mark.shows("S69")
def test_lazy_layers_resume_without_a_warning(tmp_path: Path) -> None:
    assert_ordinary(Case(Lazy), tmp_path)


class Compiled(Regression):
    """A network that inductor compiles."""

    def make_net(self) -> nn.Module:
        return torch.compile(perceptron())


def _train_compiled(folder: Path) -> None:
    assert_ordinary(Case(Compiled), folder)


@pytest.mark.full
def test_a_network_that_inductor_compiles_resumes_without_a_warning(tmp_path: Path) -> None:
    # In a process of its own, for inductor leaves threads and variables to the next test.
    child = multiprocessing.get_context("spawn").Process(target=_train_compiled, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()
