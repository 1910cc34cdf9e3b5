"""The table of events: its rows, its order, and the base classes that hear them."""

from __future__ import annotations

import inspect

import pytest

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.hooks.events import EVENTS
from helios.model.model import Model
from helios.plugins.plugin import Plugin


def methods_of(kind: type) -> list[str]:
    return [name for name in EVENTS if hasattr(kind, name)]


@pytest.mark.shows("K5", "K36")
@pytest.mark.parametrize("kind", [Model, Plugin, DataModule, Engine])
def test_base_methods_take_the_parameters_of_the_table(kind: type) -> None:
    for name in methods_of(kind):
        taken = tuple(inspect.signature(getattr(kind, name)).parameters)[1:]
        more = ("fast_init",) if (kind, name) == (Model, "setup") else ()
        assert taken == (*EVENTS[name].parameters, *more), (kind, name)
