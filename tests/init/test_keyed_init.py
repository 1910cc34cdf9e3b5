"""Values come from keys of paths; what would have none, or lose some, is named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.core import rng
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.replicas.replicas import Replicas
from helios.startup.model_setup import set_up_keyed
from tests.support.keyed import GPT, Zoo

SEED = 5
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "batch_norm": lambda: nn.BatchNorm2d(6),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "bag": lambda: nn.EmbeddingBag(9, 4),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "transformer": lambda: nn.Transformer(4, 2, 2, 1, 4, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
}


class Built(helios.Model):
    """A model whose setup is a function."""

    def __init__(self, build: Callable[[Any], None], *units: str, **values: Any) -> None:
        super().__init__("built")
        self.build = build
        self.units = units
        self.by_user = values.get("by_user")

    unsaved = ("build", "units", "by_user")

    def setup(self, fast_init: bool = False) -> None:
        self.build(self)

    def shard(self) -> list[nn.Module]:
        return [self.net.get_submodule(unit) for unit in self.units]

    def init_unit(self, module: nn.Module, name: str) -> bool | None:
        return self.by_user(module, name) if self.by_user is not None else None


def set_up(
    build: Callable[[Any], None] | nn.Module | Callable[[], nn.Module],
    *units: str,
    is_sharded: bool = False,
    by_user: Callable[[nn.Module, str], Any] | None = None,
) -> Built:
    model = Built(build, *units, by_user=by_user)
    engine = Engine("cpu")
    engine.replicas = Replicas(2, is_sharded=is_sharded)
    model.device, model.engine = engine.device, engine
    set_up_keyed(model, engine, model.shard, seed=SEED, fast_init=False)
    return model


def with_net(make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.net = make()

    return build


def bits_of(module: nn.Module) -> dict[str, bytes]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: part.detach().numpy().tobytes() for name, part in tensors.items()}


@pytest.mark.shows("P105")
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_gets_what_its_initializer_draws_under_the_key_of_its_path(kind: str) -> None:
    model = set_up(with_net(KINDS[kind]))
    expected = KINDS[kind]()
    with torch.no_grad(), rng.stream(0):
        for name, part in reversed([*expected.named_modules()]):
            reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
            if reset is not None:
                rng.reseed(rng.key(SEED, "init", f"net.{name}" if name else "net"))
                reset()
    assert bits_of(model.net) == bits_of(expected)


class Several(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names.split():
            self.add_module(name, KINDS[name]())


@pytest.mark.shows("P105")
def test_a_value_depends_on_neither_order_nor_number_of_modules() -> None:
    some = bits_of(set_up(with_net(lambda: Several("linear lstm attention"))).net)
    more = bits_of(set_up(with_net(lambda: Several("attention conv linear bag lstm"))).net)
    assert some == {name: more[name] for name in some}


@pytest.mark.shows("P107")
def test_parameters_stay_the_same_objects() -> None:
    parts: dict[str, Any] = {}

    def build(model: Any) -> None:
        model.net = Zoo()
        model.net.layers[0].norm.requires_grad_(False)
        model.net.head.weight.decays = True
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        model.special = model.net.head.bias
        parts.update(model.net.named_parameters())

    model = set_up(build)
    held = {id(part) for part in model.optimizer.param_groups[0]["params"]}
    assert held == {id(part) for part in model.net.parameters()} == set(map(id, parts.values()))
    assert model.net.head.weight is model.net.embedding.weight
    assert model.net.head.weight.decays
    assert model.special is model.net.head.bias
    assert not model.net.layers[0].norm.weight.requires_grad
    assert model.net.layers[0].lstm._flat_weights[0] is model.net.layers[0].lstm.weight_ih_l0


def scaled(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear | nn.Embedding | GPT):
        return False
    for each in module.parameters(recurse=False):
        nn.init.constant_(each, 0.5 if name.endswith(".projection") else 0.25)
    return True


@pytest.mark.shows("P107")
def test_a_model_initializes_modules_by_their_names() -> None:
    net = set_up(with_net(GPT), by_user=scaled).net
    assert net.blocks[1].projection.weight.unique().tolist() == [0.5]
    assert net.blocks[1].up.weight.unique().tolist() == [0.25]
    assert net.words.weight is net.head.weight
    assert net.blocks[1].norm.weight.unique().tolist() == [1.0]


class Unready(nn.Module):
    """Has a parameter without an initializer, or with a bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.token = nn.Parameter(torch.empty(4))


class Partly(Unready):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.token[:3])


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tril(torch.ones(3, 3)))


class WritingInside(nn.Module):
    """Writes to the parameter of a child, in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.zeros_(self.inner.bias)


def with_a_copy() -> nn.Module:
    net = nn.Linear(2, 2)
    return nn.ModuleList([net, copy.deepcopy(net)])


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (Unready, r"initialize net\.token, but Unready has no reset_parameters\(\)\. Define it, or"),
    (WithConstant, r"net\.table, but WithConstant has no .* make it in \"with self\.device:\""),
    (Partly, r"net\.token, but Partly\.reset_parameters\(\) leaves values unwritten or NaN"),
    (WritingInside, r"net\.inner\.bias: it is written by code outside .* test_keyed_init\.py:\d+"),
    (with_a_copy, r"net\.1\.weight: it is a copy of another one in the networks at test_keyed"),
    (lambda: nn.LazyLinear(3), r"net\.weight is lazy and has no shape yet"),
    (lambda: nn.Linear(2, 2, device="cpu"), r"net\.weight has values already"),
    (GPT, r"net\.words\.weight: it is written by code outside of Embedding"),
]


@pytest.mark.shows("P106")
@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_a_network_without_all_values_is_refused_by_name(
    make: Callable[[], nn.Module], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        set_up(with_net(make))


def writing(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.net = nn.Linear(2, 2)
        change(model)

    return build


def load_pretrained(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.net.load_state_dict({name: torch.ones(2) for name in ("bias",)}, strict=False)


LOST: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: nn.init.normal_(model.net.weight), r"net\.weight: it is written by code outs"),
    (load_pretrained, r"gives to net\.bias: it is written by code outside of Linear\.reset"),
    (
        lambda model: setattr(model.net, "bias", nn.Parameter(torch.zeros(2))),
        r"to net\.bias: .* at test_keyed_init\.py:\d+, which is not repeated when Linear gets",
    ),
    (lambda model: torch.linspace(0, 1, 3)[1].item(), r"needs one at test_keyed_init\.py:\d+: Ten"),
    (lambda model: setattr(model, "scale", torch.ones(2)), r"but scale is in none"),
    (
        lambda model: helios.load_weights("nowhere", model.net),
        r"must get the Model in setup\(\) with Trainer\(init=\"keyed\"\), got a Linear",
    ),
]


@pytest.mark.shows("P106")
@pytest.mark.parametrize(("change", "match"), LOST)
def test_what_setup_would_lose_is_refused_by_name(change: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        set_up(writing(change))


def unwritten(module: nn.Module, name: str) -> bool:
    return True
