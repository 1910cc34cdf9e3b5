"""Which gradients count, apart from their sums."""

from __future__ import annotations

from typing import Any

import torch

from helios.sharding.sharded_gradients import ShardedGradients


class Replicas:
    """Three replicas on two processes; this is the second one, and the first raises no flag."""

    num_replicas, num_processes, rank = 3, 2, 1

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags


class Unit:
    """A unit of one parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.notices: dict[int, Any] = {}

    def use(self, reduction: object) -> None:
        """Nothing is reduced."""

    def before_gather(self, call: object) -> None:
        """Nothing is gathered."""

    def before_forward(self, call: object) -> None:
        """Nothing is called."""

    def after_forward(self, call: object) -> None:
        """Nothing is called."""

    def watch_values(self, refuse: object) -> None:
        """Nobody writes."""

    def parameters(self) -> list[torch.Tensor]:
        return [self.parameter]

    def watch_gradients(self, notices: dict[int, Any]) -> None:
        self.notices = notices

    def get_gradient(self) -> None:
        self.notices[id(self.parameter)](self.parameter)


def make() -> tuple[ShardedGradients, Unit, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    unit: Any = Unit(parameter)
    replicas: Any = Replicas()
    gradients = ShardedGradients(replicas, {"net": unit}, {"net.weight": parameter})
    return gradients, unit, torch.optim.SGD([parameter], lr=0.1)


def test_gradients_of_a_repeated_step_do_not_count() -> None:
    gradients, unit, optimizer = make()
    gradients.end_turn()
    unit.get_gradient()
    unit.parameter.grad = torch.full((2,), 5.0)
    gradients.end_turn()
    gradients.finish(optimizer)
    assert unit.parameter.grad is None
