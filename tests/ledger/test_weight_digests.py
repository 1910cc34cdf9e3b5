"""Digests of weights and optimizers: everything that decides the next update is in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from helios.ledger.writer import digest_weights

NAMED = "net.weight"


def _make() -> tuple[Optimizer, list[Tensor]]:
    """Return an optimizer of one parameter of a network, and of two that no network has."""
    parameters = [torch.full((3,), float(number), requires_grad=True) for number in range(3)]
    optimizer = SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, parameters


def _digest(optimizer: Optimizer, weight: Tensor) -> dict[str, str]:
    return digest_weights({NAMED: weight}, {"optimizer": optimizer})


def _change_momentum(optimizer: Optimizer, parameters: list[Tensor], number: int) -> None:
    optimizer.state[parameters[number]]["momentum_buffer"][0] += 1


_CHANGES: dict[str, Callable[[Optimizer, list[Tensor]], None]] = {
    "weight": lambda _, parameters: parameters[0].data.add_(1),
    "option of a group": lambda optimizer, _: optimizer.param_groups[0].update(weight_decay=0.0),
    "moment of the named": lambda *of: _change_momentum(*of, 0),
    "moment of the first loose": lambda *of: _change_momentum(*of, 1),
    "moment of the second loose": lambda *of: _change_momentum(*of, 2),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_every_change_is_seen(change: Callable[[Optimizer, list[Tensor]], None]) -> None:
    optimizer, parameters = _make()
    before = _digest(optimizer, parameters[0])
    assert _digest(optimizer, parameters[0]) == before
    change(optimizer, parameters)
    assert _digest(optimizer, parameters[0]) != before


def test_the_order_of_parameters_that_a_network_names_is_not_in_it() -> None:
    first, second = (torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True))
    weights = {"net.first": first, "net.second": second}
    one, other = (SGD(order, lr=0.1) for order in ([first, second], [second, first]))
    assert digest_weights(weights, {"sgd": one}) == digest_weights(weights, {"sgd": other})
