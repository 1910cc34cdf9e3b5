"""Broken, cut and swapped files by the hundred: never a wrong load.

A load gives exactly what was saved, or a message that names the file; it never fills the memory.
A mutant may load: where a byte means nothing, as in the white space of a sidecar.
"""

from __future__ import annotations

import collections
import contextlib
import random
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helios.checkpoint import file_names, loading
from helios.checkpoint.retention import CheckpointStore, KeepBest, plan, with_sidecar
from helios.checkpoint.store import RunFolder
from helios.errors import CheckpointError
from tests.checkpoint.helpers import is_same, make_payload, save

ITERATIONS = (1, 2, 3)
_SPARE_BYTES = 1 << 30

Mutation = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 30])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_near_the_end(data: bytearray, rng: random.Random) -> None:
    """Where the container says what lies where."""
    data[-rng.randint(1, min(len(data), 700))] ^= 1 << rng.randrange(8)


def _set_a_number(data: bytearray, rng: random.Random) -> None:
    """Write a size, or what could be one, over some bytes."""
    width = rng.choice([2, 4, 8])
    start = rng.randrange(max(1, len(data) - width))
    number = rng.choice([0, 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, 1 << 36])
    data[start : start + width] = number.to_bytes(8, "little")[:width]


def _cut(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : rng.choice([start + 64, len(data)])]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([bytes(rng.randint(1, 2000)), data[rng.randrange(len(data)) :]])


def _move_a_block(data: bytearray, rng: random.Random) -> None:
    """As when a disk writes to the wrong place, or nothing."""
    start, target = rng.randrange(len(data)), rng.randrange(len(data))
    block = data[start : start + rng.choice([16, 64, 512])]
    data[target : target + len(block)] = rng.choice([block, bytes(len(block))])


MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _flip,
    _flip_near_the_end,
    _set_a_number,
    _cut,
    _extend,
    _move_a_block,
)
SWAPS = (
    ("run_epoch_1_iter_3.pth", "run_epoch_1_iter_1.pth"),
    ("run_epoch_1_iter_3.json", "run_epoch_1_iter_2.json"),
    ("run_epoch_1_iter_3.pth", "run_epoch_1_iter_3.json"),
    ("run_epoch_1_iter_2.pth", "run_epoch_1_iter_3.json"),
)


class Mutants:
    """A folder of three checkpoints that is broken and repaired again and again.

    Args:
        folder: where to save them.
        seed: of the mutations.
        has_digest: whether the sidecars hold digests; else a broken file has lost its sidecar, so
            that only the container's sums are left.
    """

    def __init__(self, folder: Path, seed: int, *, has_digest: bool) -> None:
        self.folder = RunFolder(folder, CheckpointStore(digest=has_digest))
        for iteration in ITERATIONS:
            save(self.folder, 1, iteration)
        self._rng = random.Random(seed)
        self._whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    @contextlib.contextmanager
    def one(self) -> Iterator[str]:
        """Break something until the end of the block; returns what."""
        broken = self._break()
        try:
            yield broken
        finally:
            for name, data in self._whole.items():
                path = self.folder.path / name
                if not path.exists() or path.read_bytes() != data:
                    path.write_bytes(data)

    def _break(self) -> str:
        rng, folder = self._rng, self.folder.path
        if rng.random() < 0.07:
            names = list(rng.choice(SWAPS))
            for name, other in zip(names, reversed(names), strict=True):
                (folder / name).write_bytes(self._whole[other])
            if rng.random() < 0.3:
                self._drop_sidecar(folder / "run_epoch_1_iter_3.pth")
            return f"swapped {' and '.join(names)}"
        suffix = rng.choices([file_names.SUFFIX, file_names.SIDECAR_SUFFIX], [3, 1])[0]
        path = folder / f"run_epoch_1_iter_{rng.choice([2, 3, 3, 3])}{suffix}"
        mutation = rng.choice(MUTATIONS)
        data = bytearray(self._whole[path.name])
        mutation(data, rng)
        path.write_bytes(data)
        has_digest = self.folder.options.digest
        if suffix == file_names.SUFFIX and (rng.random() < 0.4 or not has_digest):
            self._drop_sidecar(path)
        return f"{mutation.__name__} {path.name}"

    def _drop_sidecar(self, path: Path) -> None:
        file_names.sidecar_path(path).unlink()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Refuse what would take gigabytes, in this process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load_both(folder: RunFolder, broken: str) -> Iterator[tuple[int, loading.Loaded | str]]:
    """Load the newest that is whole, and the broken one by itself; or return the message."""
    number = 2 if "iter_2" in broken else 3
    calls: list[tuple[int, Callable[[], loading.Loaded | None]]] = [
        (3, lambda: folder.load_newest(renames_damaged=False)),
        (number, lambda: loading.load(folder.path / f"run_epoch_1_iter_{number}.pth")),
    ]
    for iteration, call in calls:
        try:
            loaded = call()
        except CheckpointError as error:
            yield iteration, str(error)
        else:
            assert loaded is not None
            yield iteration, loaded


def judge(mutants: Mutants, broken: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return how each load ended; fails for a load that is wrong."""
    ends = []
    caplog.clear()
    for iteration, result in load_both(mutants.folder, broken):
        if isinstance(result, str):
            assert f"run_epoch_1_iter_{iteration}" in result, f"{broken}: {result}"
            ends.append("refused")
            continue
        found = (file_names.parse(result.path) or (0, 0))[1]
        assert is_same(result.payload, make_payload(1, found)), f"{broken}: a wrong load"
        assert found == iteration or "run_epoch_1_iter_3" in caplog.text, broken
        ends.append("loaded" if found == iteration else "fell back")
    return ends


@pytest.mark.shows("S38")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_digest", [True, False], ids=["digest", "no digest"])
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_mutated_files_are_never_loaded_wrongly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, has_digest: bool
) -> None:
    mutants = Mutants(tmp_path / "run", seed=5 + count, has_digest=has_digest)
    rules = CheckpointStore(keep_every=100, keep_best=KeepBest(1, "loss", "max"))
    tally: collections.Counter[str] = collections.Counter()
    with little_memory(), warnings.catch_warnings():
        # torch remarks on pickle protocols that a broken byte makes up.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(count):
            with mutants.one() as broken:
                tally.update(judge(mutants, broken, caplog))
                mutants.folder.clean()
                present = file_names.list_checkpoints(mutants.folder.path)
                gone = plan([with_sidecar(each) for each in present], rules)
                assert len(present) == len(ITERATIONS), broken
                assert present[-1] not in [entry.path for entry in gone], broken
    assert tally["refused"] > count // 2
    assert tally["fell back"] > count // 4
