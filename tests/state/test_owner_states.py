"""Plugins, data modules, loops and engines are looked through as the model is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helios.state.owners import Owner, Owners
from tests.state.owners import saved_attributes


class Base:
    _internals = "owner counter"


class Part(Base):
    """Stands for a plugin, with an attribute of its base and some of its own."""

    _internals = "cache"

    def __init__(self, **attributes: Any) -> None:
        self.counter, self.cache = 0, [0]
        vars(self).update(attributes)


def _started(*owners: Owner, **outside: object) -> Owners:
    found = Owners(owners, lambda: outside)
    found.take_baseline()
    return found


@pytest.mark.shows("S55")
def test_attributes_of_an_owner_that_is_gone_are_carried_along(said: list[str]) -> None:
    part = Part(count=0)
    owners = _started(Owner("plugin 'a'", part))
    vars(part)["count"] = 1
    states, _ = owners.capture({})
    again = _started()
    again.restore(states)
    assert again.capture({})[0] == states
    assert "attributes of plugin 'a', which this run does not have" in said[0]


@pytest.mark.shows("S55")
def test_what_no_checkpoint_holds_is_missing_under_the_owners_name() -> None:
    part = Part(run=None)
    owners = _started(Owner("plugin 'a'", part))
    vars(part)["run"] = lambda: 1
    assert list(owners.capture({})[1]) == ["plugin 'a': run"]
    declared = _started(Owner("plugin 'a'", part, unsaved=("run",)))
    vars(part)["run"] = lambda: 2
    assert declared.capture({}) == ({}, {})


@pytest.mark.shows("S55")
def test_what_a_state_dict_of_its_own_leaves_out_is_saved() -> None:
    part = Part(count=0, extra=[])
    owners = _started(Owner("plugin 'a'", part, has_own_state=True))
    vars(part)["count"] = 1
    part.extra.append(2)  # type: ignore[attr-defined]
    states, _ = owners.capture({"plugin 'a'": {"extra": part.extra}})  # type: ignore[attr-defined]
    assert saved_attributes(states["plugin 'a'"]) == {"count": 1}


def _with_late_parts() -> tuple[Part, Owners]:
    """Return a part to which a start event has given a network, an optimizer and a parameter."""
    part = Part(count=0)
    owners = _started(Owner("plugin 'a'", part))
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    vars(part).update(net=net, optimizer=optimizer, bias=nn.Parameter(torch.zeros(1)))
    vars(part)["nets"] = [net]
    owners.begin_training()
    return part, owners


@pytest.mark.shows("S55")
def test_what_start_events_make_is_named_once_training_has_changed_it() -> None:
    part, owners = _with_late_parts()
    vars(part)["count"] = 1
    states, missing = owners.capture({})
    assert missing == {}
    again = Part(count=0)
    _started(Owner("plugin 'a'", again)).restore(copy.deepcopy(states))
    assert vars(again)["count"] == 1
    assert "net" not in vars(again), "a start event makes it again"
    with torch.no_grad():
        for changed in (vars(part)["net"].weight, vars(part)["bias"]):
            changed.add_(1)
    missing = owners.capture({})[1]
    assert {"plugin 'a': net", "plugin 'a': bias"} <= missing.keys()
    assert "created after setup()" in missing["plugin 'a': net"]


def _look_at_a_part(model: Part, plugin: Part) -> None:
    vars(plugin)["part"] = vars(model)["whole"][2:4]


def _look_into_an_array(model: Part, plugin: Part) -> None:
    vars(plugin)["array"] = vars(model)["array"][1:]


def _sharing() -> tuple[Part, Part, Owners]:
    whole = torch.zeros(8)
    model = Part(whole=whole, array=np.zeros(4), loose=None)
    plugin = Part(part=torch.zeros(2), shared=whole[4:6], array=np.zeros(2))
    owners = Owners([Owner("model", model, is_model=True), Owner("plugin 'a'", plugin)])
    owners.take_baseline()
    owners.begin_training()
    return model, plugin, owners


@pytest.mark.shows("S56")
@pytest.mark.parametrize("change", [_look_at_a_part, _look_into_an_array])
def test_what_training_lets_owners_share_is_shared_after_a_resume(
    change: Callable[[Part, Part], object],
) -> None:
    def write(plugin: Part) -> None:
        for name in ("part", "shared", "array"):
            vars(plugin)[name][...] += 1

    model, plugin, owners = _sharing()
    change(model, plugin)
    write(plugin)
    states, missing = owners.capture({})
    assert not missing
    again, other, found = _sharing()
    found.restore(copy.deepcopy(states))
    for each in (plugin, other):
        write(each)
    for mine, theirs in ((model, again), (plugin, other)):
        for name in ("whole", "part", "shared", "array"):
            if name in vars(mine):
                assert vars(mine)[name].tolist() == vars(theirs)[name].tolist()


@pytest.mark.shows("S66")
def test_of_a_data_set_only_small_values_and_generators_count() -> None:
    class Images:
        def __init__(self) -> None:
            self.paths = [f"{number}.png" for number in range(20_000)]
            self.level = 0
            self.rng = np.random.default_rng(1)
            self.handle: Any = None
            self.transform = nn.Linear(1, 1)
            self.cache: dict[int, Any] = {}

    images = Images()
    owners = _started(Owner("data set", images, is_data=True))
    images.level = 2
    images.rng.random()
    images.handle = lambda: 1
    images.paths.reverse()
    images.cache |= {number: torch.zeros(1000) for number in range(20)}
    with torch.no_grad():
        images.transform.weight.add_(1)
    states, missing = owners.capture({})
    assert list(saved_attributes(states["data set"])) == ["level", "rng"]
    assert not states["data set"]["objects"]
    assert missing == {}
    again = Images()
    other = _started(Owner("data set", again, is_data=True))
    other.restore(copy.deepcopy(states))
    assert (again.level, again.rng.random()) == (2, images.rng.random())


class Mined:
    """A data set with a small list that training makes long, and a cache."""

    def __init__(self) -> None:
        self.hard: list[int] = []
        self.cache: dict[int, Any] = {}
        self.images = [f"{number}.png" for number in range(20_000)]


def _grow(part: Mined) -> None:
    part.hard += range(20_000)
    part.images.append("")


@pytest.mark.shows("S74")
def test_a_member_of_a_data_set_that_outgrows_what_is_saved_is_named_once(
    said: list[str],
) -> None:
    mined = Mined()
    owners = _started(Owner("data set", mined, is_data=True))
    mined.hard.append(1)
    states, missing = owners.capture({})
    assert (saved_attributes(states["data set"]), missing) == ({"hard": [1]}, {})
    _grow(mined)
    mined.cache |= {number: torch.zeros(1000) for number in range(20)}
    for _ in range(2):
        missing = owners.capture({})[1]
        assert list(missing) == ["data set: hard"], "a cache that was never saved is data"
        assert "64 KiB" in missing["data set: hard"]
    assert len(said) == 1
    assert "unsaved = (...,)" in said[0]
    del mined.hard[2:]
    states, missing = owners.capture({})
    assert (saved_attributes(states["data set"])["hard"], missing) == ([1, 0], {})


def test_a_member_that_had_outgrown_before_a_resume_is_missing_after_it(said: list[str]) -> None:
    mined = Mined()
    owners = _started(Owner("data set", mined, is_data=True))
    owners.note_named(["data set: hard"])
    _grow(mined)
    assert list(owners.capture({})[1]) == ["data set: hard"]
    assert not said, "the last start has named it"
