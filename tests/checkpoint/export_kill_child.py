"""Kills exports between file operations; called as a script by ``test_export_kills.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from helios.checkpoint.export import Weights, select_weights, write_folder
from helios.checkpoint.status import look_into
from helios.checkpoint.store import RunFolder
from tests.checkpoint import kill_child
from tests.checkpoint.sharded_helpers import save_network


def make_state() -> dict[str, torch.Tensor]:
    """Return the weights of the export."""
    return {f"layer.{part}": torch.full((5, 3), 10.0 + part) for part in range(3)}


def select(root: Path) -> Weights:
    """Return these weights, from a sharded checkpoint."""
    path = save_network(RunFolder(root / "run"), make_state())
    return select_weights(look_into(path)[1])


def make_scene(root: Path) -> tuple[kill_child.Scene, kill_child.Scene]:
    """Return what precedes an export, and this, with a file for each tensor."""
    weights = select(root)

    def act(place: Path) -> None:
        write_folder(place / "exports" / "out", weights, max_bytes=1, metadata={})
        (place / "returned.txt").touch()

    return (lambda place: (place / "exports").mkdir(parents=True)), act


def play(root: Path) -> dict[str, Any]:
    """Play all scenes."""
    kill_child.SCENES = {"export": make_scene(root)}
    return {scene: kill_child.play(scene, root / scene) for scene in kill_child.SCENES}


def main() -> None:
    sys.stdout.write(json.dumps(play(Path(sys.argv[1]))))
