"""``clip_norm`` is that of a step: of all optimizers that are updated from one backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.core.sharded_tensors import whole_of
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import IS_ABLE, Kill, train_here
from tests.support.sums import bits, by_definition

_CLIP = 0.25


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(torch.arange(1.0, 25.0), params)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(1, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x[:, None] / 8).tanh())[:, 0]


def _loss(net: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(batch), batch)


def _optimizers(net: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    first = torch.optim.Adam(net.first.parameters(), lr=0.05)
    return first, torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9)


class _Model(helios.Model):
    unsaved = ("folder", "log", "seen")

    def __init__(self, folder: Path) -> None:
        super().__init__("norms")
        self.folder = folder
        self.seen: dict[int, list[Tensor]] = {}
        self.log: list[str] = []

    def setup(self, fast_init: bool = False) -> None:
        self.net = _Net()
        self.one, self.two = _optimizers(self.net)

    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        self.seen.setdefault(state.global_iteration, []).append(batch)
        return _loss(self.net, batch)

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self.log.append(f"start {type(optimizer).__name__}")

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        self.log.append(f"end {type(optimizer).__name__} {committed}")

    def on_training_end(self) -> None:
        found = b"".join(bits(whole_of(each.detach())) for each in self.net.parameters())
        if self.trainer.global_rank == 0:
            (self.folder / "bits").write_bytes(found)


def _fit(rank: int, folder: Path, given: dict[str, Any], *plugins: Plugin) -> tuple[Any, list[str]]:
    model = _Model(folder)
    options = {"total_steps": 4, "clip_norm": _CLIP, **given}
    train_here(folder, model, _Data(), *plugins, **options)
    return model.seen, model.log


def _train(folder: Path, num_processes: int, *plugins: Plugin, **given: Any) -> Any:
    found = run_ranks(_fit, num_processes, folder, given, *plugins)
    return (folder / "bits").read_bytes(), *found[0]


def _by_hand(seen: dict[int, list[Tensor]], accumulation: int) -> bytes:
    net = _Net()
    optimizers = _optimizers(net)
    for number in range(accumulation, len(seen) + 1, accumulation):
        leaves = []
        for replica in range(len(seen[number])):
            net.zero_grad()
            for each in range(number - accumulation + 1, number + 1):
                _loss(net, seen[each][replica]).backward()
            leaves.append([each.grad for each in net.parameters()])
        count = accumulation * len(leaves)
        for place, parameter in enumerate(net.parameters()):
            parameter.grad = by_definition([leaf[place] for leaf in leaves]).div_(count)
        nn.utils.clip_grad_norm_(net.parameters(), _CLIP)
        for optimizer in optimizers:
            optimizer.step()
    return b"".join(bits(each.detach()) for each in net.parameters())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_optimizers_of_one_loss_are_clipped_together(
    num_replicas: int, accumulation: int, tmp_path: Path
) -> None:
    given = {"num_replicas": num_replicas, "accumulation_steps": accumulation}
    found, seen, log = _train(tmp_path, 1, **given)
    assert found == _by_hand(seen, accumulation)
    names = ["Adam", "SGD"]
    starts, ends = [f"start {x}" for x in names], [f"end {x} True" for x in names]
    assert log == [*starts, *ends] * 4


@pytest.mark.parametrize("num_processes", [2, 3])
def test_the_norm_depends_on_neither_processes_nor_kills(
    num_processes: int, tmp_path: Path
) -> None:
    expected = _train(tmp_path / "whole", 1, num_replicas=3)[0]
    with pytest.raises(RankError):
        _train(tmp_path / "killed", num_processes, Kill(3, rank=1), num_replicas=3)
    assert _train(tmp_path / "killed", num_processes, num_replicas=3)[0] == expected


@pytest.mark.skipif(not IS_ABLE, reason="needs FSDP that reduces as Helios says")
def test_sharded_models_may_have_several_optimizers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_replicas": 3, "sharding": "full"}
    one, two, three = (_train(tmp_path / str(n), n, **given)[0] for n in (1, 2, 3))
    assert one == two == three
    none = _train(tmp_path / "none", 1, num_replicas=3, clip_norm=None)[0]
    given["clip_norm"] = None
    assert _train(tmp_path / "unclipped", 2, **given)[0] == none
