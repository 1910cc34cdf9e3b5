"""Building components, and packing on one engine what another unpacks."""

from __future__ import annotations

import functools
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import IncompatibleCheckpointError, StateError
from tests.support.ranks import run_ranks
from tests.support.runs import digest

IN_GROUPS = ("fp32", "fp16")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Weighted(nn.Module):
    """A criterion with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(len(x))  # type: ignore[operator]
        return x.float().square().mean()


Parts = tuple[Any, Any, Any, Any]


def make_engine(precision: str) -> Engine:
    return Engine("cpu", precision=Precision.from_str(precision))


def build(engine: Engine, seed: int = 0) -> Parts:
    torch.manual_seed(seed)
    return engine.init_components(
        Net,
        Weighted,
        lambda model: torch.optim.Adam(model.layers.parameters(), lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )


def step(engine: Engine, parts: Parts, *, is_bad: bool = False) -> bool:
    model, criterion, optimizer, scheduler = parts
    with engine.autocast():
        loss = criterion(model(torch.arange(8.0).view(2, 4)))
    engine.backward_loss(loss * float("inf") if is_bad else loss)
    is_committed = engine.optimizer_step(optimizer)
    if is_committed:
        scheduler.step()
    engine.zero_grad(optimizer)
    engine.close_window()
    return is_committed


def trained(precision: str) -> tuple[Engine, Parts]:
    engine = make_engine(precision)
    parts = build(engine)
    for is_bad in (precision == "fp16", False):
        step(engine, parts, is_bad=is_bad)
    return engine, parts


@pytest.mark.shows("C15", "E16")
def test_components_are_built_in_their_order_and_on_the_device() -> None:
    """One signature, alone or not."""
    calls: list[Any] = []

    def make(name: str, result: Any, *arguments: Any) -> Any:
        calls.append((name, *arguments))
        return result

    network, criterion = nn.Linear(2, 1), nn.MSELoss()
    made = Engine("meta").init_components(
        functools.partial(make, "model", network),
        functools.partial(make, "criterion", criterion),
        functools.partial(make, "optimizer", "optimizer"),
        functools.partial(make, "scheduler", "scheduler"),
    )
    assert made == (network, criterion, "optimizer", "scheduler")
    assert calls == [
        ("model",),
        ("criterion",),
        ("optimizer", network),
        ("scheduler", "optimizer"),
    ]
    assert network.weight.device.type == "meta"


@pytest.mark.shows("E16", "E17")
def test_each_component_may_be_left_out_or_be_several() -> None:
    engine = Engine("cpu")
    assert engine.init_components() == (None, None, None, None)
    model, criterion, *_ = engine.init_components(
        lambda: {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, lambda: {"a": nn.MSELoss()}
    )
    assert sorted(model) == ["a", "b"]
    assert list(criterion) == ["a"]
    function = engine.init_components(criterion_fn=lambda: torch.nn.functional.mse_loss)[1]
    assert function is torch.nn.functional.mse_loss


@pytest.mark.shows("E33", "E34")
def test_a_checkpoint_has_a_key_for_each_part() -> None:
    """Parts that are not there have none; what else is given is taken over."""
    engine = Engine("cpu")
    net, optimizer = nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    found = engine.pack_checkpoint({"a": net, "b": net}, optimizer=optimizer, epoch=3)
    names = ["model_a_state_dict", "model_b_state_dict", "optimizer_state_dict", "epoch"]
    assert list(found) == names
    assert found["epoch"] == 3
    other = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    engine.unpack_checkpoint(found, other, optimizer=optimizer)
    assert digest(other["b"].state_dict()) == digest(net.state_dict())
    assert engine.pack_checkpoint() == {}


@pytest.mark.shows("E35")
def test_parts_that_were_not_packed_are_told_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """With ``strict`` nothing is loaded at all."""
    engine = Engine("cpu")
    net, optimizer = nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    checkpoint = engine.pack_checkpoint(nn.Linear(1, 1))
    before = digest(net.state_dict())
    with pytest.raises(StateError, match=r"no optimizer_state_dict \(only model_state_dict\)"):
        engine.unpack_checkpoint(checkpoint, net, optimizer=optimizer, strict=True)
    assert digest(net.state_dict()) == before
    with caplog.at_level(logging.WARNING):
        engine.unpack_checkpoint(checkpoint, net, optimizer=optimizer)
    assert digest(net.state_dict()) == digest(checkpoint["model_state_dict"])
    assert "no optimizer_state_dict" in caplog.text


def compare(engine: Engine, parts: Parts, checkpoint: dict[str, Any]) -> str:
    """Unpack on parts that begin elsewhere; returns the digest of what they then pack."""
    engine.unpack_checkpoint(checkpoint, *parts, strict=True)
    again = engine.pack_checkpoint(*parts)
    if "scaler" in checkpoint and "scaler" in again:
        assert again["scaler"] == checkpoint["scaler"]
    return digest({name: state for name, state in again.items() if name != "scaler"})


def _pack_in_group(rank: int, folder: str) -> dict[str, Any]:
    """Pack what is wrapped, and take back what a lone engine has packed."""
    found: dict[str, Any] = {}
    for precision in IN_GROUPS:
        engine, parts = trained(precision)
        assert isinstance(parts[0], DistributedDataParallel)
        engine.save_checkpoint(engine.pack_checkpoint(*parts), Path(folder, f"group-{precision}"))
        for other in IN_GROUPS:
            lone = engine.load_checkpoint(Path(folder, f"lone-{other}"))
            engine.unpack_checkpoint(lone, *parts, strict=True)
            again = engine.pack_checkpoint(*parts)
            again.pop("scaler", None)
            found[f"{other} {precision}"] = digest(again)
        engine.barrier()
    return found


@pytest.mark.shows("E33", "E36", "E43")
def test_what_a_group_packs_one_process_unpacks_and_the_other_way_round(tmp_path: Path) -> None:
    """Names have no trace of the wrapper; only the master writes."""
    lone: dict[str, str] = {}
    for precision in IN_GROUPS:
        engine, parts = trained(precision)
        checkpoint = engine.pack_checkpoint(*parts)
        engine.save_checkpoint(checkpoint, tmp_path / f"lone-{precision}")
        checkpoint.pop("scaler", None)
        lone[precision] = digest(checkpoint)
    for found in run_ranks(_pack_in_group, 2, str(tmp_path)):
        for pair, text in found.items():
            assert text == lone[pair.split()[0]], pair
    for old, new in itertools.product(IN_GROUPS, IN_GROUPS):
        engine = make_engine(new)
        checkpoint = engine.load_checkpoint(tmp_path / f"group-{old}")
        assert next(iter(checkpoint["model_state_dict"])) == "layers.0.weight"
        found = compare(engine, build(engine, seed=1), checkpoint)
        assert found == lone[old], "Both ranks saw the same data, so the mean has the same bits."


def _save(rank: int, folder: str) -> Any:
    engine = Engine("cpu")
    engine.save_checkpoint({"rank": engine.rank}, Path(folder, "deep", "file.pth"))
    engine.barrier()
    return engine.load_checkpoint(Path(folder, "deep", "file.pth"))


@pytest.mark.shows("E37")
def test_only_the_master_writes(tmp_path: Path) -> None:
    assert run_ranks(_save, 2, str(tmp_path)) == [{"rank": 0}] * 2
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.pth"]


@pytest.mark.shows("E37")
def test_loading_executes_nothing(tmp_path: Path) -> None:
    torch.save({"value": functools.partial(print, "executed")}, tmp_path / "file.pth")
    with pytest.raises(IncompatibleCheckpointError, match="functools"):
        Engine("cpu").load_checkpoint(tmp_path / "file.pth")
