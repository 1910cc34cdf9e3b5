"""Draws progress bars on a terminal or in a notebook, and writes log lines above them."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, ClassVar, TextIO

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no monitor thread that redraws


# Not tqdm's own lock, which a killed child process may hold for ever.
_Bar.set_lock(threading.RLock())


class Bars:
    """Progress bars of tqdm by label, from :meth:`open` on; nothing is drawn without a terminal.

    Args:
        stream: where they are drawn and log lines are written; ``sys.stderr`` if ``None``.
    """

    drawn: ClassVar[Bars | None] = None

    def __init__(self, *, is_wanted: bool, stream: TextIO | None) -> None:
        self._stream = stream
        self._bars: dict[str, Any] = {}
        has_widgets = stream is None and issubclass(tqdm, tqdm_notebook)
        self.is_drawn = is_wanted and (has_widgets or _is_terminal(stream or sys.stderr))
        if self.is_drawn:
            Bars.drawn = self

    def open(self, label: str, total: int | None, *, done: int = 0, stays: bool = False) -> None:
        """Show a bar; one of the same label is removed before."""
        self.close(label)
        if self.is_drawn:
            self._bars[label] = _Bar(
                desc=label,
                total=total,
                initial=done,
                file=self._stream,
                leave=stays,
                dynamic_ncols=True,
                unit="",
            )

    def advance(self, label: str) -> None:
        """Count one; does nothing if there is no such bar."""
        if label in self._bars:
            self._bars[label].update()

    def describe(self, label: str, text: str) -> None:
        """Show a text behind a bar; does nothing if there is no such bar."""
        if label in self._bars:
            self._bars[label].set_postfix_str(text)

    def close(self, label: str | None = None) -> None:
        """Remove a bar, or all of them; bars that stay are left on the screen."""
        # The lowest bar first: closing one moves those below it up.
        for name in [name for name in reversed(self._bars) if label in (None, name)]:
            self._bars.pop(name).close()
        if label is None and Bars.drawn is self:
            Bars.drawn = None

    def write(self, line: str) -> None:
        """Write a line above the bars."""
        _Bar.write(line, file=self._stream or sys.stderr)


def write_line(line: str) -> None:
    """Write a line to the current ``sys.stderr``, above any progress bars."""
    if Bars.drawn is not None:
        Bars.drawn.write(line)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal with room for bars; some terminals report 0 columns."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True
    except (AttributeError, ValueError):
        # A service may have no stderr, or a closed one, and an object in its place no isatty.
        return False
