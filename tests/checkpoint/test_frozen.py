"""``CheckpointStore(frozen="reference")``: what is frozen is left out, and proved at a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import helios
from helios.checkpoint.loading import load
from helios.cli import main
from helios.errors import (
    ArgumentError,
    CheckpointError,
    RunMismatchError,
    UsageError,
)
from helios.plugins import EMA
from helios.storage.content_hash import fingerprint
from tests.test_finetune import Data

REFERENCE = helios.CheckpointStore(frozen="reference")


class Net(helios.Model):
    """A base that is frozen, and a head that is trained."""

    width = 64

    def __init__(self, change: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__("net")
        self.change = change

    unsaved = ("change",)

    def make_base(self) -> nn.Module:
        return nn.Linear(1, self.width)

    def setup(self, fast_init: bool = False) -> None:
        self.base, self.head = self.make_base(), nn.Linear(self.width, 1)
        self.base.requires_grad_(False)
        parameters = [*self.base.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.01)

    def train_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.head(self.base(batch[0])), batch[1])

    def on_training_epoch_start(self, current_epoch: int) -> None:
        if self.change is not None:
            self.change(self, current_epoch)

    def valid_step(self, batch: Any) -> Any:
        error = nn.functional.mse_loss(self.head(self.base(batch[0])), batch[1], reduction="sum")
        return {"error": (error, len(batch[0]))}


def make_trainer(folder: Path, epochs: int = 1, **options: Any) -> helios.Trainer:
    options = {"use_cpu": True, "print_banner": False, "store": REFERENCE} | options
    return helios.Trainer(max_epochs=epochs, chkpt_root=folder, **options)


def train(folder: Path, epochs: int = 1, model: Any = None, **options: Any) -> Any:
    model = model or Net()
    make_trainer(folder, epochs, **options).fit(model, Data())
    return model


def newest(folder: Path) -> Path:
    path = helios.find_last_checkpoint(folder / "net")
    assert path is not None
    return path


def held_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that a checkpoint holds, and of those that it refers to."""
    state = load(newest(folder)).payload["model"]
    objects = {path: state["objects"][path] for path in ("base", "head")}
    held = [f"{path}.{key}" for path, part in objects.items() for key in part]
    return held, [*state.get("frozen", ())]


def weights_of(model: Any) -> int:
    return fingerprint({**model.base.state_dict(), **model.head.state_dict()})


