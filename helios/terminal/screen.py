"""Draws progress bars on a terminal or in a notebook, and writes log lines above them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_ENDLESS_FORMAT = "{desc}: {n_fmt}{postfix}"


class _Screen:
    """Holder of the function that writes a line while bars are drawn, one per process."""

    write: Callable[[str], None] | None = None


def write_line(line: str) -> None:
    """Write a line to the current ``sys.stderr``, above any progress bars."""
    if _Screen.write is not None:
        _Screen.write(line)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


@dataclasses.dataclass(frozen=True)
class Gauge:
    """A count, with its label, total and text."""

    label: str
    done: int
    total: int | None
    text: str = ""
    stays: bool = False


class Bars:
    """Progress bars of tqdm, redrawn in place; log lines are written above them.

    Args:
        stream: where lines are written; on a terminal, bars too.
        kind: the class of a bar.
    """

    def __init__(self, stream: TextIO, kind: Any) -> None:
        self._type = kind
        self._stream = stream
        self._bars: dict[str, Any] = {}
        _Screen.write = self._write

    def _write(self, line: str) -> None:
        self._type.write(line, file=self._stream)

    def show(self, gauges: Sequence[Gauge]) -> None:
        """Redraw the bars of these gauges, and remove all others."""
        for label in self._bars.keys() - {gauge.label for gauge in gauges}:
            self._bars.pop(label).close()
        for gauge in gauges:
            if gauge.label not in self._bars:
                self._bars[gauge.label] = self._open(gauge)
            bar = self._bars[gauge.label]
            bar.n, bar.total = gauge.done, gauge.total
            bar.bar_format = _BAR_FORMAT if gauge.total else _ENDLESS_FORMAT
            bar.set_postfix_str(gauge.text, refresh=False)
            bar.refresh()

    def _open(self, gauge: Gauge) -> Any:
        return self._type(
            desc=gauge.label,
            total=gauge.total,
            initial=gauge.done,
            file=self._stream,
            leave=gauge.stays,
            dynamic_ncols=True,
            bar_format=_BAR_FORMAT if gauge.total else _ENDLESS_FORMAT,
        )

    def close(self) -> None:
        """Remove the bars, except those of gauges with ``stays``."""
        # The lowest bar first: closing one moves those below it up.
        for label in reversed(self._bars):
            self._bars[label].close()
        self._bars.clear()
        _Screen.write = None


def _make_terminal_bar() -> type:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread that redraws

    return Bar


def _find_notebook_bar() -> type | None:
    """Return the bar of a notebook; ``None`` elsewhere, or without the widgets that it needs."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    if not issubclass(tqdm, tqdm_notebook):
        return None

    class WidgetBar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

        def refresh(self, *args: Any, **kwargs: Any) -> Any:
            # The widget reads the total only when it is made, and epochs may differ in length.
            self.container.children[1].max = self.total or 1  # type: ignore[attr-defined]
            return super().refresh(*args, **kwargs)

    return WidgetBar


def open_bars(stream: TextIO | None = None) -> Bars | None:
    """Return bars if a stream is a terminal or a notebook; ``None`` elsewhere.

    Args:
        stream: the stream; the current ``sys.stderr`` if ``None``.
    """
    is_chosen = stream is not None
    stream = sys.stderr if stream is None else stream
    if _is_wide(stream):
        return Bars(stream, _make_terminal_bar())
    widgets = None if is_chosen else _find_notebook_bar()
    return None if widgets is None else Bars(stream, widgets)


def _is_wide(stream: TextIO) -> bool:
    """Whether a stream is a terminal with room for bars; some terminals report 0 columns."""
    try:
        if not stream.isatty():
            return False
    except (AttributeError, ValueError):
        # A service may have no stderr, or a closed one, and an object in its place no isatty.
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return True
