"""Kills exports between file operations; called as a script by ``test_export_kills.py``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

# Before the forks, each of which would import it.
import torch.distributed.checkpoint

from helios.checkpoint.export import Weights, select_weights
from helios.checkpoint.export_folders import DistributedCheckpoint, HuggingFace, write_folder
from helios.checkpoint.status import look_into
from helios.checkpoint.store import RunFolder
from tests.checkpoint import kill_child
from tests.checkpoint.sharded_helpers import save_network

# A file for each tensor.
LAYOUTS = {"huggingface": HuggingFace(1), "dcp": DistributedCheckpoint()}
NEW, OLD = 2, 1


def make_state(number: int) -> dict[str, torch.Tensor]:
    """Return the weights of the old or of the new export."""
    return {f"layer.{part}": torch.full((5, 3), 10.0 * number + part) for part in range(3)}


def select(root: Path, number: int) -> Weights:
    """Return these weights, from a sharded checkpoint."""
    path = save_network(RunFolder(root / f"run{number}"), make_state(number))
    return select_weights(look_into(path)[1])


def make_scenes(root: Path) -> dict[str, tuple[kill_child.Scene, kill_child.Scene]]:
    """Return what precedes an export that replaces another one, and this, by its format."""
    weights = {number: select(root, number) for number in (OLD, NEW)}

    def make(kind: str) -> tuple[kill_child.Scene, kill_child.Scene]:
        old, layout = root / "old" / kind, LAYOUTS[kind]
        write_folder(old, weights[OLD], layout, metadata={})

        def act(place: Path) -> None:
            out = place / "exports" / "out"
            write_folder(out, weights[NEW], layout, metadata={}, replaces=True)
            (place / "returned.txt").touch()

        return (lambda place: _copy(old, place / "exports" / "out")), act

    return {kind: make(kind) for kind in LAYOUTS}


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def play(root: Path) -> dict[str, Any]:
    """Play all scenes."""
    kill_child.SCENES = make_scenes(root)
    return {scene: kill_child.play(scene, root / scene) for scene in kill_child.SCENES}


def main() -> None:
    sys.stdout.write(json.dumps(play(Path(sys.argv[1]))))
