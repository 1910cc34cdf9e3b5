"""Files that nobody wants to meet under the name of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helios.checkpoint.store import RunFolder
from helios.storage.files import digest_file
from tests.checkpoint.helpers import make_sidecar, save

PLACE = (2, 4)
NAME = "run_epoch_2_iter_4.pth"


class Calling:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _good(path: Path) -> None:
    save(RunFolder(path.parent), *PLACE)


def _edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    _good(path)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _flip(data: bytearray) -> None:
    place = data.find((torch.arange(50.0) * PLACE[1]).numpy().tobytes())
    data[place + 30] ^= 1


def _cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def _write(path: Path, payload: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(payload, path)


def _without_sidecar(path: Path) -> None:
    _good(path)
    path.with_suffix(".json").unlink()


def _with_sidecar(path: Path, **changes: Any) -> None:
    _good(path)
    told = dataclasses.replace(make_sidecar(*PLACE, digest=digest_file(path)), **changes)
    path.with_suffix(".json").write_text(told.to_json())


def _swapped(path: Path) -> None:
    _good(path)
    other = save(RunFolder(path.parent), 1, 3)
    path.write_bytes(other.read_bytes())


def _old(path: Path) -> None:
    payload = {"version": "1.4.0", "training_state": {"global_epoch": 2, "global_iteration": 4}}
    _write(path, {**payload, "model": {"weight": torch.zeros(2)}, "rng": {}})


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "whole": ("good", _good),
    "without a sidecar": ("good", _without_sidecar),
    "without a digest": ("good", lambda path: _with_sidecar(path, digest="")),
    "a flipped bit": ("damaged", lambda path: _edit(path, _flip)),
    "cut": ("damaged", lambda path: _edit(path, _cut)),
    "empty": ("damaged", lambda path: _edit(path, bytearray.clear)),
    "a line of text": ("damaged", lambda path: (_good(path), path.write_text("hello"))[0]),
    "swapped": ("damaged", _swapped),
    "a damaged sidecar": (
        "damaged",
        lambda path: (_good(path), path.with_suffix(".json").write_text("{}"))[0],
    ),
    "a sidecar of another place": ("damaged", lambda path: _with_sidecar(path, iteration=5)),
    "a sidecar of other replicas": ("damaged", lambda path: _with_sidecar(path, num_replicas=2)),
    "a later format": ("newer", lambda path: _write(path, {"schema": 99})),
    "a sidecar of a later format": ("newer", lambda path: _with_sidecar(path, schema=99)),
    "of helios-ml": ("unmigrated", _old),
    "weights of somebody": ("foreign", lambda path: _write(path, {"weight": torch.zeros(2)})),
    "a list": ("foreign", lambda path: _write(path, [1, 2])),
    "without required keys": ("foreign", lambda path: _write(path, {"schema": 5})),
}
"""What a file is called, and how it comes to be so."""
