"""Kills forked copies of itself between file operations; run as a script by ``test_kills.py``.

One warm process forks a child for each point, because an import of torch takes longer than all
kills together. Prints one JSON object: the names of the operations, and what each child did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.core import files
from tests.checkpoint.helpers import save

OPERATIONS = (
    "create",
    "write",
    "fsync",
    "replace",
    "unlink",
    "fsync_folder",
    "make_folder",
    "write_text_durably",
)


class Executioner:
    """Counts the operations, and ends the process without warning at one of them."""

    def __init__(self, number: int | None, *, is_before: bool) -> None:
        self._number = number
        self._is_before = is_before
        self.names: list[str] = []

    def wrap(self, name: str) -> None:
        call = getattr(files, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            is_due = len(self.names) - 1 == self._number
            if is_due and self._is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(files, name, wrapped)


def save_three(root: Path, report: Path) -> None:
    """The scene: two saves, of which the second deletes, the note of the end, and one more."""
    folder = RunFolder(root / "model", CheckpointStore(keep_last=1))
    for iteration in (1, 2, 3):
        path = save(folder, 1, iteration)
        with report.open("a") as handle:
            handle.write(f"{iteration}\n")
        if iteration == 2:
            folder.mark_finished(path, "stopped")


def repair(root: Path, report: Path) -> None:
    """The scene: the newest is damaged and put aside, then everything is moved aside."""
    folder = RunFolder(root / "model")
    for iteration in (1, 2):
        path = save(folder, 1, iteration)
    path.write_bytes(b"broken")
    folder.load_newest()
    folder.clean()
    report.write_text("1\n")
    folder.move_aside("now")


SCENES: dict[str, Callable[[Path, Path], None]] = {"save": save_three, "repair": repair}


def run_child(scene: str, root: Path, number: int | None, *, is_before: bool) -> tuple[int, list]:
    """Fork, play the scene in the child, and return its status and the operations, if it lived."""
    root.mkdir(parents=True)
    names = root / "names.json"
    child = os.fork()
    if child == 0:
        executioner = Executioner(number, is_before=is_before)
        for name in OPERATIONS:
            executioner.wrap(name)
        SCENES[scene](root, root / "report.txt")
        names.write_text(json.dumps(executioner.names))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(names.read_text()) if status == 0 else []


def main(scene: str, root: Path) -> None:
    status, names = run_child(scene, root / "whole", None, is_before=False)
    codes = {
        f"{when} {number}": run_child(
            scene, root / f"{when} {number}", number, is_before=when == "before"
        )[0]
        for number in range(len(names))
        for when in ("before", "after")
    }
    sys.stdout.write(json.dumps({"status": status, "names": names, "codes": codes}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
