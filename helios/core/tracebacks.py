"""Short tracebacks: of the frames of Helios, one is shown, and the user's own come last.

Between ``trainer.fit(...)`` and a step are a dozen frames of loops, which say nothing of the error.
The log file has all of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from helios.errors import HeliosError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=type)
_PACKAGE = __name__.partition(".")[0]


def shows_all_frames() -> bool:
    """Whether the environment variable ``HELIOS_FULL_TRACEBACK`` asks for all frames."""
    return os.environ.get("HELIOS_FULL_TRACEBACK", "") not in ("", "0")


def with_short_traceback(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function whose errors show one frame of Helios, that of the wrapper."""

    @functools.wraps(call)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return call(*args, **options)
        except BaseException as error:
            if shows_all_frames():
                raise
            fold_traceback(error)
            # The comment is shown in the traceback.
            raise error  # Frames of Helios are hidden; HELIOS_FULL_TRACEBACK=1 shows them.

    return run


def with_short_constructor(kind: Kind) -> Kind:
    """Decorate a class whose constructor refuses arguments: its errors end at the user's call."""
    kind.__init__ = with_short_traceback(kind.__init__)  # type: ignore[misc]
    return kind


def fold_traceback(error: BaseException) -> None:
    """Remove the frames of Helios from the traceback of an error, and of what led to it.

    If the error was raised inside of Helios, and is neither one of its own nor explained by a
    cause, the last frame stays: it is where to look.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        is_explained = isinstance(each, HeliosError) or each.__cause__ is not None
        each.__traceback__ = _fold(each.__traceback__, keeps_last=not is_explained)
        waiting += [each.__cause__, each.__context__]


def _fold(found: TracebackType | None, *, keeps_last: bool) -> TracebackType | None:
    entries: list[TracebackType] = []
    while found is not None:
        entries.append(found)
        found = found.tb_next
    kept = [entry for entry in entries if not _is_own(entry)]
    if keeps_last and entries and _is_own(entries[-1]) and not _is_wrapper(entries[-1]):
        kept.append(entries[-1])
    folded: TracebackType | None = None
    for entry in reversed(kept):
        # Generated code may have no line.
        line = entry.tb_lineno or 0
        folded = TracebackType(folded, entry.tb_frame, entry.tb_lasti, line)
    return folded


def _is_wrapper(entry: TracebackType) -> bool:
    """Whether a call that a frame of this module makes does not fit the signature."""
    return entry.tb_frame.f_globals.get("__name__") == __name__


def _is_own(entry: TracebackType) -> bool:
    """Whether a frame is of Helios, or of a context manager of the standard library."""
    name = str(entry.tb_frame.f_globals.get("__name__", ""))
    return name == "contextlib" or name.partition(".")[0] == _PACKAGE
