"""What reads an attribute that is not set yet is told by whom and when it is set."""

from __future__ import annotations

import typing

import pytest

from helios.core.assigned import assigned
from helios.data.datamodule import DataModule
from helios.errors import UsageError
from helios.model.model import Model


class Owner:
    rank: int = assigned("{kind}.rank is not set yet: a run sets it.")
    run: str = assigned("{kind} has no run.", refusal="{kind}.run must not be assigned.")


class Derived(Owner): ...


def test_an_attribute_that_is_not_set_names_the_class_of_its_object() -> None:
    owner = Derived()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^Derived\.rank is not set yet: a run sets it\.$"):
            _ = owner.rank
        owner.rank = 3
        assert (owner.rank, vars(owner)) == (3, {"rank": 3})
        del owner.rank


def test_one_that_is_reserved_is_set_by_nobody_else() -> None:
    owner = Derived()
    with pytest.raises(UsageError, match=r"^Derived has no run\.$"):
        _ = owner.run
    with pytest.raises(UsageError, match=r"^Derived\.run must not be assigned\.$"):
        owner.run = "own"
    vars(owner)["run"] = "ours"
    assert owner.run == "ours"
    with pytest.raises(UsageError, match="must not be assigned"):
        owner.run = "own"
    assert owner.run == "ours"


def test_the_class_can_be_asked_for_its_attributes() -> None:
    assert all(getattr(Derived, name) is not None for name in ("rank", "run"))


def test_a_model_may_have_attributes_of_these_names_with_an_underscore() -> None:
    class Own(Model):
        def setup(self, fast_init: bool = False) -> None:
            self._device = self._trainer = self._engine = self._context = 0

    model = Own("own")
    model.setup()
    model.discovery.take_baseline()
    model._device = model._trainer = model._engine = model._context = 1
    state = model.state_dict()
    again = Own("own")
    again.setup()
    again.discovery.take_baseline()
    again.load_state_dict(state)
    assert again._device == again._trainer == again._engine == again._context == 1


@pytest.mark.parametrize("kind", [Model, DataModule])
def test_annotations_can_be_evaluated(kind: type) -> None:
    assert "unsaved" in typing.get_type_hints(kind)
