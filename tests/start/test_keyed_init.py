"""Values come from keys of paths; what would have none, or lose some, is refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import helios
from helios.core import rng
from helios.errors import UsageError
from tests.support.keyed import GPT, KeyedData, Layer, Positions, Zoo
from tests.support.ranks import RankError, run_ranks

SEED = 5


class Built(helios.Model):
    """A model whose setup is a function."""

    unsaved = ("build", "by_user")

    def __init__(self, build: Callable[[Any], None], by_user: Callable[..., Any] | None) -> None:
        super().__init__("built")
        self.build, self.by_user = build, by_user

    def setup(self, fast_init: bool = False) -> None:
        self.build(self)
        if "optimizer" not in vars(self):
            parameters = [*self.net.parameters()] or [nn.Parameter(torch.ones(1, device="cpu"))]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def init_unit(self, module: nn.Module, name: str) -> bool | None:
        return self.by_user(module, name) if self.by_user is not None else None

    def shard(self) -> list[nn.Module] | None:
        return [*self.net.units] if isinstance(self.net, WithUnit) else None

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return self.net(batch)


def set_up(
    build: Callable[[Any], None], by_user: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Return a model as ``fit`` leaves it that has nothing to train."""
    model = Built(build, by_user)
    options = {"total_steps": 0, "random_seed": SEED, "use_cpu": True, **options}
    helios.Trainer(init="keyed", print_banner=False, **options).fit(model, KeyedData())
    return model


def with_net(make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.net = make()

    return build


def bits_of(module: nn.Module) -> dict[str, bytes]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: part.detach().numpy().tobytes() for name, part in tensors.items()}


class Scaling(nn.Linear):
    """Has an initializer with an argument."""

    def reset_parameters(self, gain: float = 1.0) -> None:
        nn.init.xavier_uniform_(self.weight, gain)
        nn.init.zeros_(self.bias)


class Outer(nn.Module):
    """Has no tensors of its own, and initializes what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaling(3, 3), Scaling(3, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.first.reset_parameters(2.0)
        self.second.reset_parameters(3.0)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "transformer": lambda: nn.Transformer(4, 2, 2, 1, 4, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "double": lambda: nn.Linear(5, 3).double(),
    "buffers": Positions,
    "outer": Outer,
}


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


class Tied(nn.Module):
    """A head and an embedding with one weight."""

    def __init__(self, *, head_decides: bool) -> None:
        super().__init__()
        self.head, self.words = nn.Linear(4, 9), nn.Embedding(9, 4)
        if head_decides:
            self.words.weight = self.head.weight
        else:
            self.head.weight = self.words.weight


@pytest.mark.shows("P107")
@pytest.mark.parametrize("head_decides", [True, False])
def test_a_tied_weight_has_the_values_that_setup_gives_it(head_decides: bool) -> None:
    net = set_up(with_net(lambda: Tied(head_decides=head_decides))).net
    assert net.head.weight is net.words.weight
    alone = nn.Linear(4, 9) if head_decides else nn.Embedding(9, 4)
    with rng.stream(rng.key(SEED, "init", "net.head" if head_decides else "net.words")):
        alone.reset_parameters()
    assert torch.equal(net.head.weight, alone.weight)


@pytest.mark.shows("P107")
def test_parameters_stay_the_same_objects() -> None:
    parts: dict[str, Any] = {}

    def build(model: Any) -> None:
        model.net = Zoo()
        model.net.layers[0].norm.requires_grad_(False)
        model.net.head.weight.decays = True
        model.special = model.net.head.bias
        with model.device:
            model.net.register_buffer("table", torch.arange(3))
            model.net.layers[0].register_buffer("table", model.net.table)
        parts.update(model.net.named_parameters())

    model = set_up(build)
    held = {id(part) for part in model.optimizer.param_groups[0]["params"]}
    assert held == {id(part) for part in model.net.parameters()} == set(map(id, parts.values()))
    assert model.net.head.weight is model.net.embedding.weight
    assert model.net.head.weight.decays
    assert model.special is model.net.head.bias
    assert not model.net.layers[0].norm.weight.requires_grad
    assert model.net.table.tolist() == [0, 1, 2]
    assert model.net.table is model.net.layers[0].table


def scaled(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear | nn.Embedding | GPT):
        return False
    for each in module.parameters(recurse=False):
        nn.init.constant_(each, 0.5 if name.endswith(".projection") else 0.25)
    return True


@pytest.mark.shows("P107")
def test_a_model_initializes_modules_by_their_names() -> None:
    net = set_up(with_net(GPT), scaled).net
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


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tril(torch.ones(3, 3)))


class WritingInside(nn.Module):
    """Writes to the parameter of a child, in its constructor."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        write(self.inner.weight)


