"""Values come from keys of paths; what would have none, or lose some, is named."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
    "transposed": lambda: nn.ConvTranspose1d(3, 4, 3),
    "batch_norm": lambda: nn.BatchNorm2d(6),
    "group_norm": lambda: nn.GroupNorm(2, 6),
    "layer_norm": lambda: nn.LayerNorm(7),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "bag": lambda: nn.EmbeddingBag(9, 4),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "prelu": lambda: nn.PReLU(3),
    "cell": lambda: nn.GRUCell(3, 4),
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


@pytest.mark.shows("P105")
def test_all_generators_are_keyed_and_are_left_as_they_were() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                drawn = rng.get_default_numpy_rng().generator.normal()
                nn.init.constant_(self.weight[:1], torch.rand(()).item())
                nn.init.constant_(self.weight[1:2], random.random())
                nn.init.constant_(self.weight[2:], drawn)

    found = []
    for seed in (1, 2):
        rng.seed_rngs(seed)
        before = rng.get_rng_state_dict()
        found.append(bits_of(set_up(with_net(Noisy)).net))
        after = rng.get_rng_state_dict()
        assert after["torch"].equal(before["torch"])
        assert (after["rand"], after["numpy"]) == (before["rand"], before["numpy"])
    assert found[0] == found[1]


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


@pytest.mark.shows("P107")
def test_a_tied_parameter_is_initialized_by_the_module_that_setup_let_do_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.words = nn.Linear(4, 300), nn.Embedding(300, 4)
            self.head.weight = self.words.weight

    net = set_up(with_net(Tied)).net
    assert net.head.weight is net.words.weight
    # Unlike those of a Linear, at most 0.5 here.
    assert net.words.weight.abs().max() > 2
    assert net.head.bias.abs().max() <= 0.5


def test_copies_of_a_template_have_values_of_their_own() -> None:
    net = set_up(with_net(Zoo)).net
    first, second = (bits_of(layer) for layer in net.copies.layers)
    assert first["linear1.weight"] != second["linear1.weight"]
    # As the attention's own initializer says, not that of its projection.
    assert not any(first["self_attn.out_proj.bias"])


@pytest.mark.shows("P107")
def test_types_formats_and_compiled_names_are_kept() -> None:
    def build(model: Any) -> None:
        model.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
        model.net = model.net.to(memory_format=torch.channels_last)

    net = set_up(build).net
    assert net[0].weight.dtype is net[1].running_var.dtype is torch.float64
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    plain = bits_of(set_up(with_net(lambda: nn.Sequential(nn.Linear(2, 3)))).net)
    compile_it = partial(torch.compile, backend="eager")
    compiled = set_up(with_net(lambda: compile_it(nn.Sequential(nn.Linear(2, 3))))).net
    assert bits_of(compiled) == {f"_orig_mod.{name}": part for name, part in plain.items()}


class Buffers(nn.Module):
    """Buffers of types in which any number may be meant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bytes", torch.empty(512, dtype=torch.uint8))
        self.register_buffer("complex", torch.empty(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("bits", torch.empty(3, dtype=torch.bool))
        self.register_buffer("given", torch.from_numpy(np.arange(3)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.bytes.copy_(torch.arange(512, dtype=torch.uint8))
        self.complex.copy_(torch.arange(3) * 1j)
        self.bits.copy_(torch.tensor([True, False, True]))


@pytest.mark.shows("P107")
def test_buffers_of_any_type_are_initialized_and_those_with_values_keep_them() -> None:
    with torch.device("meta"):
        Buffers()
    net = set_up(with_net(Buffers)).net
    assert net.bytes.tolist() == [*range(256)] * 2
    assert net.complex.tolist() == [0, 1j, 2j]
    assert net.bits.tolist() == [True, False, True]
    assert net.given.tolist() == [0, 1, 2]


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


class Pair(nn.Module):
    """Holds nothing itself, and scales what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def halve(module: nn.Module, name: str) -> bool:
    if isinstance(module, Pair):
        module.second.weight.mul_(0.5)
    return False


def test_a_model_may_change_what_is_inside_of_a_module_that_holds_nothing() -> None:
    net = set_up(with_net(lambda: nn.Sequential(Pair()))).net
    halved = set_up(with_net(lambda: nn.Sequential(Pair())), by_user=halve).net
    assert halved[0].second.weight.equal(net[0].second.weight / 2)
    assert halved[0].first.weight.equal(net[0].first.weight)


@pytest.mark.shows("P107")
def test_state_that_adagrad_makes_at_once_has_values() -> None:
    def build(model: Any) -> None:
        model.net = nn.Linear(2, 3)
        options: Any = {"initial_accumulator_value": 0.25}
        model.optimizer = torch.optim.Adagrad(model.net.parameters(), **options)

    model = set_up(build)
    states = [model.optimizer.state[part] for part in model.net.parameters()]
    assert [state["sum"].unique().tolist() for state in states] == [[0.25]] * 2
    assert [state["step"].item() for state in states] == [0.0] * 2


class Unready(nn.Module):
    """Has a parameter without an initializer, or with a bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.token = nn.Parameter(torch.empty(4))


class Partly(Unready):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.token[:3])


class Scaling(Unready):
    def reset_parameters(self) -> None:
        self.token.mul_(0.5)


class Replacing(Unready):
    def reset_parameters(self) -> None:
        self.token = nn.Parameter(torch.zeros(4))


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tril(torch.ones(3, 3)))


class PartlyWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.empty(4, dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.numbers[1:].zero_()


class WritingInside(nn.Module):
    """Writes to the parameter of a child, in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.zeros_(self.inner.bias)


class WritingOwn(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.zeros_(self.bias)


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = [torch.arange(3)]


class Sibling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), Greedy()
        self.second.others.append(self.first)


class Greedy(nn.Linear):
    def __init__(self) -> None:
        self.others: list[nn.Module] = []
        super().__init__(2, 2)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for other in self.others:
            nn.init.zeros_(other.bias)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.register_hook(lambda gradient: gradient)


class Own(nn.Parameter):
    """A kind of parameter that Helios cannot know."""


def of_its_own() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight = Own(torch.empty(2, 2))
    return net


def sharing_memory() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data = net[0].weight.data
    return net


def with_a_copy() -> nn.Module:
    net = nn.Linear(2, 2)
    return nn.ModuleList([net, copy.deepcopy(net)])


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (Unready, r"initialize net\.token, but Unready has no reset_parameters\(\)\. Define it, or"),
    (WithConstant, r"net\.table, but WithConstant has no .* make it in \"with self\.device:\""),
    (Partly, r"net\.token, but Partly\.reset_parameters\(\) leaves values unwritten or NaN"),
    (Scaling, r"net\.token, but Scaling\.reset_parameters\(\) leaves values unwritten"),
    (PartlyWhole, r"net\.numbers, but PartlyWhole\.reset_parameters\(\) leaves values"),
    (Replacing, r"write into parameters, but that of net \(Replacing\) replaces"),
    (WritingInside, r"net\.inner\.bias: it is written by code outside .* test_keyed_init\.py:\d+"),
    (WritingOwn, r"lose what .* gives to net\.bias: it is written by code outside of WritingOwn"),
    (Attribute, r"but net\.table\.0 is in none\. Make it in \"with self\.device:\""),
    (Sibling, r"that of net\.second uses net\.first\.bias\. Initialize each of them in"),
    (Hooked, r"net\.weight has a hook, which it would lose"),
    (of_its_own, r"net\.weight is a Own\. Use a Parameter"),
    (sharing_memory, r"cannot initialize net\.1\.weight, which shares its memory with net\.0\.w"),
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


def keep_elsewhere(model: Any) -> None:
    model.helper = type("Helper", (), {})()
    model.helper.net = nn.Linear(3, 3)


def own_optimizer(model: Any) -> None:
    class Eager(torch.optim.SGD):
        """Makes its state at once."""

    model.optimizer = Eager(model.net.parameters())
    model.optimizer.state[model.net.weight]["sum"] = torch.zeros(2, 2)


def learn_at_a_tensor(model: Any) -> None:
    groups = [{"params": model.net.parameters(), "scale": torch.tensor(0.1)}]
    model.optimizer = torch.optim.SGD(groups, lr=0.1)


def refer_weakly(model: Any) -> None:
    model.reference = weakref.ref(model.net.weight)


LOST: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: nn.init.normal_(model.net.weight), r"net\.weight: it is written by code outs"),
    (lambda model: model.net.weight.data.mul_(0.5), r"to net\.weight: it is written by code outs"),
    (lambda model: model.net.weight.data[0].zero_(), r"to net\.weight: it is written by code out"),
    (load_pretrained, r"gives to net\.bias: it is written by code outside of Linear\.reset"),
    (
        lambda model: setattr(model.net, "bias", nn.Parameter(torch.zeros(2))),
        r"to net\.bias: .* at test_keyed_init\.py:\d+, which is not repeated when Linear gets",
    ),
    (lambda model: setattr(model.net.bias, "data", torch.zeros(2)), r"to net\.bias: it is writt"),
    (
        lambda model: setattr(model.net, "bias", nn.Parameter(torch.tensor([1.0, 2.0]))),
        r"gives to net\.bias: it is written by code outside",
    ),
    (lambda model: torch.linspace(0, 1, 3)[1].item(), r"needs one at test_keyed_init\.py:\d+: Ten"),
    (lambda model: model.net.weight.detach().numpy(), r"needs one at test_keyed_init\.py:\d+: can"),
    (lambda model: model.net.to(model.device), r"needs one at test_keyed_init\.py:\d+: Cannot co"),
    (lambda model: setattr(model, "scale", torch.ones(2)), r"but scale is in none"),
    (lambda model: setattr(model, "parts", {"a": [torch.ones(2)]}), r"but parts.* is in none"),
    (
        lambda model: setattr(model, "scale", nn.Parameter(torch.ones(2))),
        r"needs parameters that are in networks, but scale is in none|scale is in none",
    ),
    (keep_elsewhere, r"but what test_keyed_init\.py:\d+ has made is in none"),
    (own_optimizer, r"optimizer \(Eager\) makes it in its constructor"),
    (learn_at_a_tensor, r"but what test_keyed_init\.py:\d+ has made is in none"),
    (refer_weakly, r"one of net is part of a graph, or has a weak reference"),
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


def test_errors_of_setup_that_have_nothing_to_do_with_it_are_not_changed() -> None:
    def fail(model: Any) -> None:
        raise RuntimeError("bad metadata")

    with pytest.raises(RuntimeError, match=r"^bad metadata$"):
        set_up(fail)


def test_values_made_on_the_device_are_kept() -> None:
    def build(model: Any) -> None:
        with model.device:
            model.scale = torch.ones(2)
            model.rates = torch.linspace(0, 1, 3).tolist()
        model.net = nn.Linear(2, 2)

    model = set_up(build)
    assert model.scale.tolist() == [1.0, 1.0]
    assert model.rates == [0.0, 0.5, 1.0]


def unwritten(module: nn.Module, name: str) -> bool:
    return True


@pytest.mark.shows("P106")
def test_a_promise_of_the_user_is_checked() -> None:
    with pytest.raises(UsageError, match=r"but Model\.init_unit, which returns True for it, leav"):
        set_up(with_net(lambda: nn.Linear(2, 2)), by_user=unwritten)


def only_attention(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.MultiheadAttention):
        return False
    for each in module.parameters(recurse=False):
        nn.init.zeros_(each)
    return True


@pytest.mark.shows("P106")
def test_what_a_replaced_initializer_has_done_inside_is_not_lost_silently() -> None:
    with pytest.raises(UsageError, match=r"net\.out_proj\.bias: it is written by MultiheadAtt"):
        set_up(with_net(lambda: nn.MultiheadAttention(4, 2)), by_user=only_attention)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Late(nn.Linear):
    """Writes to a child, but not in setup."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            nn.init.zeros_(self.inner.bias)


@pytest.mark.shows("P106")
def test_an_initializer_reaches_into_no_other_unit_on_one_process_too() -> None:
    set_up(with_net(Around), "attention", is_sharded=True)
    with pytest.raises(UsageError, match=r"written by Multi.*\._reset_parameters\(\) of net\.att"):
        set_up(with_net(Around), "attention.out_proj", is_sharded=True)
    set_up(with_net(KINDS["transformer"]), is_sharded=True)
    with pytest.raises(UsageError, match=r"written by Transformer\._reset_parameters\(\) of net"):
        set_up(with_net(KINDS["transformer"]), "decoder", is_sharded=True)
    set_up(with_net(Late), is_sharded=True)
    with pytest.raises(UsageError, match=r"that of net uses net\.inner\.bias\. Initialize each"):
        set_up(with_net(Late), "inner", is_sharded=True)


def test_a_model_cannot_be_sharded_by_key_where_it_cannot_be_sharded() -> None:
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        set_up(with_net(lambda: nn.SyncBatchNorm(3)), is_sharded=True)
