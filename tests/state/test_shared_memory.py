"""Arrays and tensors that share memory still do after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.errors import StateError
from tests.state.owners import Owner, network, resumed, started, through_a_file

_Make = Callable[[], Any]


def _resume(make: _Make, change: Callable[[Any], None], folder: Path) -> Any:
    owner = make()
    discovery = started(owner)
    change(owner)
    state = discovery.capture()
    assert not state["missing"]
    return resumed(make, through_a_file(state, folder / "state.pth"))


@pytest.mark.shows("S56")
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_arrays_and_tensors_share_memory_again(begin: int, tmp_path: Path) -> None:
    def make() -> Any:
        array = np.zeros(9, np.float32)
        lent = torch.zeros(6)
        owner = Owner(array=array, tensor=torch.from_numpy(array[begin:]), lent=lent)
        owner.borrowed = lent[2:].numpy()
        return owner

    def change(owner: Any) -> None:
        owner.tensor[1] = 5
        owner.borrowed[0] = 6

    again = _resume(make, change, tmp_path)
    assert again.array[begin + 1] == 5
    again.array[begin + 2] = 8
    assert again.tensor[2] == 8
    assert again.lent[2] == 6
    again.lent[3] = 9
    assert again.borrowed[1] == 9


def _aliases() -> Any:
    net = network()
    weight = net[0].weight
    owner = Owner(net=net, chosen=weight, rows=[weight.detach()[1:]])
    owner.array, owner.mean = weight.detach().numpy().T, net[1].running_mean
    return owner


@pytest.mark.shows("S56")
def test_an_alias_that_training_moved_looks_at_its_target_again(
    tmp_path: Path, said: list[str]
) -> None:
    def change(owner: Any) -> None:
        other = owner.net[3].weight
        owner.chosen = other
        owner.rows.append({"columns": other.detach()[:, 1:3], "bytes": other.detach().view(-1)})
        owner.array = other.detach().numpy()[:, ::2]
        owner.mean = owner.net[1].running_var

    again = _resume(_aliases, change, tmp_path)
    assert not said
    other = again.net[3].weight
    assert again.chosen is other
    assert again.mean is again.net[1].running_var
    assert len(again.rows) == 2
    with torch.no_grad():
        other.copy_(torch.arange(4.0).reshape(1, 4))
        again.net[0].weight.fill_(9.0)
    assert again.rows[0].tolist() == [[9.0] * 3] * 3
    assert again.rows[1]["columns"].tolist() == [[1, 2]]
    assert again.rows[1]["bytes"].tolist() == [0, 1, 2, 3]
    assert again.array.tolist() == [[0, 2]]


@pytest.mark.shows("S76")
def test_an_alias_of_what_is_not_there_is_refused_before_anything_changes(tmp_path: Path) -> None:
    owner = _aliases()
    discovery = started(owner)
    owner.chosen, owner.best = owner.net[3].weight, 1
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    values = state["values"][""]
    view = {"~": "tensor", "grad": False, "dtype": torch.float32, "size": 16, "of": "net.3.weight"}
    view |= {"shape": [4], "strides": [1], "offset": 0}
    for broken in (
        {"~": "ref", "name": "net.9.weight"},
        view | {"of": "net.9.weight"},
        view | {"shape": [5]},
        view | {"offset": -4},
        view | {"strides": [2]},
        view | {"~": "array", "dtype": "<f8", "strides": [8]},
    ):
        values["chosen"] = broken
        again = _aliases()
        with pytest.raises(StateError, match="chosen"):
            started(again).restore(state)
        assert again.chosen is again.net[0].weight
        assert "best" not in vars(again)
