"""What an engine does with losses and gradients, and the settings that change bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from helios.engines.engine import Engine
from helios.errors import ArgumentError

CPU = torch.device("cpu")


def engine_for(**options: Any) -> Engine:
    return Engine(CPU, **options)


def weights(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def gradients(*parameters: nn.Parameter) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def run_window(engine: Engine, parameter: nn.Parameter, factors: list[float]) -> None:
    for factor in factors:
        train_on(engine, (parameter * factor).sum())


def train_on(engine: Engine, *losses: Tensor) -> None:
    """Do what loops do with a micro-batch: count it, then go backward from each of its losses."""
    engine._open_micro_batches += 1
    for loss in losses:
        engine.backward_loss(loss)


@pytest.mark.shows("C7")
@pytest.mark.parametrize("factors", [[3.0], [3.0, 5.0], [1.0, 2.0, 6.0]])
def test_gradients_are_the_mean_over_the_batches_really_in_the_window(
    factors: list[float],
) -> None:
    """A partial window is divided by what it holds."""
    engine, parameter = engine_for(), weights(1.0, 2.0)
    optimizer = SGD([parameter], lr=1.0)
    for window in (factors, factors[:1], factors):
        run_window(engine, parameter, window)
        engine.average_gradients(optimizer)
        mean = sum(window) / len(window)
        assert gradients(parameter) == [[mean, mean]]
        engine.zero_grad(optimizer)
        engine.close_window()


def test_an_open_window_is_part_of_the_state() -> None:
    """Gradients that are open at a safe point are saved and restored."""
    engine, parameter = engine_for(), weights(1.0)
    run_window(engine, parameter, [1.0, 2.0])
    state = engine.state_dict()
    assert state == {"open_micro_batches": 2}
    other = engine_for()
    other.load_state_dict(state)
    run_window(other, parameter, [6.0])
    other.average_gradients(SGD([parameter], lr=1.0))
    assert gradients(parameter) == [[3.0]]


@pytest.mark.shows("E21")
def test_backward_may_be_kept_to_some_parameters() -> None:
    """Those of one optimizer; a parameter outside of the loss keeps no gradient."""
    engine = engine_for()
    wanted, other, unused = weights(1.0), weights(1.0), weights(1.0)
    engine.backward_loss((wanted * 2 + other * 3).sum(), inputs=[wanted, unused])
    assert gradients(wanted, other, unused) == [[2.0], None, None]


@pytest.mark.shows("E3")
@pytest.mark.parametrize(
    ("device", "kind"), [(torch.device("meta"), "meta"), ("cuda:1", "cuda"), ("cpu", "cpu")]
)
def test_a_device_may_be_given_by_its_name(device: Any, kind: str) -> None:
    assert Engine(device).device.type == kind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "nowhere"}, r"Engine\(device=.*, got 'nowhere'"),
        (
            {"clip_norm": 0},
            r"Engine\(clip_norm=\.\.\.\) must be None or a positive number",
        ),
        ({"clip_norm": math.inf}, "positive number, got inf"),
        ({"clip_norm": True}, "positive number, got True"),
        ({"clip_value": -1.0}, r"Engine\(clip_value=\.\.\.\) must be None or a positive number"),
        ({"clip_norm": 1.0, "clip_value": 2.0}, "must be None if clip_norm is set, got 2.0"),
    ],
)
def test_an_option_that_breaks_its_rule_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Engine(**options)


@pytest.mark.shows("R39")
def test_a_norm_is_clipped_over_all_parameters_together() -> None:
    engine = engine_for(clip_norm=1.0)
    first, second, unused = weights(1.0), weights(1.0), weights(1.0)
    optimizer = SGD([{"params": [first, unused]}, {"params": [second]}], lr=1.0)
    engine.backward_loss((first * 3 + second * 4).sum())
    engine.clip_gradients(optimizer)
    found = torch.tensor([first.grad.item(), second.grad.item()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, torch.tensor([0.6, 0.8]))
    assert unused.grad is None


@pytest.mark.shows("E25")
def test_the_mean_is_clipped_and_not_the_sum() -> None:
    """Divide once, clip after that."""
    engine, parameter = engine_for(clip_norm=5.0), weights(0.0)
    optimizer = SGD([parameter], lr=1.0)
    run_window(engine, parameter, [4.0, 4.0])
    engine.average_gradients(optimizer)
    engine.clip_gradients(optimizer)
    assert gradients(parameter) == [[4.0]]
