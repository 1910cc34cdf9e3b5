"""Modules that are gone: their imports say what replaces them, and all others are as ever."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from helios.core.moved import REPLACEMENTS, install_moved_modules
from helios.errors import MovedModuleError

DOCS = Path(__file__).parents[2] / "docs" / "migrating.md"


@pytest.mark.shows("S71")
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_an_import_of_a_module_that_is_gone_says_what_replaces_it(name: str) -> None:
    parent, _, last = name.rpartition(".")
    for statement in (
        f"import {name}",
        f"import {name}.inner as inner",
        f"from {name} import create",
        f"from {parent} import {last}",
    ):
        with pytest.raises(MovedModuleError) as caught:
            exec(statement)
        assert f"Helios has no module {name!r}" in str(caught.value)
        assert REPLACEMENTS[name] in str(caught.value)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert name not in sys.modules
    assert f"`{name}`" in DOCS.read_text("utf-8")


@pytest.mark.shows("S71")
def test_what_replaces_modules_is_there() -> None:
    from helios.core import logging
    from helios.core.registry import Registry
    from helios.plugins import EMA, Metrics

    assert all((logging, Registry, EMA, Metrics))


@pytest.mark.shows("S71")
def test_other_modules_that_are_not_there_fail_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'helios\.nothing'") as caught:
        importlib.import_module("helios.nothing")
    assert not isinstance(caught.value, MovedModuleError)
    assert importlib.util.find_spec("helios.nothing") is None
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from helios import nothing")


def test_one_finder_is_enough() -> None:
    before = list(sys.meta_path)
    install_moved_modules()
    assert sys.meta_path == before


@pytest.mark.parametrize("name", ["helios.core.logging", "helios.core.distributed"])
def test_a_published_module_gives_the_same_objects_without_a_warning(name: str) -> None:
    module = importlib.import_module(name)
    for attribute in module.__all__:
        value = getattr(module, attribute)
        assert getattr(sys.modules[value.__module__], attribute) is value
