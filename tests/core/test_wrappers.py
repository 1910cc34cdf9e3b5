"""Names as they are without what is put around modules."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from helios.core.wrappers import BareNames, unwrap


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.mark.shows("E33", "U12")
@pytest.mark.parametrize("wrap", [compiled, DataParallel, lambda m: compiled(DataParallel(m))])
def test_wrappers_leave_no_part_in_a_name(wrap: type) -> None:
    inner = nn.Sequential(OrderedDict(module=nn.Linear(1, 1), norm=nn.BatchNorm1d(1)))
    network = nn.ModuleDict({"net": wrap(inner), "head": nn.Linear(1, 1)})
    plain = nn.ModuleDict({"net": inner, "head": nn.Linear(1, 1)})
    names = BareNames(network)
    stripped, expected = names.strip(network.state_dict()), plain.state_dict()
    assert list(stripped) == list(expected)
    assert set(stripped._metadata) == set(expected._metadata)  # type: ignore[attr-defined]
    found = {names.of(name) for name, _ in network.named_modules()}
    assert found == {name for name, _ in plain.named_modules()}
    assert unwrap(network["net"]) is inner
    assert names.of("unknown.name") == "unknown.name"
