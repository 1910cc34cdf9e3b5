"""Which tier of the tests runs: the default one, or ``scripts/test --all``.

The default tier restarts from a part of the checkpoints that the full one restarts from. Tests that
are run by hand without ``-m`` belong to the full tier.
"""

from __future__ import annotations

import os

_VARIABLE = "HELIOS_TESTS_DEFAULT_TIER"


def choose(markers: str) -> None:
    """Note the tier of this process and its children.

    Args:
        markers: the expression that selects tests, as ``-m`` has it.
    """
    if "not full" in markers:
        os.environ[_VARIABLE] = "1"


def is_full() -> bool:
    """Return whether everything is to be played."""
    return _VARIABLE not in os.environ
