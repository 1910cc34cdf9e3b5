"""Broken, cut and swapped files by the hundred: never a wrong load (DESIGN section 5)."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest

from helios.checkpoint import layout, loading
from helios.checkpoint.store import RunFolder
from helios.errors import CheckpointError
from tests.checkpoint.helpers import is_same, make_payload, save, swap


def mutate(folder: Path, rng: random.Random) -> None:
    """Break one file of the folder, or swap two."""
    kind = rng.choice(["bits", "cut", "zero", "swap", "drop sidecar", "bits without sidecar"])
    suffix = rng.choice([".pth", ".json"])
    path = folder / f"run_epoch_1_iter_{rng.choice([2, 3])}{suffix}"
    if kind == "swap":
        swap(path, folder / f"run_epoch_1_iter_1{suffix}")
        return
    if "sidecar" in kind:
        path.with_suffix(".json").unlink()
        path = path.with_suffix(".pth")
    data = bytearray(path.read_bytes())
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "zero":
        start = rng.randrange(len(data))
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    elif kind.startswith("bits"):
        for _ in range(rng.choice([1, 1, 1, 20])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def load_or_read_error(folder: RunFolder) -> loading.Loaded | str:
    with warnings.catch_warnings():
        # torch remarks on pickle protocols that a broken byte makes up.
        warnings.simplefilter("ignore", UserWarning)
        try:
            loaded = folder.load_newest()
        except CheckpointError as error:
            return str(error)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_files_are_never_loaded_wrongly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    good = RunFolder(tmp_path / "good")
    for iteration in (1, 2, 3):
        save(good, 1, iteration)
    rng = random.Random(5)
    fallen_back = 0
    for number in range(count):
        folder = RunFolder(tmp_path / str(number))
        shutil.copytree(good.path, folder.path)
        mutate(folder.path, rng)
        caplog.clear()
        loaded = load_or_read_error(folder)
        if isinstance(loaded, str):
            assert "run_epoch_1_iter_" in loaded
            continue
        iteration = (layout.parse(loaded.path) or (0, 0))[1]
        assert is_same(loaded.payload, make_payload(1, iteration))
        if iteration < 3:
            fallen_back += 1
            assert "run_epoch_1_iter_3" in caplog.text
        shutil.rmtree(folder.path)
    assert fallen_back > count // 6
