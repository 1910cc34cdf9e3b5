"""Modules that are gone: their imports say what replaces them, and all others are as ever."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

from helios.core.moved import RENAMED, REPLACEMENTS, install_moved_modules
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


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_path_gives_the_module_at_its_present_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = importlib.import_module(RENAMED[name])
    spec = present.__spec__
    parent, _, last = name.rpartition(".")
    for statement in (
        f"import {name} as found",
        f"from {parent} import {last} as found",
        f"found = importlib.import_module({name!r})",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(sys.modules[parent], last, raising=False)
        names = {"importlib": importlib}
        with pytest.warns(DeprecationWarning, match=rf"{name} is now {RENAMED[name]}\.") as caught:
            exec(statement, names)
        assert names["found"] is present
        assert len(caught) == 1
        assert present.__name__ == RENAMED[name]
        assert present.__spec__ is spec


def test_the_warning_names_the_line_that_imports() -> None:
    sys.modules.pop("helios.core.files", None)
    with pytest.warns(DeprecationWarning, match=r"helios\.core\.files") as caught:
        from helios.core.files import fsync
    assert caught[0].filename == __file__
    assert fsync.__module__ == "helios.storage.files"


@pytest.mark.parametrize("name", ["helios.core.logging", "helios.core.distributed"])
def test_a_published_module_gives_the_same_objects_without_a_warning(name: str) -> None:
    module = importlib.import_module(name)
    for attribute in module.__all__:
        value = getattr(module, attribute)
        assert getattr(sys.modules[value.__module__], attribute) is value


def test_a_class_path_of_a_saved_file_still_leads_to_its_class() -> None:
    from helios.storage.tensorboard_writer import TensorboardWriter

    old = pickle.dumps(TensorboardWriter, protocol=0)
    old = old.replace(b"helios.storage.tensorboard_writer", b"helios.core.tensorboard")
    sys.modules.pop("helios.core.tensorboard", None)
    with pytest.warns(DeprecationWarning, match=r"helios\.core\.tensorboard"):
        assert pickle.loads(old) is TensorboardWriter
