"""What cannot be sharded with the same bits is refused by name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import helios
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.sharding import requirements, units
from helios.sharding.requirements import check_shardable
from helios.sharding.units import find_units
from tests.support.scripts import call
from tests.support.sharded import IS_ABLE

OPTIMIZERS = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
ROWS, COLUMNS, STEPS = 7, 5, 4


def build(kind: type[optim.Optimizer], parameters: list[nn.Parameter]) -> optim.Optimizer:
    make: Any = kind
    return make(parameters, lr=0.01)


def run_cut(kind: type[optim.Optimizer], cuts: list[tuple[int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(ROWS, COLUMNS, generator=generator)
    gradients = torch.randn(STEPS, ROWS, COLUMNS, generator=generator)
    parts = [nn.Parameter(start[begin:end].clone()) for begin, end in cuts]
    optimizer = build(kind, parts)
    for gradient in gradients:
        for part, (begin, end) in zip(parts, cuts, strict=True):
            part.grad = gradient[begin:end].clone()
        optimizer.step()
    state = [
        torch.cat([optimizer.state[part][name] for part in parts]).flatten()
        for name, value in optimizer.state[parts[0]].items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    whole = torch.cat([part.detach() for part in parts]).flatten()
    return torch.cat([whole, *state])


@pytest.mark.shows("P88")
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_has_equal_bits_on_shards_or_is_refused(
    kind: type[optim.Optimizer],
) -> None:
    if kind not in requirements._ELEMENTWISE:
        # As it is built does not matter: Muon takes no bias.
        optimizer = build(kind, [nn.Parameter(torch.ones(3, 3))])
        with pytest.raises(UsageError, match=f"opt is {kind.__name__}"):
            check_shardable({}, {"opt": optimizer}, {})
        return
    whole = run_cut(kind, [(0, ROWS)])
    for cuts in ([(0, 4), (4, 7)], [(0, 3), (3, 6), (6, 7)], [(0, 2), (2, 4), (4, 6), (6, 7)]):
        assert torch.equal(run_cut(kind, cuts).view(torch.int32), whole.view(torch.int32))


def refuse(match: str, network: nn.Module, **optimizers: optim.Optimizer) -> None:
    with pytest.raises(UsageError, match=match):
        check_shardable({"net": network}, optimizers, {})


@pytest.mark.shows("P88")
def test_networks_that_cannot_be_sharded_are_refused() -> None:
    refuse("neither compiled nor wrapped", nn.DataParallel(nn.Linear(2, 2)))
    refuse("SyncBatchNorm", nn.Sequential(nn.SyncBatchNorm(3)))
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refuse(r"net\.scale is a Parameter of torch\.float32 and shape \(\)", scalar)
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    refuse("neither compiled nor wrapped", compiled)
    with pytest.raises(UsageError, match="loose is in none"):
        check_shardable({}, {}, {"loose": torch.ones(1)})


@pytest.mark.shows("P88")
def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    refuse(r"net\.weight is lazy", nn.LazyLinear(2))
    with pytest.warns(UserWarning, match="zero-element"):
        refuse(r"and elements, but net\.weight .* \(2, 0\)", nn.Linear(0, 2))
    network = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    refuse(r"contiguous parameters, but net\.weight", network)
    refuse(r"net\.0 has max_norm=1\.0", nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))
    refuse("net has sparse=True", nn.EmbeddingBag(3, 2, sparse=True))
    hooked = nn.Linear(2, 2)
    handle = hooked.bias.register_hook(torch.neg)
    refuse(r"without hooks, but net\.bias has one", hooked)
    handle.remove()
    check_shardable({"net": hooked}, {}, {})
    hooked.weight.register_post_accumulate_grad_hook(lambda _: None)
    refuse(r"without hooks, but net\.weight has one", hooked)


@pytest.mark.shows("P88")
def test_optimizers_that_cannot_be_sharded_are_refused() -> None:
    network = nn.Linear(2, 2)
    refuse("fused=True", network, opt=optim.AdamW(network.parameters(), fused=True))

    class Own(optim.SGD):
        """One of the user."""

    refuse("opt is Own", network, opt=Own(network.parameters()))
    Own.is_elementwise = True
    check_shardable({"net": network}, {"opt": Own(network.parameters())}, {})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.shows("P88")
def test_a_tied_parameter_is_in_one_unit() -> None:
    network = Tied()
    with pytest.raises(UsageError, match=r"'weight' is in net.* and in net"):
        find_units({"net": network}, [network.first])
    assert [*find_units({"net": network}, [])] == ["net"]


def test_a_unit_has_one_type() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"torch\.float32 and torch\.float64"):
        find_units({"net": network}, [])
    assert [*find_units({"net": network}, [network[1]])] == ["net", "net.1"]


def test_units_are_modules_of_the_networks() -> None:
    with pytest.raises(ArgumentTypeError, match="must return modules of the model's networks"):
        find_units({"net": nn.Linear(2, 2)}, [nn.Linear(2, 2)])


def test_large_children_and_members_of_lists_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LEAST_ELEMENTS", 10)
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(1, 1)])
    network = nn.Sequential(nn.Sequential(layers, nn.ReLU()), nn.Linear(4, 4), Tied())
    assert [*find_units({"net": network, "none": nn.ReLU()}, None)] == [
        "net",
        "net.0",
        "net.0.0.0",
        "net.1",
        "net.2",
    ]


def test_a_part_of_a_network_under_a_name_of_its_own_is_no_network() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    networks = {"first": network[0], "net": network, "again": network}
    assert [*find_units(networks, [])] == ["again"]
    assert [*find_units(networks, [network[0]])] == ["again", "again.0"]


def test_the_members_of_a_list_of_networks_are_units() -> None:
    networks = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Linear(2, 2)])})
    assert [*find_units({"nets": networks}, [])] == ["nets.a", "nets.b.0"]
    with pytest.raises(UsageError, match="which holds 0, has none"):
        find_units({"loose": nn.ParameterList([nn.Parameter(torch.ones(2))])}, [])
    with pytest.raises(ArgumentTypeError, match="that have a forward, got ModuleDict"):
        find_units({"nets": networks}, [networks])


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sharding": "half"}, 'must be "none" or "full"'),
    ({"sharding": "full", "precision": "fp16"}, "precision"),
]


@pytest.mark.shows("P88")
@pytest.mark.parametrize(("options", "match"), OPTIONS)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        helios.Trainer(use_cpu=True, **options)


class Manual(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(2, 2)

    def train_step(self, batch: Any, state: Any) -> None:
        self.net(batch).sum().backward()


@pytest.mark.shows("P88")
def test_manual_steps_need_whole_models(make_data: Callable[[], helios.DataModule]) -> None:
    trainer = helios.Trainer(use_cpu=True, total_steps=1, sharding="full", print_banner=False)
    with pytest.raises(UsageError, match=re.escape('Use sharding="none", or return the loss')):
        trainer.fit(Manual("manual"), make_data())


@pytest.fixture
def make_data() -> Callable[[], helios.DataModule]:
    class Data(helios.DataModule):
        def setup(self) -> None:
            params = helios.DataLoaderParams(batch_size=2)
            self._train_dataset = self._create_dataset(torch.ones(4, 2), params)

    return Data


def require_fsdp() -> None:
    adapter = "helios.sharding.fsdp_adapter"
    assert adapter not in sys.modules
    importlib.import_module(adapter).require_fsdp()


def test_a_torch_without_such_an_fsdp_is_named() -> None:
    found = call(require_fsdp)
    assert (found.returncode == 0) is IS_ABLE
    assert IS_ABLE or 'UsageError: Trainer(sharding="full") needs a' in found.stderr
