"""Memory that several look at is saved where training has changed it, up to the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.state.owners import Owner, bits, resumed, started, through_a_file

LENGTH = 10_000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.mean: Tensor


def _make() -> Any:
    owner = Owner(net=Net(), table=torch.zeros(LENGTH))
    owner.net.mean = owner.table[2:4]
    return owner


@pytest.mark.shows("S56")
def test_memory_beyond_the_limit_is_named_and_tensors_resume(
    tmp_path: Path, said: list[str]
) -> None:
    owner = _make()
    discovery = started(owner)
    discovery.limit = 5 * LENGTH
    owner.table[-1] += 1
    assert "table" not in discovery.capture()["missing"]
    discovery.limit = 3 * LENGTH
    owner.net.mean += 3
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < LENGTH
    assert "max_plain_bytes" in state["missing"]["table"]
    assert len(said) == 1
    again = resumed(_make, state)
    assert bits(again.net.mean) == bits(owner.net.mean)
    assert again.table[-1] == 0
