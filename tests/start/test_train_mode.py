"""Networks that `setup` leaves in evaluation mode, as `from_pretrained` of transformers does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from tests.support.kills import KillAt, run_in_child
from tests.support.ranks import run_ranks
from tests.support.warned import collect_warnings


class Doubling(nn.Module):
    """Tells by its outputs which mode it is in, without random numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (2 if self.training else 1)


def make_body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), Doubling(), nn.Dropout(0.5))


class Net(nn.Module):
    """A body, and blocks in a list; ``with_lora`` adds what adapters add: small trained parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_body()
        self.blocks = nn.ModuleList([nn.Sequential(Doubling(), nn.Linear(3, 3)) for _ in range(2)])
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.body(inputs)
        for block in self.blocks:
            found = block(found)
        return self.head(found)

    def with_lora(self) -> Net:
        self.eval().requires_grad_(False)
        for block in self.blocks:
            block.append(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3)))
        return self


def frozen_norms() -> Net:
    net = Net()
    net.body[1].eval()
    return net


def sleeping_dropout() -> Net:
    net = Net()
    net.body[3].eval()
    return net


def all_resting() -> Net:
    return Net().eval()


class Trained(helios.Model):
    def __init__(self, make: Callable[[], Any], train_mode: Any = None) -> None:
        super().__init__("trained")
        self.make = make
        self.train_mode = train_mode

    def setup(self, fast_init: bool = False) -> None:
        self.net = self.make()
        self.optimizer = torch.optim.SGD(
            [each for each in self.net.parameters() if each.requires_grad], lr=0.001
        )

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        (inputs,) = batch
        return (self.net(inputs) - 1).square().mean()

    def valid_step(self, batch: Any, step: int) -> dict[str, Any]:
        return {"mean": (self.net(batch[0]).sum(), len(batch[0]))}


class Data(helios.DataModule):
    def setup(self) -> None:
        data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
        params = helios.DataLoaderParams(batch_size=2, shuffle=False)
        self._train_dataset = self._valid_dataset = self._create_dataset(data, params)


def fit(
    folder: Path, make: Callable[[], Any], *plugins: helios.Plugin, mode: Any = None, **options: Any
) -> tuple[Trained, list[str]]:
    """Train three epochs; returns the model, and what was warned of."""
    model = Trained(make, mode)
    trainer = helios.Trainer(
        total_steps=3,
        valid_frequency=1,
        chkpt_frequency=1,
        chkpt_root=folder,
        store=helios.CheckpointStore(is_async=False),
        use_cpu=True,
        plugins=[*plugins],
        **options,
    )
    with collect_warnings() as warnings:
        trainer.fit(model, Data())
    return model, warnings


def files(folder: Path) -> list[bytes]:
    """Return the ledger and the weights of a run."""
    newest = helios.find_last_checkpoint(folder / "trained")
    assert newest is not None
    weights = helios.load_checkpoint(newest)["model"]["objects"]["net"]
    ledger = (folder / "trained" / "ledger.jsonl").read_bytes()
    return [ledger, *(each.numpy().tobytes() for each in weights.values())]


def fit_resting(rank: int, folder: Path) -> list[str]:
    """Train, and start again a run that has ended; returns what was said of modes."""
    _, warnings = fit(folder, all_resting, num_replicas=3)
    warnings += fit(folder, all_resting, num_replicas=3)[1]
    return [text for text in warnings if "training mode" in text]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_network_in_evaluation_mode_trains_as_if_it_had_never_been_in_it(
    num_processes: int, tmp_path: Path
) -> None:
    said = run_ranks(fit_resting, num_processes, tmp_path / "resting")
    assert fit(tmp_path / "awake", Net, num_replicas=3)[1] == []
    assert files(tmp_path / "resting") == files(tmp_path / "awake")
    assert [len(texts) for texts in said] == [1, *[0] * (num_processes - 1)]
    assert said[0][0].startswith("Put into training mode: net.")
    assert 'train_mode = "keep"' in said[0][0]


@pytest.mark.parametrize("make", [lambda: Net().with_lora(), sleeping_dropout])
def test_a_killed_run_goes_on_in_its_modes_and_warns_once(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    _, warnings = fit(tmp_path / "whole", make)
    assert len(warnings) == 1
    killed = partial(fit, tmp_path / "killed", make, KillAt("on_training_batch_end", 9))
    assert run_in_child(killed, tmp_path / "outcome") == -9
    assert "train_mode" not in "".join(fit(tmp_path / "killed", make)[1])
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_modes_that_are_meant_stay_and_are_not_spoken_of(tmp_path: Path) -> None:
    before = [each.training for each in frozen_norms().modules()]
    model, warnings = fit(tmp_path, frozen_norms)
    assert warnings == []
    assert [each.training for each in model.net.modules()] == before


class WithOthers(Trained):
    """Holds a teacher, an average of weights that no optimizer updates, and an alias of a part."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.teacher = Net().eval().requires_grad_(False)
        self.average = copy.deepcopy(self.net).eval()
        self.alias = self.net.head


@pytest.mark.parametrize(
    ("mode", "expected", "num_warnings"),
    [
        (None, [True, True, False, False], 1),
        ("keep", [False, False, False, False], 0),
        ("all", [True, True, True, True], 0),
    ],
)
def test_what_is_not_trained_rests_unless_the_model_says_otherwise(
    mode: Any, expected: list[bool], num_warnings: int
) -> None:
    model = WithOthers(all_resting, mode)
    with collect_warnings() as warnings:
        helios.Trainer(total_steps=1, use_cpu=True).fit(model, Data())
    parts = (model.net.body, model.net.head, model.teacher, model.average)
    assert [part.training for part in parts] == expected
    assert len(warnings) == num_warnings

    with pytest.raises(helios.ArgumentError, match="train_mode"):
        helios.Trainer(total_steps=1, use_cpu=True).fit(Trained(Net, "train"), Data())
