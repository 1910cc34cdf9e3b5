"""What a script leaves that kills its children at each file operation in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.scripts import call


@dataclasses.dataclass(frozen=True)
class Scene:
    """What was left in ``root/<point>`` by a kill at each point, and how the processes ended."""

    root: Path
    hit: set[str]
    codes: dict[str, int]


@contextlib.contextmanager
def play(main: Callable[[], None]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run a script; yields the folder that it worked in and the document that it printed.

    The folder is in memory where the system has one there: a kill needs no disk.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        done = call(main, root, timeout=120)
        assert done.returncode == 0, done.stderr
        yield Path(root), json.loads(done.stdout)
