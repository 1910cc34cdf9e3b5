from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.state.owners import Recorded


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What discovery says, text by text."""
    logger = logging.getLogger("helios.state")
    recorded = Recorded()
    logger.addHandler(recorded)
    yield recorded.texts
    logger.removeHandler(recorded)
