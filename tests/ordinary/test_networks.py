"""Networks of every usual kind, and what PyTorch offers to change them."""

from __future__ import annotations

import collections
import copy
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.ordinary.harness import WIDTH, Case, Data, Regression, assert_ordinary


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


class Recurrent(nn.Module):
    """A recurrent network over the features, one by one."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(1, 4, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.rnn(inputs.unsqueeze(-1))[0][:, -1])


class Attending(nn.Module):
    """A transformer's encoder over the features, with positions from a fixed table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        places = torch.arange(WIDTH).unsqueeze(1) / torch.arange(1, 9)
        self.register_buffer("positions", places.sin(), persistent=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(inputs.unsqueeze(-1)) + self.positions).mean(1))


class Convolved(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1))
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.stem(inputs.unsqueeze(1))
        return self.head(self.norm(found + self.block(found)).mean(-1))


class Counting(nn.Module):
    """Counts its calls, and keeps its last output to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        outputs = self.linear(inputs)
        self.last = outputs.detach()
        return outputs


class Codebook(nn.Module):
    """Quantizes by a table in a buffer, which follows the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = torch.cdist(inputs, self.codes).argmin(1)
            if self.training:
                self.codes[nearest] += 0.1 * (inputs - self.codes[nearest])
        return self.head(inputs - self.codes[nearest])


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


class Checkpointed(nn.Module):
    """Computes its middle twice, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.middle, inputs, use_reentrant=False))


class Experts(nn.Module):
    """Parts in a list, a dict and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))
        self.gates = nn.ModuleDict({"soft": nn.Linear(WIDTH, 3), "unused": nn.Identity()})
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        gate = self.gates["soft"](inputs).softmax(-1)
        parts = [
            scale * expert(inputs) for scale, expert in zip(self.scales, self.experts, strict=True)
        ]
        return (gate.unsqueeze(1) * torch.stack(parts, -1)).sum(-1)


def perceptron(*middle: nn.Module) -> nn.Sequential:
    """Return two layers with something between them."""
    return nn.Sequential(nn.Linear(WIDTH, 4), *middle, nn.Tanh(), nn.Linear(4, 1))


def frozen() -> nn.Module:
    """Return a network of which the first layer does not learn."""
    net = perceptron(nn.BatchNorm1d(4))
    net[0].requires_grad_(False)
    return net


def with_first(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return a network whose first layer was changed."""
    net = perceptron()
    net[0] = change(net[0])
    return net


def lazy() -> nn.Module:
    """Return a network that learns its sizes from a first batch, in setup."""
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))
    net(torch.zeros(2, WIDTH))
    return net


def pruned() -> nn.Module:
    """Return a network that lacks half of the weights of a layer."""
    net = perceptron()
    prune.l1_unstructured(net[0], "weight", amount=0.5)
    return net


def scripted() -> nn.Module:
    """Return a network that was traced into a graph."""
    return torch.fx.symbolic_trace(perceptron(nn.Dropout(0.2)))


class OfType(nn.Module):
    """A network of another type than its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = perceptron().to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.to(self.dtype))


def compiled_in_place() -> nn.Module:
    """Return a network that compiles its own forward."""
    net = perceptron(nn.Dropout(0.2))
    net.compile(backend="eager")
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "frozen layers": frozen,
    "batch norm": lambda: perceptron(nn.BatchNorm1d(4)),
    "batch norm with a cumulative average": lambda: perceptron(nn.BatchNorm1d(4, momentum=None)),
    "dropout": lambda: perceptron(nn.Dropout(0.5)),
    "names in an ordered dict": lambda: nn.Sequential(
        collections.OrderedDict(body=nn.Linear(WIDTH, 4), act=nn.ReLU(), head=nn.Linear(4, 1))
    ),
    "weight norm": lambda: with_first(parametrizations.weight_norm),
    "spectral norm": lambda: with_first(parametrizations.spectral_norm),
    "orthogonal weights": lambda: with_first(parametrizations.orthogonal),
    "the older spectral norm": lambda: with_first(nn.utils.spectral_norm),
    "pruning": pruned,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "transformer": Attending,
    "convolution": Convolved,
    "a count of calls": Counting,
    "a codebook": Codebook,
    "a momentum encoder": Momentum,
    "activation checkpointing": Checkpointed,
    "experts": Experts,
    "lazy layers, run in setup": lazy,
    "torch.fx": scripted,
    "torch.compile": lambda: torch.compile(perceptron(nn.Dropout(0.2)), backend="eager"),
    "torch.compile in place": compiled_in_place,
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
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
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


@pytest.mark.shows("S43")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"accumulation_steps": 2, "clip_norm": 0.5},
        {"num_replicas": 2},
        {"num_replicas": 2, "accumulation_steps": 3},
    ],
    ids=lambda options: ",".join(options),
)
def test_a_way_to_train_resumes_without_a_warning(
    options: dict[str, object], tmp_path: Path
) -> None:
    loading = {"batch_size": 2, "shuffle": True, "drop_last": True}
    data = partial(Data, make_options=lambda: loading)
    case = Case(lambda: WithNetwork("batch norm"), data, lambda _: dict(options))
    assert_ordinary(case, tmp_path)


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
