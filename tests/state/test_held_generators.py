"""Generators of random numbers are state wherever they are held, and stay the objects they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.state.owners import Owner, resumed, started, through_a_file

_MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand(2, generator=g).tolist(),
    ),
    "random": (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.integers(9, size=3).tolist()),
    "numpy, another algorithm": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda g: g.normal(size=3).tolist(),
    ),
    "numpy, the old interface": (
        lambda: np.random.RandomState(3),
        lambda g: g.normal(size=3).tolist(),
    ),
}


@pytest.mark.shows("S67")
@pytest.mark.parametrize("name", _MAKERS)
def test_a_generator_goes_on_where_it_was(name: str, tmp_path: Path, said: list[str]) -> None:
    make_one, draw = _MAKERS[name]

    def make() -> Any:
        one = make_one()
        return Owner(rng=one, parts={"same": one, "own": make_one()}, late=None)

    owner = make()
    discovery = started(owner)
    owner.late = make_one()
    draw(owner.late)
    draw(owner.rng)
    draw(owner.parts["own"])
    draw(owner.parts["own"])
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = resumed(make, state)
    assert again.parts["same"] is again.rng
    assert draw(again.rng) == draw(owner.rng)
    assert draw(again.parts["own"]) == draw(owner.parts["own"])
    assert draw(again.late) == draw(owner.late)
    assert not said
