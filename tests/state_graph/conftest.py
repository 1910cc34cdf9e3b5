from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.state_graph.owners import Recorded


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What discovery says, text by text."""
    logger = logging.getLogger("helios.state_graph")
    recorded = Recorded()
    logger.addHandler(recorded)
    yield recorded.texts
    logger.removeHandler(recorded)
