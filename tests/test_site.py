"""The API pages that scripts/site makes: every public name, and what users pass."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import helios
import helios.ledger
import helios.plugins
from helios import Plugin
from scripts.site import pages

_PACKAGES = ("", ".core", ".data", ".ledger", ".loops", ".model", ".plugins")
_OPTIONS: list[Callable[..., Any]] = [
    *(helios.Trainer, helios.Model, helios.DataModule, helios.DataLoaderParams),
    *(helios.CheckpointStore, helios.KeepBest, helios.Signals, helios.Engine, helios.Precision),
    *(helios.find_last_checkpoint, helios.load_checkpoint, helios.load_weights),
    *(getattr(helios.ledger, name) for name in ("diff", "verify")),
    *(
        value
        for name in helios.plugins.__all__
        if isinstance(value := getattr(helios.plugins, name), type) and issubclass(value, Plugin)
    ),
]


@pytest.mark.shows("P79")
@pytest.mark.parametrize("package", [f"helios{name}" for name in _PACKAGES])
def test_every_public_name_is_on_one_api_page(package: str) -> None:
    shown = [name.rpartition(".")[2] for names in pages.api_names().values() for name in names]
    public = [name for name in importlib.import_module(package).__all__ if name[:2] != "__"]
    assert {name: count for name, count in Counter(shown).items() if count > 1} == {}
    assert set(public) <= set(shown)


@pytest.mark.shows("P79")
@pytest.mark.parametrize("owner", _OPTIONS, ids=lambda owner: owner.__name__)
def test_the_docstring_describes_every_argument(owner: Callable[..., Any]) -> None:
    described = re.findall(r"^ +(\w+(?:, \w+)*): ", inspect.getdoc(owner) or "", re.MULTILINE)
    names = {name for group in described for name in group.split(", ")}
    passed = (
        parameter.name
        for parameter in inspect.signature(owner).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    )
    assert [name for name in passed if name not in names] == []
