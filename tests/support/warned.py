"""What Helios warns of while a training runs.

``caplog`` does not see it: messages of the package do not reach the root logger then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings and errors that are logged in this process meanwhile."""
    logger, messages = logging.getLogger("helios"), list[str]()
    collector = _Collector(messages)
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
