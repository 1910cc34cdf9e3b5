"""A network that adds its gradients over processes is saved under its own names (E33)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import helios
from helios.engines.engine import Engine
from tests.support.ranks import run_ranks
from tests.support.runs import digest


class Wrapped(helios.Model):
    """Keeps the network, and the wrapper that its steps call."""

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.network[1].requires_grad_(False)
        self.network[2].eval()
        engine = Engine("cpu")
        self.both = engine.wrap(self.network)
        self.only = {"head": engine.wrap(nn.Linear(2, 1))}
        parameters = [*self.network.parameters(), *self.only["head"].parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)


def make(*, steps: int) -> Wrapped:
    model = Wrapped("wrapped")
    model.setup()
    model.discovery.take_baseline()
    for _ in range(steps):
        model.only["head"](model.both(torch.ones(3, 2))).sum().backward()
        model.optimizer.step()
    return model


def _capture(rank: int) -> Any:
    model = make(steps=2)
    assert isinstance(model.both, DistributedDataParallel)
    return model.state_dict()


def _restore(rank: int, state: dict[str, Any]) -> Any:
    model = make(steps=0)
    model.load_state_dict(state)
    return model.state_dict()


def test_a_wrapper_leaves_no_trace_in_a_checkpoint() -> None:
    alone = make(steps=2).state_dict()
    state = run_ranks(_capture, 2)[0]
    assert sorted(state["objects"]) == ["both", "only.head", "optimizer"]
    assert {path: list(part) for path, part in state["objects"].items()} == {
        path: list(part) for path, part in alone["objects"].items()
    }
    assert {name: state[name] for name in ("kinds", "flags", "values")} == {
        name: alone[name] for name in ("kinds", "flags", "values")
    }
    assert digest(state["objects"]) == digest(alone["objects"])
    assert digest(state["grads"]) == digest(alone["grads"])
    lone = make(steps=0)
    lone.load_state_dict(state)
    assert digest(lone.state_dict()) == digest(state)
    for again in run_ranks(_restore, 2, alone):
        assert digest(again) == digest(alone)
