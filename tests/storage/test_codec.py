"""Writing and reading files, and what a hostile or broken one can do: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.errors import IncompatibleCheckpointError, StateError
from helios.storage import codec, files
from helios.storage.building import Builder
from tests.storage.test_codes import Box, Colour, Wider, is_same, nested


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1


def write(path: Path, tree: Any, safe_types: tuple[type, ...] = ()) -> Path:
    with files.create(path) as handle:
        codec.write_encoded(handle, codec.encode(tree, where="", safe_types=safe_types))
    return path


def make_state() -> dict[str, Any]:
    """Return what the states of networks and optimizers consist of."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    tied, base = net[0].weight, torch.arange(10.0)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [tied, tied, tied.detach()],
        "views": [base[:3], base[2:], base.view(2, 5)],
    }


def test_states_of_networks_are_plain_in_a_file(tmp_path: Path) -> None:
    state = make_state()
    path = write(tmp_path / "file", state)
    for found in (torch.load(path, weights_only=True), codec.read(path)):
        assert is_same(found["net"], state["net"])
        assert vars(found["net"]) == vars(state["net"])
        assert is_same(found["optimizer"], state["optimizer"])
        first, second, third = found["tied"]
        assert first is second
        assert first.data_ptr() == third.data_ptr() == found["net"]["0.weight"].data_ptr()
        found["views"][0][2] = 77
        assert found["views"][1][0] == found["views"][2][0, 2] == 77


REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"history": [1, 2, 3, Box(1)]}, r"model\.history\.3 .*Box"),
    "function": ({"f": codec.read}, r"model\.f .*function"),
    "enum": ((1, Colour.RED), r"model\.1 .*Colour.*types_for_safe_load"),
    "tensor type": ({"w": torch.zeros(2).as_subclass(Wider)}, r"model\.w .*Wider"),
    "depth": (nested(2000), "nested too deeply"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_loaded_again_is_named_with_path_type_and_remedy(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(StateError, match=text) as caught:
        codec.encode(value, where="model")
    assert "unsaved" in str(caught.value)


@pytest.mark.shows("H26", "S21")
def test_safe_types_are_allowed_for_one_reading_only(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [Settings()], (Settings,))
    before = set(torch.serialization.get_safe_globals())
    assert codec.read(path, [Settings])[0].rate == 0.1
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(IncompatibleCheckpointError, match=r"Settings.*types_for_safe_load"):
        codec.read(path)


@pytest.mark.shows("H24")
def test_tensors_come_to_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    path = write(tmp_path / "file.pth", {"a": torch.ones(2), "b": np.arange(5000), "c": b""})
    with torch.device("meta"):
        loaded = codec.read(path)
        code = codec.encode(loaded, where="")
    assert loaded["a"].device.type == "cpu"
    assert loaded["b"].sum() == 4999 * 2500
    assert Builder().build("", code)["b"].sum() == 4999 * 2500
