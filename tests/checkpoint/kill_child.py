"""Kills forked copies of itself between file operations; called as a script by ``test_kills.py``.

One warm process forks a child for each point, because an import of torch takes longer than all
kills together. Prints one JSON object: the names of the operations, and what each child did.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from helios.checkpoint.loading import RECORD_NAME
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.storage import codec, files
from tests.checkpoint.helpers import make_payload, save
from tests.checkpoint.sharded_helpers import rows_of, save_sharded, write_rows
from tests.support import faults

OPERATIONS = (*faults.OPERATIONS, "remove_empty_folder")

OF_PYTORCH = ((torch, "save"), (FileSystem, "create_stream"), (FileSystem, "rename"))
"""With what torch.distributed.checkpoint writes."""

_PREPARED = "prepared"


class Executioner:
    """Counts the operations, and ends the process without warning at one of them."""

    def __init__(self, number: int | None, *, is_before: bool) -> None:
        self._number = number
        self._is_before = is_before
        self.names: list[str] = []

    def wrap(self, holder: Any, name: str) -> None:
        call = getattr(holder, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            is_due = len(self.names) - 1 == self._number
            if is_due and self._is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(holder, name, wrapped)


def prepare_nothing(root: Path) -> None:
    pass


def save_two(root: Path) -> None:
    """Two saves, of which the second deletes the first, and the note of the end."""
    folder = RunFolder(root / "model", CheckpointStore(keep_last=1))
    for iteration in (1, 2):
        path = save(folder, 1, iteration)
        with (root / "returned.txt").open("a") as handle:
            handle.write(f"{iteration}\n")
    folder.mark_finished(path, "stopped")


def prepare_sharded(root: Path) -> None:
    save_sharded(RunFolder(root / "model"), 1, 1, 2)


def save_sharded_too(root: Path) -> None:
    """A sharded save by two ranks, one after the other, which deletes the one before."""
    folder = RunFolder(root / "model", CheckpointStore(keep_last=1))
    save_sharded(folder, 1, 2, 2)
    (root / "returned.txt").write_text("2\n")


def repair_sharded(root: Path) -> None:
    """What a kill left of a save is removed, and a damaged folder is put aside."""
    folder = RunFolder(root / "model")
    folder.clean()
    folder.load_newest()


def prepare_sharded_damage(root: Path) -> None:
    folder = RunFolder(root / "model")
    save(folder, 1, 1)
    path = save_sharded(folder, 1, 2, 2)
    (path / RECORD_NAME).write_bytes(b"not what was written")
    draft = files.temporary_path(folder.path_of("run_epoch_1_iter_3", is_sharded=True))
    write_rows(draft, [rows_of(3, rank, 2) for rank in range(2)])


def prepare_damage(root: Path) -> None:
    folder = RunFolder(root / "model")
    for iteration in (1, 2):
        path = save(folder, 1, iteration)
    # A sound file with other weights: only the digest in its sidecar can tell.
    with files.create(path) as handle:
        codec.write_encoded(handle, codec.encode(make_payload(1, 2, other=1), where=""))
    files.temporary_path(path).write_bytes(b"rest of a kill")


def repair(root: Path) -> None:
    """The damaged one is put aside and rests are removed; then everything is moved aside."""
    folder = RunFolder(root / "model")
    folder.clean()
    folder.load_newest()
    folder.move_aside()


Scene = Callable[[Path], None]
SCENES: dict[str, tuple[Scene, Scene]] = {
    "save": (prepare_nothing, save_two),
    "repair": (prepare_damage, repair),
    "sharded save": (prepare_sharded, save_sharded_too),
    "sharded repair": (prepare_sharded_damage, repair_sharded),
}


def run_child(
    scene: str, root: Path, number: int | None, *, is_before: bool
) -> tuple[int, list[str]]:
    """Fork, play the scene in the child, and return its status and the operations, if it lived.

    What precedes the scene is a copy of what lies beside the root.
    """
    shutil.copytree(root.with_name(_PREPARED), root)
    names = root / "names.json"
    child = os.fork()
    if child == 0:
        executioner = Executioner(number, is_before=is_before)
        for name in OPERATIONS:
            executioner.wrap(files, name)
        for holder, name in OF_PYTORCH if "sharded" in scene else ():
            executioner.wrap(holder, name)
        SCENES[scene][1](root)
        names.write_text(json.dumps(executioner.names))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(names.read_text()) if status == 0 else []


def choose_points(names: list[str]) -> list[int]:
    """Return every operation but the inner ones of a row of writes: its first, middle and last."""
    points: list[int] = []
    for name, row in itertools.groupby(range(len(names)), key=names.__getitem__):
        numbers = list(row)
        if name in ("write", "save"):
            numbers = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
        points += numbers
    return points


def play(scene: str, root: Path) -> dict[str, Any]:
    """Play a scene once as a whole, and once for each point and each side of it."""
    (root / _PREPARED).mkdir(parents=True)
    SCENES[scene][0](root / _PREPARED)
    status, names = run_child(scene, root / "whole", None, is_before=False)
    points = choose_points(names)
    codes = {
        f"{when} {number}": run_child(
            scene, root / f"{when} {number}", number, is_before=when == "before"
        )[0]
        for number in points
        for when in ("before", "after")
    }
    return {"status": status, "hit": sorted({names[n] for n in points}), "codes": codes}


def main() -> None:
    root = Path(sys.argv[1])
    sys.stdout.write(json.dumps({scene: play(scene, root / scene) for scene in SCENES}))
