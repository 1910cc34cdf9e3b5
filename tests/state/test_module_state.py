"""What ``state_dict`` leaves out: names under compile, flags, open gradients, loose tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helios.state.networks import state_of
from tests.state.owners import Owner, bits, network, resumed, started, through_a_file


def _compiled(module: nn.Module) -> nn.Module:
    result: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return result


def _small() -> Any:
    net = network()
    return Owner(net=net, optimizer=torch.optim.Adam(net.parameters()))


def _whole_compiled() -> Any:
    net = _compiled(network())
    return Owner(net=net, optimizer=torch.optim.Adam(net.parameters()))


def _part_compiled() -> Any:
    net = network()
    net[0] = _compiled(net[0])
    return Owner(net=net, optimizer=torch.optim.Adam(net.parameters()))


@pytest.mark.shows("U12")
@pytest.mark.parametrize(
    ("make", "remake"),
    [(_small, _part_compiled), (_whole_compiled, _small), (_part_compiled, _whole_compiled)],
)
def test_a_checkpoint_of_a_compiled_module_is_that_of_the_module(make: Any, remake: Any) -> None:
    owner = make()
    for number, parameter in enumerate(owner.net.parameters()):
        parameter.requires_grad_(number != 2)
    owner.net.train()
    owner.net.get_submodule("3" if make is not _whole_compiled else "_orig_mod.3").eval()
    owner.net.get_parameter(next(iter(dict(owner.net.named_parameters())))).grad = torch.ones(4, 3)
    state = started(owner).capture()
    assert "_orig_mod" not in repr(state)
    assert list(state["objects"]["net"]) == list(network().state_dict())
    assert [name for name, flag in state["flags"].items() if not flag] == ["net.3", "net.1.weight"]
    assert list(state["grads"]) == ["net.0.weight"]

    again = resumed(remake, state)
    assert bits(state_of(again.net)) == bits(state["objects"]["net"])
    assert bits(started(again).capture()) == bits(state)


class Helper:
    def __init__(self) -> None:
        self.net = nn.BatchNorm1d(3)


def test_modes_and_gradients_of_a_network_in_an_object_come_back(tmp_path: Path) -> None:
    owner = Owner(helper=Helper())
    discovery = started(owner)
    net = owner.helper.net
    net(torch.randn(4, 3)).square().sum().backward()
    net.eval()
    net.bias.requires_grad_(False)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = resumed(lambda: Owner(helper=Helper()), state).helper.net
    assert (again.training, again.bias.requires_grad) == (False, False)
    assert bits(again.weight.grad) == bits(net.weight.grad)


def _with_temperature() -> Any:
    temperature = nn.Parameter(torch.tensor(1.0))
    hidden = torch.zeros(2, requires_grad=True)
    scales = {"a": [torch.ones(400_000, requires_grad=True)]}
    tensors = [temperature, hidden, *scales["a"]]
    optimizer = torch.optim.SGD(tensors, lr=0.5, momentum=0.9)
    return Owner(temperature=temperature, scales=scales, optimizer=optimizer)


def _step(owner: Any) -> None:
    tensors = owner.optimizer.param_groups[0]["params"]
    sum((tensor**2 + tensor).sum() for tensor in tensors).backward()
    owner.optimizer.step()


def test_tensors_of_an_optimizer_in_no_module_are_saved_and_filled_in_place(
    said: list[str], tmp_path: Path
) -> None:
    owner = _with_temperature()
    discovery = started(owner)
    _step(owner)
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    assert set(state["parameters"]) == {
        "temperature",
        'optimizer.param_groups[0]["params"][1]',
        "scales.a.0",
    }
    assert not state["values"]
    assert not said

    again = resumed(_with_temperature, state)
    assert again.temperature is again.optimizer.param_groups[0]["params"][0]
    for each in (owner, again):
        _step(each)
    for one, other in zip(
        owner.optimizer.param_groups[0]["params"],
        again.optimizer.param_groups[0]["params"],
        strict=True,
    ):
        assert bits(one) == bits(other)
        assert bits(one.grad) == bits(other.grad)


def test_float32_state_of_bfloat16_parameters_is_not_rounded() -> None:
    class Master(torch.optim.SGD):
        """Keeps an exact copy of each parameter and a counter."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["inner"] = {"m": [torch.zeros(1)]}
                    state["count"] = torch.zeros(1, dtype=torch.int64)
                state["master"].add_(1e-5)
                state["inner"]["m"][0].add_(1e-5)
                state["count"].add_(257)
                parameter.copy_(state["master"])

    def make() -> Any:
        torch.manual_seed(1)
        net = nn.Linear(2, 2).bfloat16()
        return Owner(net=net, optimizer=Master(net.parameters(), lr=0.1))

    owner = make()
    discovery = started(owner)
    for _ in range(3):
        owner.optimizer.step()
    state = discovery.capture()
    again = resumed(make, copy.deepcopy(state))
    assert bits(again.optimizer.state_dict()) == bits(state["objects"]["optimizer"])
    before = bits(state["objects"]["optimizer"])
    again.optimizer.step()
    assert bits(state["objects"]["optimizer"]) == before, "the state is no part of what runs on"
    owner.optimizer.step()
    assert bits(again.optimizer.state_dict()) == bits(owner.optimizer.state_dict())
