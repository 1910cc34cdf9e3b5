"""State is found without a word, and nothing of it is lost in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helios.errors import StateError
from helios.state.discovery import Discovery
from tests.state.owners import Owner, bits, network, started
from tests.support.matrix.values import Tally


def _paths(owner: object) -> list[str]:
    return list(started(owner).capture()["objects"])


def test_containers_in_a_circle_and_references_to_the_owner_are_survived() -> None:
    owner = Owner(nets=[network()], table={"count": 1})
    owner.nets.append(owner.nets)
    owner.table["owner"] = owner
    owner.table["table"] = owner.table
    owner.me = owner
    assert _paths(owner) == ["nets.0"]
    again = Discovery(owner)
    again.take_baseline()
    again.restore(again.capture())


def test_a_bare_string_of_unsaved_names_is_one_name() -> None:
    found = Discovery(Owner(net=network()), unsaved="net")  # type: ignore[arg-type]
    found.take_baseline()
    assert not found.capture()["objects"]


def _state_with(**attributes: Any) -> dict[str, Any]:
    return started(Owner(**attributes)).capture()


def test_missing_and_left_over_objects_are_named_before_anything_changes() -> None:
    saved = _state_with(net=nn.Linear(2, 2), gone=Tally(), lost=nn.Parameter(torch.zeros(1)))
    owner = Owner(net=nn.Linear(2, 2), new=[Tally()], bias=nn.Parameter(torch.zeros(1)), best=1)
    before = bits(owner.net.state_dict())
    saved["values"] = {"": {"best": 2}, "stuff": {"count": 1}}
    with pytest.raises(StateError) as error:
        started(owner).restore(saved)
    assert "Without saved state: bias, new.0." in str(error.value)
    assert "Saved, but missing now: gone, lost, stuff." in str(error.value)
    assert "in setup()" in str(error.value)
    assert bits(owner.net.state_dict()) == before
    assert owner.best == 1


def test_a_refused_state_is_an_error_that_names_the_path() -> None:
    saved = _state_with(nets=[nn.Linear(2, 2)])
    with pytest.raises(StateError, match=r"(?s)nets\.0 \(Linear\).*size mismatch") as error:
        started(Owner(nets=[nn.Linear(3, 2)])).restore(saved)
    assert "helios.load_weights()" in str(error.value)


def test_objects_that_came_or_went_after_setup_are_named_when_they_are_saved(
    said: list[str],
) -> None:
    owner = Owner(old=Tally())
    discovery = started(owner)
    del owner.old
    owner.new = Tally()
    owner.bias = nn.Parameter(torch.zeros(1))
    discovery.capture()
    discovery.capture()
    assert len(said) == 1
    for path in (
        "bias (added",
        "new (nothing after setup, Tally now",
        "old (Tally after setup",
    ):
        assert path in said[0]


def test_inference_names_networks_that_stay_untrained(said: list[str]) -> None:
    state = _state_with(net=nn.Linear(2, 2))
    owner = Owner(net=nn.Linear(2, 2), head=nn.Linear(2, 2), loss=nn.CrossEntropyLoss())
    Discovery(owner).restore(state, is_inference=True)
    (text,) = said
    assert text.endswith(": head.")
