"""The settings of the loggers that Helios writes to, here and in the ranks that it starts.

A logger that has a handler, or whose records reach one of the standard library's root logger, is
*heard*: the user has decided where its lines go, and Helios adds no handler for the screen. A rank
gets the levels of its launcher, and sends it the records of heard loggers, so that each handler
exists once.
"""

from __future__ import annotations

import dataclasses
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable

OWN = "helios"
WARNINGS = "py.warnings"
# A name that starts like this belongs to a handler of Helios.
OWN_HANDLER = "helios."


def find_listeners(logger: logging.Logger) -> list[logging.Handler]:
    """Return the users' handlers of a logger and the root logger."""
    handlers = list(logger.handlers)
    if logger.name == WARNINGS:
        # logging.captureWarnings() itself adds one, so that lines without a handler are lost.
        handlers = [each for each in handlers if type(each) is not logging.NullHandler]
    found = (*handlers, *logging.getLogger().handlers)
    return [each for each in found if not (each.name or "").startswith(OWN_HANDLER)]


@dataclasses.dataclass(frozen=True)
class LoggerSettings:
    """The logging settings that a rank takes from its launcher.

    Attributes:
        levels: the levels that are set, by the name of the logger; the root logger's is ``""``.
        heard: the loggers that are heard.
        disabled: the level of ``logging.disable``.
    """

    levels: dict[str, int]
    heard: tuple[str, ...]
    disabled: int

    @classmethod
    def read(cls) -> LoggerSettings:
        """Return the settings of this process."""
        root, names = logging.getLogger(), (OWN, WARNINGS)
        loggers = [
            each
            for name, each in root.manager.loggerDict.items()
            if isinstance(each, logging.Logger) and (name in names or name.startswith(f"{OWN}."))
        ]
        return cls(
            levels={"": root.level, **{each.name: each.level for each in loggers if each.level}},
            heard=tuple(name for name in names if find_listeners(logging.getLogger(name))),
            disabled=root.manager.disable,
        )

    def adopt(self, send: Callable[[logging.LogRecord], None]) -> None:
        """Set the loggers of this process, a rank.

        Args:
            send: gives a record to the handlers of the launcher.
        """
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        for name in self.heard:
            logger = logging.getLogger(name)
            # Those that the script sets when it is imported are the launcher's, too.
            logger.handlers = [_Sender(send)]
            logger.propagate = False


class _Sender(logging.handlers.QueueHandler):
    """Sends records to the launcher, with their texts; a loader worker writes them itself."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._send = send
        self._owner = os.getpid()

    def enqueue(self, record: logging.LogRecord) -> None:
        if os.getpid() == self._owner:
            self._send(record)
        else:
            sys.stderr.write(f"{record.getMessage()}\n")
