"""Owners with states of their own, which leave out most of what training changes."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.full_state.owners import (
    EngineWithState,
    LoopWithState,
    OwnState,
    start,
)

NAME = "own_states"
SAVED = (3,)


def train(root: Path) -> dict[str, list[str]]:
    return start(root, OwnState, "own_states", EngineWithState(), LoopWithState()).result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
