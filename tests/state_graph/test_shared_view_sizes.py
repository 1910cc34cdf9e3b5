"""Memory that several look at is saved where training has changed it, up to the limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.state_graph.owners import Owner, bits, resumed, started, through_a_file

LENGTH = 10_000


class Net(nn.Module):
    """Two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))
        self.mean: Tensor
        self.other: Tensor


class Assigning(Net):
    """Takes the very tensors that it loads."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options | {"assign": True})


def _make(
    look: Callable[[Tensor], Tensor] = lambda table: table[2:4], kind: type[Net] = Net
) -> Any:
    owner = Owner(net=kind(), table=torch.zeros(LENGTH))
    owner.net.mean = look(owner.table)
    return owner


_VIEWS = {
    "in a row": lambda table: table[2:4],
    "with a step": lambda table: table[2:8:3],
    "expanded": lambda table: table[2:3].expand(2),
}


@pytest.mark.shows("S56")
@pytest.mark.parametrize("look", _VIEWS.values(), ids=_VIEWS.keys())
@pytest.mark.parametrize("kind", [Net, Assigning])
def test_what_is_around_a_view_is_not_saved_unless_it_changes(
    look: Callable[[Tensor], Tensor], kind: type[Net], tmp_path: Path
) -> None:
    def make() -> Any:
        return _make(look, kind)

    owner = make()
    discovery = started(owner)
    look(owner.table)[:1] += 7
    state = through_a_file(discovery.capture(), tmp_path / "first")
    assert (tmp_path / "first").stat().st_size < LENGTH
    again = make()
    discovery = started(again)
    discovery.restore(state)
    assert bits(again.table) == bits(owner.table)
    again.table[2] += 1
    assert again.net.mean[0] == 8
    through_a_file(discovery.capture(), tmp_path / "second")
    assert (tmp_path / "second").stat().st_size < LENGTH
    again.table[3 if look(again.table).stride() != (1,) else 4] += 1
    state = through_a_file(discovery.capture(), tmp_path / "third")
    assert (tmp_path / "third").stat().st_size > LENGTH
    third = resumed(make, state)
    assert bits(third.table) == bits(again.table)
    assert bits(third.net.mean) == bits(again.net.mean)


def _write(owner: Any) -> None:
    owner.table[-1] += 1


def _move(owner: Any) -> None:
    owner.table = torch.ones(LENGTH)
    owner.net.mean = owner.table[5:7]


@pytest.mark.shows("S56")
@pytest.mark.parametrize("change", [_write, _move])
def test_memory_beyond_the_limit_is_named_and_tensors_resume(
    change: Callable[[Any], None], tmp_path: Path, said: list[str]
) -> None:
    owner = _make()
    discovery = started(owner)
    discovery.values.limit = 5 * LENGTH
    change(owner)
    assert "table" not in discovery.capture()["missing"]
    discovery.values.limit = 3 * LENGTH
    owner.net.mean += 3
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < LENGTH
    assert "max_plain_bytes" in state["missing"]["table"]
    assert len(said) == 1
    again = resumed(_make, state)
    assert bits(again.net.mean) == bits(owner.net.mean)
    assert again.table[-1] == 0
