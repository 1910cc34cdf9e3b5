"""Which tier of the tests runs: the default one, or ``scripts/test --all``.

The default tier restarts from a part of the checkpoints that the full one restarts from, and runs a
part of the cases of tests that are marked ``sampled``. Tests that are run by hand without ``-m``
belong to the full tier.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

_VARIABLE = "HELIOS_TESTS_DEFAULT_TIER"


def choose(markers: str) -> None:
    """Note the tier of this process and its children."""
    if "not full" in markers:
        os.environ[_VARIABLE] = "1"


def is_full() -> bool:
    """Return whether everything is to be played."""
    return _VARIABLE not in os.environ


def sample(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of the default tier: of those marked ``sampled(every)``, one case in every.

    The stride shifts, so that it takes its turns with the values of a parameter whose number it
    divides. The first case of a test is always among them.
    """
    kept: set[pytest.Item] = set()
    numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            (every,) = mark.args
            number = next(numbers[item.nodeid.partition("[")[0]])
            if (number + number // every) % every:
                continue
        kept.add(item)
    return kept


def deal(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Return the tests so that each worker begins with files of tests that are marked ``long``.

    Each worker gets as many tests that follow each other; what is left of them, others take over
    from the end.
    """
    by_file: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") is not None:
            by_file[item.path].append(item)
    files = list(by_file.values())
    dealt: list[pytest.Item] = []
    rest = iter([item for item in items if item.get_closest_marker("long") is None])
    for worker in range(num_workers):
        end = len(dealt) + (len(items) - len(dealt)) // (num_workers - worker)
        dealt += itertools.chain.from_iterable(files[worker::num_workers])
        dealt += itertools.islice(rest, max(0, end - len(dealt)))
    return dealt + list(rest)
