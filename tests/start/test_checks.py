"""What users hand in is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, UsageError
from helios.model.model import Model
from helios.start.objects import check_made
from tests.typed.user_script import Numbers


class Plain(Model):
    def __init__(self) -> None:
        super().__init__("plain")

    def setup(self, fast_init: bool = False) -> None: ...


class OnlySaves(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OnlyLoads(Plain):
    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("kind", "method"), [(OnlySaves, "state_dict"), (OnlyLoads, "load_state_dict")]
)
def test_overriding_one_of_them_is_an_error_that_names_it(kind: type[Plain], method: str) -> None:
    """What one half writes the other could not read."""
    form = f"{kind.__name__} must override both.*got {method} only. Without them"
    with pytest.raises(ArgumentError, match=form):
        helios.Trainer(use_cpu=True).test(kind(), Numbers(), checkpoint=None)


class WithoutBase(Plain):
    def __init__(self) -> None:
        """Leave out the base."""


@pytest.mark.shows("U28")
def test_a_forgotten_constructor_of_the_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"WithoutBase.__init__ must call super\(\).__init__\(\): "
    ):
        helios.Trainer(use_cpu=True).test(WithoutBase(), Numbers())
    with pytest.raises(
        UsageError, match=r"WithoutBase.__init__ must call super\(\).__init__\(\): "
    ):
        helios.load_weights(tmp_path, WithoutBase())
    check_made(Plain())
