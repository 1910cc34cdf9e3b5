"""``helios.WeightedLoss``: gradients and losses are sums over replicas, divided once by a weight.

The reference is a loop by hand: autograd of each sum, the tree over replicas, one division.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.core.sharded_tensors import whole_of
from helios.loops import OptimizerLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import IS_ABLE, Kill, train_here
from tests.support.sums import bits, by_definition

_LENGTH = 18


@dataclasses.dataclass(frozen=True)
class _Setting:
    num_replicas: int = 3
    accumulation: int = 1
    form: str = "loss"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=1)
        self._train_dataset = self._create_dataset(torch.arange(_LENGTH), params)


def _weight_of(index: int) -> int:
    """Return how many tokens a sample has: none in the first step of three replicas."""
    return 0 if index < 3 else index % 5


def _make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


def _total(net: nn.Module, index: int) -> Tensor:
    count = _weight_of(index)
    x = torch.linspace(-1.0, 1.0, 7)[:, None] * (1 + index / 3)
    return (net(x)[:, 0] * (torch.arange(7) < count) - index).square()[:count].sum()


class _Model(helios.Model):
    unsaved = ("folder", "seen")

    def __init__(self, folder: Path) -> None:
        super().__init__("weighted")
        self.folder = folder
        self.seen: dict[int, list[int]] = {}

    def setup(self, fast_init: bool = False) -> None:
        self.net = _make_net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        index = int(batch)
        self.seen.setdefault(state.global_iteration, []).append(index)
        total = _total(self.net, index)
        # A weight that depends on parameters must not get into the gradient.
        return helios.WeightedLoss(sum=total, weight=_weight_of(index) + 0.0 * total)

    def on_training_end(self) -> None:
        found = b"".join(bits(whole_of(each.detach())) for each in self.net.parameters())
        if self.trainer.global_rank == 0:
            (self.folder / "bits").write_bytes(found)


class _Yielding(_Model):
    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        yield super().train_step(batch, state)


class _Own(OptimizerLoop):
    """Passes the losses of the default loop on."""

    def losses(self, batch: Any) -> Iterator[Any]:
        yield from super().losses(batch)


def _fit(rank: int, folder: Path, setting: _Setting, *plugins: Plugin) -> dict[int, list[int]]:
    """Return the indices that each iteration has trained on."""
    model = (_Yielding if setting.form == "yield" else _Model)(folder)
    loop = _Own() if setting.form == "own" else None
    options = {"num_replicas": setting.num_replicas, "accumulation_steps": setting.accumulation}
    options |= {"train_unit": "epoch", "total_steps": 2, **setting.options}
    train_here(folder, model, _Data(), *plugins, optimizer_loop=loop, **options)
    return model.seen


def _train(folder: Path, num_processes: int, setting: _Setting, *plugins: Plugin) -> Any:
    found = run_ranks(_fit, num_processes, folder, setting, *plugins)
    lines = map(json.loads, (folder / "weighted" / "ledger.jsonl").read_text().splitlines())
    losses = [bytes.fromhex(line["loss"]["loss"]) for line in lines if "loss" in line]
    return (folder / "bits").read_bytes(), losses, found


def _by_hand(seen: dict[int, list[int]], accumulation: int, clip: float | None = None) -> Any:
    net = _make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    iterations, losses = sorted(seen), []
    for number in iterations:
        totals = [_total(net, index).item() for index in seen[number]]
        weight = float(sum(map(_weight_of, seen[number])))
        losses.append(by_definition(totals) / (weight or 1.0))
        if number % accumulation:
            continue
        window = range(number - accumulation + 1, number + 1)
        leaves = []
        for replica in range(len(seen[number])):
            optimizer.zero_grad()
            for each in window:
                _total(net, seen[each][replica]).backward()
            leaves.append([each.grad for each in net.parameters()])
        weight = float(sum(_weight_of(index) for each in window for index in seen[each]))
        if weight == 0:
            continue
        for place, parameter in enumerate(net.parameters()):
            parameter.grad = by_definition([leaf[place] for leaf in leaves]).div_(weight)
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return b"".join(bits(each.detach()) for each in net.parameters()), losses


@pytest.mark.parametrize("form", ["loss", "own"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_gradients_are_sums_that_are_divided_once(
    num_replicas: int, accumulation: int, form: str, tmp_path: Path
) -> None:
    setting = _Setting(num_replicas, accumulation, form, {"clip_norm": 0.5})
    found, losses, ranks = _train(tmp_path, 1, setting)
    seen = {n: [index for part in ranks for index in part[n]] for n in ranks[0]}
    expected, means = _by_hand(seen, accumulation, clip=0.5)
    assert found == expected
    if num_replicas == 1:
        means = [float(torch.tensor(x)) for x in means]
    assert losses == [struct.pack(">d", mean) for mean in means]


@pytest.mark.parametrize(("form", "num_processes"), [("loss", 3), ("own", 2), ("yield", 3)])
def test_bits_depend_on_neither_processes_nor_kills(
    form: str, num_processes: int, tmp_path: Path
) -> None:
    setting = _Setting(3, 2, "loss", {"train_unit": "iteration", "total_steps": 5})
    expected = _train(tmp_path / "whole", 1, setting)[:2]
    setting = dataclasses.replace(setting, form=form)
    with pytest.raises(RankError):
        run_ranks(_fit, num_processes, tmp_path / "killed", setting, Kill(7, rank=1))
    assert _train(tmp_path / "killed", num_processes, setting)[:2] == expected


@pytest.mark.skipif(not IS_ABLE, reason="needs FSDP that reduces as Helios says")
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_sharded_models_divide_once_too(num_processes: int, tmp_path: Path) -> None:
    setting = _Setting(3, options={"sharding": "full"})
    found, losses, _ = _train(tmp_path / "full", num_processes, setting)
    expected = _train(tmp_path / "none", 1, _Setting(3))
    assert (found, losses) == expected[:2]
