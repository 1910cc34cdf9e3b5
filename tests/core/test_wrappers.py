"""Names as they are without what is put around modules."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from helios.core.wrappers import BareNames, match_names, unwrap


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def test_a_module_without_wrappers_keeps_its_names() -> None:
    """A layer may be called as a wrapper calls what it wraps."""
    network = nn.Sequential(OrderedDict(module=nn.Linear(1, 1)))
    state = network.state_dict()
    assert BareNames(network).strip(state) is state
    assert BareNames(network).of("module.weight") == "module.weight"


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


def test_a_shared_module_has_both_of_its_names() -> None:
    shared = compiled(nn.Linear(1, 1))
    network = nn.ModuleDict({"a": shared, "b": shared})
    names = BareNames(network)
    assert [names.of(name) for name in network.state_dict()] == [
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    ]


def test_stored_names_are_matched_with_those_of_the_present_wrappers() -> None:
    present = ["0.weight", "1.module.bias", "2.scale"]
    stored = ["module.0.weight", "_orig_mod.module.1.module.bias", "2.scale"]
    assert match_names(stored, present) == dict(zip(stored, present, strict=True))
    assert match_names(present, present) == {name: name for name in present}


def test_stored_names_that_wrappers_alone_tell_apart_stay() -> None:
    twice = ["a.weight", "module.a.weight"]
    assert match_names(twice, ["b.a.weight"]) == {name: name for name in twice}
    assert match_names(["c.weight"], ["a.weight"]) == {"c.weight": "c.weight"}
    assert match_names(["module.module.a"], ["a", "module.a"]) == {
        "module.module.a": "module.module.a"
    }