def with_a_copy(net: nn.Module) -> nn.Module:
    return nn.ModuleDict({"net": net, "target": copy.deepcopy(net)})


def with_gain() -> nn.Module:
    net = Scaling(2, 2)
    net.reset_parameters(2.0)
    return net


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (Unready, "net.token"),
    (WithConstant, "net.table"),
    (lambda: with_a_copy(nn.Linear(2, 2)), "net.target.weight"),
    (with_gain, "net.weight"),
    (lambda: nn.LazyLinear(3), "net.weight"),
    (lambda: nn.Linear(2, 2, device="cpu"), "net.weight"),
    (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), r"net.parametrizations.weight\S+"),
    (GPT, "net.start"),
]


@pytest.mark.shows("P106")
@pytest.mark.parametrize(("make", "name"), REFUSED)
def test_a_network_without_all_values_is_refused_by_name(
    make: Callable[[], nn.Module], name: str
) -> None:
    with pytest.raises(UsageError, match=f"initialize {name}: "):
        set_up(with_net(make))


def write_by_alias(weight: Tensor) -> None:
    alias = weight.detach().view(-1)
    alias[1:].add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "trunc_normal": nn.init.trunc_normal_,
    "data": lambda weight: weight.data.uniform_(),
    "out": lambda weight: torch.zeros(2, 2, out=weight.data),
    "alias": write_by_alias,
}


@pytest.mark.shows("P106")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_setup_writes_outside_of_initializers_is_refused_by_name(
    write: Callable[[Tensor], Any],
) -> None:
    with pytest.raises(UsageError, match=r"net\.inner\.weight: .* repeat the writes of setup"):
        set_up(with_net(lambda: WritingInside(write)))


def writing(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.net = nn.Linear(2, 2)
        change(model)

    return build


def load_pretrained(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.net.load_state_dict({"bias": torch.ones(2)}, strict=False)


def use_adagrad(model: Any) -> None:
    model.optimizer = torch.optim.Adagrad(model.net.parameters())


LOST: list[tuple[Callable[[Any], Any], str]] = [
    (load_pretrained, r"net\.bias: "),
    (lambda model: setattr(model.net, "bias", nn.Parameter(torch.zeros(2))), r"net\.bias: "),
    (lambda model: setattr(model, "scale", torch.ones(2)), "setup makes by ones: "),
    (use_adagrad, "setup makes by tensor: "),
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


class WithUnit(nn.Module):
    """Has a unit, and a tensor outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Layer()])
        self.scale = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.units[0](x) * self.scale.sum()


def use_unit(module: nn.Module, name: str) -> bool:
    if isinstance(module, WithUnit):
        nn.init.constant_(module.scale, module.units[0].norm.weight.sum().item())
    return isinstance(module, WithUnit)


def set_up_reaching(rank: int) -> None:
    set_up(with_net(WithUnit), use_unit, sharding="full")


@pytest.mark.shows("P106")
def test_an_initializer_that_uses_another_unit_is_refused() -> None:
    with pytest.raises(RankError, match=r"initialize net: its initializer uses .* another unit"):
        run_ranks(set_up_reaching, 2)
