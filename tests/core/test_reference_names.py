"""Who asks for an engine of the reference by its name is told what replaces it (E2, E27, E28)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from helios.core import moved

_PAGE = Path(__file__).parents[2] / "docs/engines.md"
_NINE = [
    f"{prefix}{kind}Engine"
    for prefix, kinds in {
        "": ("Device", "AMP", "APEX"),
        "DataParallel": ("", "AMP", "Apex"),
        "DistributedDataParallel": ("", "AMP", "Apex"),
    }.items()
    for kind in kinds
]


@pytest.mark.shows("E2", "E41")
def test_all_nine_are_known() -> None:
    assert sorted(moved.ENGINES) == sorted(_NINE)


@pytest.mark.shows("E27", "E28")
@pytest.mark.parametrize("name", _NINE)
def test_an_import_by_the_old_name_names_the_replacement(name: str) -> None:
    engines = importlib.import_module("helios.engines")
    with pytest.raises(
        ImportError, match=rf"no {name}\. Use .*Engine instead of {name}: Engine\(dev"
    ):
        getattr(engines, name)
    with pytest.raises(ImportError, match="precision=" if "P" in name[-10:] else "Use"):
        exec(f"from helios.engines import {name}", {})


def test_any_other_name_is_simply_missing() -> None:
    engines = importlib.import_module("helios.engines")
    assert not hasattr(engines, "WarpEngine")
    with pytest.raises(ImportError, match="cannot import name 'WarpEngine'"):
        exec("from helios.engines import WarpEngine", {})
    assert "The only engine class is" in moved.explain("WarpEngine")


@pytest.mark.shows("E2")
@pytest.mark.parametrize("name", _NINE)
def test_the_page_has_a_row_for_each(name: str) -> None:
    assert f"| `{name}` |" in _PAGE.read_text()
