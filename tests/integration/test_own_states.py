"""Trainings with a ``state_dict`` of somebody else's: what it leaves out comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.errors import StateError
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.ordinary.harness import WIDTH, Case, Outcome, Regression, cut_off, train
from tests.state_graph.test_partial_networks import OnlyHead
from tests.state_graph.test_partial_optimizers import Published, SlowInState, Stateless

_SINCE = 6


class Own(Regression):
    """Saves its network and its optimizer by itself, in the order that it is told."""

    def __init__(self, order: tuple[int, ...] = (0, 2)) -> None:
        super().__init__()
        self.order = order

    def make_optimizer(self, net: Any) -> torch.optim.Optimizer:
        parameters = [part for number in self.order for part in net[number].parameters()]
        return torch.optim.Adam(parameters, lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "opt": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.net.load_state_dict(state_dict["net"])
        if not fast_init:
            self.optimizer.load_state_dict(state_dict["opt"])


class Partial(Regression):
    """Has a network whose ``state_dict`` leaves out a part that trains."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2), OnlyHead(), nn.Linear(2, 1))

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        net.requires_grad_(True)
        return super().make_optimizer(net)


def _resumed(
    make: Callable[[], helios.Model], remake: Callable[[], helios.Model], folder: Path
) -> tuple[Outcome, Outcome]:
    whole = train(Case(make), folder / "whole")
    again = train(Case(remake), cut_off(folder / "whole", _SINCE, folder / "resumed"))
    return whole, again


def _assert_equal(whole: Outcome, again: Outcome, *names: str) -> None:
    assert again.losses == {n: loss for n, loss in whole.losses.items() if n > _SINCE}
    assert {key: again.end[key] for key in names} == {key: whole.end[key] for key in names}
    assert not any(sidecar.get("missing") for sidecar in again.sidecars)
    assert again.warnings == []


def test_an_optimizer_in_the_state_of_a_model_follows_its_parameters(tmp_path: Path) -> None:
    whole, again = _resumed(Own, lambda: Own((2, 0)), tmp_path)
    _assert_equal(whole, again, "net")


def test_other_parameters_in_the_state_of_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"optimizer must have the parameters that it had"):
        _resumed(lambda: Own((0,)), lambda: Own((2,)), tmp_path)


def test_a_part_of_a_network_that_its_state_leaves_out_resumes(tmp_path: Path) -> None:
    _assert_equal(*_resumed(Partial, Partial, tmp_path), "net", "optimizer")


@pytest.mark.parametrize("kind", [Published, SlowInState, Stateless])
def test_optimizers_that_leave_something_out_resume(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    class Wrapped(Regression):
        def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
            return kind(net.parameters(), lr=0.05, momentum=0.9)  # type: ignore[no-any-return]

    # The published one has addresses in its state.
    _assert_equal(*_resumed(Wrapped, Wrapped, tmp_path), "net")


class Watching(Plugin):
    """Keeps how far each parameter has moved, and maybe a network of its own, made at the start."""

    def __init__(self, *, has_network: bool) -> None:
        super().__init__("watching")
        self.has_network = has_network
        self.moved: dict[Any, float] = {}
        self.net: nn.Module | None = None

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_start(self) -> None:
        if self.has_network:
            torch.manual_seed(1)
            self.net = nn.Linear(1, 1)

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        for part in self.context.model.net.parameters():
            self.moved[part] = self.moved.get(part, 0.0) + float(part.detach().sum())
        if self.net is not None:
            with torch.no_grad():
                self.net.weight.add_(1)


def _watched(folder: Path, found: dict[str, Any], *, has_network: bool) -> Outcome:
    plugin = Watching(has_network=has_network)
    outcome = train(Case(Regression, options=lambda _: {"plugins": [plugin]}), folder)
    found["moved"] = list(plugin.moved.values())
    return outcome


def test_a_table_of_a_plugin_by_parameters_comes_back(tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    again: dict[str, Any] = {}
    _watched(tmp_path / "whole", whole, has_network=False)
    folder = cut_off(tmp_path / "whole", _SINCE, tmp_path / "resumed")
    outcome = _watched(folder, again, has_network=False)
    assert len(again["moved"]) == 4
    assert again["moved"] == whole["moved"]
    assert outcome.warnings == []


def test_a_network_that_a_plugin_makes_at_the_start_is_named(tmp_path: Path) -> None:
    outcome = _watched(tmp_path, {}, has_network=True)
    assert {tuple(sidecar["missing"]) for sidecar in outcome.sidecars} == {
        ("plugin 'watching': net",)
    }
    assert {sidecar["level"] for sidecar in outcome.sidecars} == {"incomplete"}
    assert any("created after setup()" in text for text in outcome.warnings)
