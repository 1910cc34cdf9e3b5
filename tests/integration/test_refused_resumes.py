"""A start that does not fit its checkpoint is refused before anything of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.errors import StateError
from helios.plugins import Plugin
from tests.support.killed_fits import fit, kill

_STATEFUL = ("net", "spare", "optimizer", "scheduler")


class Net(helios.Model):
    """``made`` gets what setup has made; ``change`` is what this start does otherwise."""

    def __init__(self, change: Callable[[Net], object] | None = None) -> None:
        super().__init__("net")
        self.change = change
        self.made: dict[str, bytes] = {}

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.spare = nn.Linear(2, 2)
        self.choices = {"tanh": torch.tanh, "relu": torch.relu}
        self.chosen = self.choices["tanh"]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.rows = [0]
        if self.change is not None:
            self.change(self)
        self.made = self.bytes_now()

    def bytes_now(self) -> dict[str, bytes]:
        """Return what this model holds, by attribute."""
        return {
            name: _bytes(part.state_dict() if name in _STATEFUL else part)
            for name, part in vars(self).items()
            if name in (*_STATEFUL, "rows")
        }

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        self.rows.append(state.global_iteration)
        self.spare.weight.data.add_(1)
        self.chosen = self.choices["relu"]
        return (self.chosen(self.net(x)) - y).square().mean()


class Probe(Plugin):
    """Holds a network."""

    def __init__(self, width: int | None = 1) -> None:
        super().__init__("probe")
        self.width = width

    def setup(self) -> None:
        self.probe = nn.Linear(1, self.width) if self.width else None

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        if self.probe is not None:
            self.probe.weight.data.add_(1)


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, Mapping):
        return b"".join(repr(key).encode() + _bytes(member) for key, member in value.items())
    return repr(value).encode()


ROWS: dict[str, tuple[Callable[[Net], object] | None, int | None]] = {
    "a network is gone": (lambda net: delattr(net, "spare"), 1),
    "what an attribute refers to is gone": (lambda net: net.choices.pop("relu"), 1),
    "a network of a plugin is gone": (None, None),
    "another shape in a network": (lambda net: setattr(net, "spare", nn.Linear(3, 2)), 1),
}


@pytest.mark.shows("S76")
@pytest.mark.parametrize("row", ROWS)
def test_a_resume_changes_all_or_nothing(row: str, tmp_path: Path) -> None:
    def train(root: Path, *plugins: Plugin) -> None:
        fit(Net(), root, Probe(), *plugins)

    root = tmp_path / "run"
    kill(train, root, 5)
    change, width = ROWS[row]
    model = Net(change)
    with pytest.raises(StateError):
        fit(model, root, Probe(width))
    assert model.bytes_now() == model.made
    again = Net()
    fit(again, root, Probe())  # the checkpoint is as it was
    assert again.rows == [*range(9)]
