"""What an iteration costs, in calls of the package: a number that no busy machine changes."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "overhead.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overhead", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def count(bench: ModuleType, **options: Any) -> float:
    found: Counter[str] = bench.count_calls(iterations=64, **options)
    # Keys are made ahead, 64 at once, so that what is seen of them depends on the place.
    return round(sum(found.values()), 1)


def test_an_iteration_makes_few_calls(bench: ModuleType) -> None:
    assert count(bench) <= 40
    assert count(bench, is_own=True) <= 43
    assert count(bench, num_replicas=2) <= 130


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_calls_do_not_follow_the_parameters(bench: ModuleType, num_replicas: int) -> None:
    few, many = (count(bench, num_replicas=num_replicas, num_layers=number) for number in (1, 20))
    assert few == many
