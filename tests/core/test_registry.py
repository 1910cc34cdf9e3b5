"""Registries, and the import of the modules that fill them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.core import Registry, update_all_registries

_REGISTERING = f"from {__name__} import FOUND\n\n@FOUND.register\nclass {{name}}: ...\n"
FOUND = Registry("found")


class Thing: ...


@pytest.mark.shows("H62")
def test_a_registered_object_is_returned_and_found_by_its_name() -> None:
    registry = Registry("thing")
    assert registry.register(Thing) is Thing
    assert registry.get("Thing") is Thing
    assert "Thing" in registry
    assert list(registry) == [("Thing", Thing)]
    assert list(registry.keys()) == ["Thing"]
    assert str(registry) == "thing"


def test_a_second_object_of_the_same_name_is_refused() -> None:
    registry = Registry("thing")
    registry.register(Thing)
    with pytest.raises(AssertionError, match="already contains 'Thing'"):
        registry.register(Thing)


def test_an_unknown_name_is_a_key_error_that_lists_the_known_ones() -> None:
    registry = Registry("thing")
    registry.register(Thing)
    with pytest.raises(KeyError, match=r"does not contain 'Other'.*Thing"):
        registry.get("Other")
    with pytest.raises(KeyError, match="Thing_new_old"):
        registry.get("Thing_new", suffix="old")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "registering"
    for folder in (root, root / "sub", root / "no_package", root / ".hidden"):
        folder.mkdir()
    (root / "__init__.py").touch()
    (root / "sub" / "__init__.py").touch()
    (root / "top.py").write_text(_REGISTERING.format(name="Top"))
    (root / "sub" / "deep.py").write_text(_REGISTERING.format(name="Deep"))
    (root / "plain.py").write_text("raise RuntimeError('must not be imported')\n")
    (root / "no_package" / "stray.py").write_text(_REGISTERING.format(name="Stray"))
    (root / ".hidden" / "old-copy.py").write_text(_REGISTERING.format(name="Hidden"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(FOUND, "_objects", {})
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] in ("registering", "outer")]:
        del sys.modules[name]


def test_only_modules_that_register_something_are_imported(package: Path) -> None:
    update_all_registries(package)
    assert sorted(FOUND.keys()) == ["Deep", "Top"]
