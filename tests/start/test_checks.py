"""What users hand in is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, UsageError
from helios.model.model import Model
from helios.start.objects import (
    check_batch_processor,
    check_made,
    check_model_state,
    check_plugins,
)
from tests.support.quiet import Quiet
from tests.typed.user_script import Numbers


class Plain(Model):
    def __init__(self) -> None:
        super().__init__("plain")

    def setup(self, fast_init: bool = False) -> None: ...


class BothMethods(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None: ...


class OnlySaves(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OnlyLoads(Plain):
    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None: ...


class HeirOfBoth(BothMethods):
    def state_dict(self) -> dict[str, Any]:
        return {"more": 1}


@pytest.mark.shows("H60")
@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("training_batch", "process_training_batch"),
        ("validation_batch", "process_validation_batch"),
        ("testing_batch", "process_testing_batch"),
    ],
)
def test_a_flag_must_agree_with_what_is_overridden(flag: str, method: str) -> None:
    plugin = Quiet("quiet")
    setattr(plugin.unique_overrides, flag, True)
    with pytest.raises(ArgumentError, match=f"'quiet' sets unique_overrides.{flag}.*{method}"):
        check_plugins({"quiet": plugin})
    owner = type("Full", (Quiet,), {method: lambda self, batch, step: batch})("quiet")
    setattr(owner.unique_overrides, flag, True)
    check_plugins({"quiet": owner})


@pytest.mark.parametrize("kind", [Plain, BothMethods, HeirOfBoth])
def test_a_model_overrides_both_methods_of_its_state_or_none(kind: type[Plain]) -> None:
    check_model_state(kind())


@pytest.mark.parametrize(
    ("kind", "method"), [(OnlySaves, "state_dict"), (OnlyLoads, "load_state_dict")]
)
def test_overriding_one_of_them_is_an_error_that_names_it(kind: type[Plain], method: str) -> None:
    """What one half writes the other could not read."""
    form = f"{kind.__name__} must override both.*got {method} only. Without them"
    with pytest.raises(ArgumentError, match=form):
        check_model_state(kind())


def test_a_model_that_trains_has_a_step() -> None:
    """C12: without one no weight would move, and nobody would say so."""
    with pytest.raises(ArgumentError, match=r"Plain must override train_step, or set batch_pro"):
        check_batch_processor(Plain())
    check_batch_processor(Plain(), is_inference=True)
    replaced = Plain()
    replaced.train_step = lambda batch, state: None  # type: ignore[method-assign]
    check_batch_processor(replaced)


class WithoutBase(Plain):
    def __init__(self) -> None:
        """Leave out the base."""


class PluginWithoutBase(Quiet):
    _plug_id = "named-by-the-class"

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
    with pytest.raises(
        UsageError, match=r"PluginWithoutBase.__init__ must call super\(\).__init__\(pl"
    ):
        helios.Trainer(use_cpu=True, plugins=[PluginWithoutBase()])
    check_made(Plain())
    check_made(Quiet())
