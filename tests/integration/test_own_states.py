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
from tests.ordinary.harness import Case, Outcome, Regression, cut_off, train
from tests.state.test_partial_optimizers import Published, SlowInState, Stateless

_SINCE = 6


class Own(Regression):
    """Saves its network and its optimizer by itself, in the order that it is told."""

    unsaved = ("order",)

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


@pytest.mark.parametrize("kind", [Published, SlowInState, Stateless])
def test_optimizers_that_leave_something_out_resume(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    class Wrapped(Regression):
        def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
            return kind(net.parameters(), lr=0.05, momentum=0.9)  # type: ignore[no-any-return]

    # The published one has addresses in its state.
    _assert_equal(*_resumed(Wrapped, Wrapped, tmp_path), "net")
