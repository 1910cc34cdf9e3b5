"""Which output shows the bars."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tqdm.notebook import tqdm_notebook

from helios.terminal.screen import Bars, Gauge, open_bars


class Widget(tqdm_notebook):
    """A bar of a notebook whose widgets are plain objects."""

    def __init__(self, **arguments: Any) -> None:
        self.total, self.n, self.postfix = arguments["total"], 0, ""
        self.container = SimpleNamespace(children=[None, SimpleNamespace(max=self.total), None])
        self.is_open = True

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.postfix = s

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        self.shown = (self.n, self.container.children[1].max, self.postfix)

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of bars, in a process that looks like the kernel of a notebook."""
    shell, bars = ModuleType("IPython"), ModuleType("tqdm.auto")
    shell.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    bars.tqdm = Widget
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "tqdm.auto", bars)
    return bars


@pytest.mark.shows("P78")
def test_a_notebook_has_bars_of_its_own(notebook: ModuleType) -> None:
    bars_shown = open_bars()
    assert isinstance(bars_shown, Bars)
    try:
        for total in (4, None, 7):
            bars_shown.show([Gauge("iterations", 2, total, "loss 1")])
            [bar] = bars_shown._bars.values()
            assert bar.shown == (2, total or 1, "loss 1")
    finally:
        bars_shown.close()
    assert not bar.is_open


def test_a_notebook_without_widgets_has_none(notebook: ModuleType) -> None:
    notebook.tqdm = object
    assert open_bars() is None


@pytest.mark.shows("P78")
def test_elsewhere_a_stream_that_is_no_terminal_has_none(notebook: ModuleType) -> None:
    assert open_bars(io.StringIO()) is None, "a stream that was chosen"
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(config={})
    assert open_bars() is None, "IPython on a terminal"
    sys.modules["IPython"].get_ipython = lambda: None
    assert open_bars() is None, "a script that imports IPython"