HEAD, BASE = ["head.weight", "head.bias"], ["base.weight", "base.bias"]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"nproc": 2}, marks=pytest.mark.full), {"init": "keyed"}]
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_saves_everything(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = train(tmp_path / "whole", 3, store=None, **options)
    train(tmp_path / "cut", 1, **options)
    assert held_in(tmp_path / "cut") == (HEAD, BASE)
    resumed = train(tmp_path / "cut", 3, **options)
    assert held_in(tmp_path / "cut") == (HEAD, BASE)
    assert weights_of(resumed) == weights_of(whole)
    ledgers = [tmp_path / name / "net" / "ledger.jsonl" for name in ("whole", "cut")]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    # It has ended: what is restored is complete, too.
    model, options = Net(), {"init": options.get("init", "setup")}
    scores = make_trainer(tmp_path / "cut", **options).validate(model, Data())
    assert scores == dict(make_trainer(tmp_path / "whole").validate(Net(), Data()))
    assert weights_of(model) == weights_of(whole)


class Large(Net):
    width = 2**20


class Minute(Large):
    """Trains a thousandth of what it has."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup()
        self.base = nn.Sequential(self.base, self.head).requires_grad_(False)
        self.head = nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=0.01)


def test_a_large_base_takes_no_space(tmp_path: Path) -> None:
    sizes = []
    for store in (REFERENCE, None):
        model = train(tmp_path / str(store), model=Minute(), store=store)
        sizes.append(newest(tmp_path / str(store)).stat().st_size)
    base = sum(each.nbytes for each in model.base.parameters())
    assert sizes[1] > base > 2**23
    assert sizes[0] < 2**17
    assert sizes[1] - sizes[0] >= base


class Tied(Net):
    """Networks with parameters that have two names: frozen ones, and trained ones."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup()
        self.base = nn.ModuleDict({"a": self.base, "b": self.base, "norm": nn.BatchNorm1d(64)})
        self.base["norm"].requires_grad_(False)
        self.head = nn.ModuleDict({"a": self.head, "b": self.head})

    def train_step(self, batch: Any) -> Any:
        found = self.head["b"](self.base["norm"](self.base["b"](batch[0])))
        return nn.functional.mse_loss(found, batch[1])


@pytest.mark.parametrize("store", [REFERENCE, None])
def test_an_export_of_what_is_trained_has_no_frozen_parameters(
    tmp_path: Path, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs in (1, 2):
        options = {"store": store, "plugins": [EMA(0.5)], "valid_frequency": None}
        model = train(tmp_path, epochs, Tied(), **options)
    words = ["export", str(tmp_path / "net"), "--trained", "--force", "--to"]
    out = tmp_path / "trained.pt"
    assert main([*words, "pt", "--out", str(out)]) == 0
    found = torch.load(out, weights_only=True)
    buffers = {f"base.norm.{name}" for name, _ in model.base["norm"].named_buffers()}
    assert found.keys() == buffers | {f"head.{name}" for name in model.head.state_dict()}
    states = model.base.state_dict(prefix="base.") | model.head.state_dict(prefix="head.")
    assert fingerprint(found) == fingerprint({name: states[name] for name in found})
    assert main([*words, "pt", "--out", str(out), "--average", "ema"]) == 0
    assert torch.load(out, weights_only=True).keys() == found.keys()
    capsys.readouterr()
    assert main([*words, "huggingface"]) == 2
    assert "from_pretrained draws those" in capsys.readouterr().err


def wrap(base: nn.Module) -> Any:
    torch.manual_seed(0)
    from peft import LoraConfig, get_peft_model

    return get_peft_model(nn.Sequential(base), LoraConfig(r=2, target_modules=["0"]))


class Adapted(Net):
    def setup(self, fast_init: bool = False) -> None:
        super().setup()
        self.base = wrap(self.base)
        adapters = [each for each in self.base.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(adapters, lr=0.01)


@pytest.mark.parametrize("store", [REFERENCE, None])
def test_adapters_are_exported_alone_and_loaded_again(tmp_path: Path, store: Any) -> None:
    model = train(tmp_path, 1, Adapted(), store=store)
    out = tmp_path / "adapters.safetensors"
    words = ["export", str(tmp_path / "net"), "--trained", "--network", "base"]
    assert main([*words, "--to", "safetensors", "--out", str(out)]) == 0
    found = load_file(out)
    assert len(found) == 2
    assert all("lora_" in name for name in found)
    base = model.base.base_model.model[0].base_layer
    for read in (
        lambda net: net.load_state_dict(load_file(out), strict=False),
        lambda net: helios.load_weights(out, net, strict=False),
    ):
        again = wrap(nn.Linear(1, Net.width))
        again.base_model.model[0].base_layer.load_state_dict(base.state_dict())
        assert fingerprint(again.state_dict()) != fingerprint(model.base.state_dict())
        read(again)
        assert fingerprint(again.state_dict()) == fingerprint(model.base.state_dict())


def _thaw(model: Any, epoch: int) -> None:
    model.base.weight.requires_grad_(epoch == 2)


def _assign(model: Any, epoch: int) -> None:
    if epoch == 2:
        model.base.weight.data[0] += 1


def _negate_and_back(model: Any, epoch: int) -> None:
    if epoch in (2, 4):
        model.base.bias.data.neg_()


@pytest.mark.parametrize(
    ("change", "name"),
    [(_thaw, "base.weight"), (_assign, "base.weight"), (_negate_and_back, "base.bias")],
)
def test_what_is_thawed_or_changed_is_saved_from_then_on(
    tmp_path: Path, change: Any, name: str
) -> None:
    whole = train(tmp_path / "whole", 5, Net(change), store=None)
    for epochs in (1, 2, 3, 4, 5):
        model = train(tmp_path / "cut", epochs, Net(change))
        held = held_in(tmp_path / "cut")
        left = BASE if epochs == 1 else [each for each in BASE if each != name]
        assert held == ([name] * (epochs > 1) + HEAD, left), epochs
    assert weights_of(model) == weights_of(whole)


class Rebuilt(Net):
    def make_base(self) -> nn.Module:
        return super().make_base().apply(lambda part: nn.init.constant_(part.bias, 2.0))


COUNT = itertools.count()


class Random(Net):
    def make_base(self) -> nn.Module:
        base = super().make_base()
        torch.nn.init.uniform_(base.weight, generator=torch.Generator().manual_seed(next(COUNT)))
        return base


def test_a_setup_that_makes_something_else_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, 1, Net())
    before = newest(tmp_path).read_bytes()
    message = r"setup\(\) of Rebuilt makes with other values: base\.bias\."
    for call in ("fit", "validate"):
        with pytest.raises(RunMismatchError, match=message):
            getattr(make_trainer(tmp_path, 2), call)(Rebuilt(), Data())
    assert newest(tmp_path).read_bytes() == before


def test_a_random_base_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"makes different frozen weights .*: base\.weight\. "):
        train(tmp_path, 1, Random())
    assert not [*tmp_path.rglob("*.pth")]


class Stateful(Net):
    """Its setup changes what its constructor has made, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[nn.Module] = []
        self.generator = torch.Generator().manual_seed(3)

    def make_base(self) -> nn.Module:
        self.parts.append(super().make_base())
        assert len(self.parts) == 1
        nn.init.uniform_(self.parts[0].bias, generator=self.generator)
        return self.parts[0]


def test_a_setup_is_tried_without_a_trace(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, Stateful(), store=None)
    train(tmp_path / "cut", 1, Stateful())
    assert held_in(tmp_path / "cut") == (HEAD, BASE)
    assert weights_of(train(tmp_path / "cut", 2, Stateful())) == weights_of(whole)


def test_without_a_model_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    path, named = newest(tmp_path), r"refers to frozen weights.*base\.weight, base\.bias"
    with pytest.raises(CheckpointError, match=named):
        helios.load_checkpoint(path)
    with pytest.raises(CheckpointError, match=named):
        helios.load_weights(path, nn.Linear(64, 1))
    out = tmp_path / "weights.pt"
    assert main(["export", str(path), "--to", "pt", "--out", str(out)]) != 0
    assert "base.weight, base.bias" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("stores", [(REFERENCE, None), (None, REFERENCE)])
def test_the_option_may_change_between_two_starts(tmp_path: Path, stores: Any) -> None:
    whole = train(tmp_path / "whole", 3, store=None)
    for epochs, store in zip((1, 2, 3), (*stores, stores[1]), strict=True):
        model = train(tmp_path / "cut", epochs, store=store)
        assert held_in(tmp_path / "cut")[1] == (BASE if store is REFERENCE else [])
    assert weights_of(model) == weights_of(whole)


class Own(Net):
    def state_dict(self) -> dict[str, Any]:
        return {"head": self.head.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.head.load_state_dict(state_dict["head"])


def test_what_cannot_refer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r'frozen=\.\.\.\) must be "save" or "reference"'):
        helios.CheckpointStore(frozen="none")
    with pytest.raises(ArgumentError, match=r'frozen="save" with sharding="full"'):
        make_trainer(tmp_path, sharding="full")
    with pytest.raises(UsageError, match="must be omitted with Own"):
        train(tmp_path, 1, Own())
