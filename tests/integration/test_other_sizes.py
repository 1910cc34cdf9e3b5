"""Layers of other sizes than in the checkpoint: the error says how to fine-tune, in code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios import DataLoaderParams, Trainer
from helios.errors import StateError


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        params = DataLoaderParams(batch_size=4)
        self._train_dataset = self._create_dataset(TensorDataset(x), params)


def in_attribute(width: int) -> dict[str, Any]:
    return {"body": nn.Linear(4, 8), "head": nn.Linear(8, width)}


def in_sequence(width: int) -> dict[str, Any]:
    return {"net": nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, width)))}


def in_list(width: int) -> dict[str, Any]:
    return {"nets": [nn.Linear(4, 8), nn.Linear(8, width)]}


def in_dict(width: int) -> dict[str, Any]:
    return {"nets": {"body": nn.Linear(4, 8), "head": nn.Linear(8, width)}}


class Embedding(nn.Module):
    """Has a parameter of its own, as a network for images of one size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Conv1d(1, 2, 3, padding="same", padding_mode="circular")
        self.position = nn.Parameter(torch.ones(1, width))
        self.heads = nn.ModuleDict({"out-1": nn.Conv1d(2, width, 3, padding="same")})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["out-1"](self.body(x.unsqueeze(1))).mean(2) + self.position


def in_network(width: int) -> dict[str, Any]:
    return {"net": nn.Sequential(Embedding(width))}


class Net(helios.Model):
    def __init__(self, build: Callable[[int], dict[str, Any]], width: int, name: str) -> None:
        super().__init__(name)
        self.build, self.width = build, width
        self.source: Path | None = None
        self.remedy = ""

    def setup(self, fast_init: bool = False) -> None:
        vars(self).update(self.build(self.width))
        if self.source is not None:
            path = self.source
            exec(self.remedy, {"helios": helios, "torch": torch}, {"self": self, "path": path})
        self.optimizer = torch.optim.SGD(self.whole().parameters(), 0.1)

    def whole(self) -> nn.Sequential:
        found = [vars(self)[name] for name in self.build(1)]
        nets = found[0] if len(found) == 1 else found
        return nn.Sequential(*(nets.values() if isinstance(nets, dict) else nets))

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return self.whole()(batch[0]).square().mean()


def make(root: Path, **options: Any) -> Trainer:
    return Trainer(
        total_steps=1,
        chkpt_frequency=1,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        **options,
    )


def remedy_in(error: pytest.ExceptionInfo[StateError]) -> str:
    found = re.search(r"then: (helios\.load_weights.*)\. Create", str(error.value))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("build", [in_attribute, in_sequence, in_list, in_dict, in_network])
@pytest.mark.parametrize("way", ["load_weights", "resume", "start", "test"])
def test_the_remedy_for_another_head_works(
    build: Callable[[int], dict[str, Any]], way: str, tmp_path: Path
) -> None:
    first = Net(build, 3, "first")
    make(tmp_path).fit(first, Data())
    path = helios.find_last_checkpoint(tmp_path / "first")
    assert path is not None
    other = Net(build, 5, "first" if way in ("resume", "test") else "second")
    if way == "load_weights":
        other.source, other.remedy = path, "helios.load_weights(path, self)"
    trainer = make(tmp_path, resume=path if way == "start" else "auto")
    with pytest.raises(StateError, match="size mismatch") as error:
        (trainer.test if way == "test" else trainer.fit)(other, Data())
    tuned = Net(build, 3, "tuned")
    tuned.source, tuned.remedy = path, remedy_in(error)
    assert make(tmp_path).fit(tuned, Data())
    assert tuned.whole()(torch.zeros(1, 4)).shape == (1, 5)
    again = Net(build, 3, "tuned")
    again.source, again.remedy = path, tuned.remedy
    assert make(tmp_path).fit(again, Data()), "it resumes, too"
    states = [model.whole().state_dict().values() for model in (tuned, again)]
    assert all(map(torch.equal, *states))
