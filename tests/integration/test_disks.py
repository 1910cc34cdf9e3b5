"""Real disks that fill up, turn read-only or vanish while a training goes on (USERS.md 2, 17)."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, SaveError
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage.folder_lock import LOCK_NAME
from tests.support import faults
from tests.support.faults import Faults, make_store
from tests.support.quiet import Quiet
from tests.support.resume import assert_equal
from tests.support.runs import Outcome, Setting, train

_NUM_STEPS = 12
# Each checkpoint takes 1.2 MB: three of them fit.
_DISK_BYTES = 4_500_000
_MODES = ("async", "sync")


def make_setting(mode: str, **more: Any) -> Setting:
    """Return two epochs with a save after every second step; all checkpoints stay."""
    options = make_store(mode, **more)
    return Setting(total_steps=_NUM_STEPS, chkpt_frequency=2, valid_frequency=None, options=options)


class DeleteAt(Quiet):
    """Deletes a folder at the end of an iteration, when no save is in flight."""

    def __init__(self, iteration: int, folder: Path) -> None:
        super().__init__("delete-at")
        self.iteration, self.folder = iteration, folder

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            faults.join_writer()
            shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the undisturbed run, which also imports all that a child may need later."""
    return train(tmp_path_factory.mktemp("whole"), make_setting("async"), Faults())


@contextlib.contextmanager
def mounted(*command: str, at: Path) -> Iterator[None]:
    """Mount something; skip the test where this process may not."""
    done = subprocess.run(["mount", *command, str(at)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not let us mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a real disk that has room for three checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    with mounted("-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", at=place):
        yield place


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)


def refusals(plugin: Faults) -> list[str]:
    """Return what was told about saves that were refused."""
    return [text for text in plugin.told if text.startswith("ERROR") and "was NOT saved" in text]


def besides_the_ledger(plugin: Faults) -> list[str]:
    """Return what is logged besides the one warning that the ledger was deleted, too."""
    found = [text for text in plugin.told if "was deleted while the run wrote it" not in text]
    assert len(found) == len(plugin.told) - 1
    return found


def check_sound(folder: Path, iterations: list[int]) -> None:
    """Check that these checkpoints are there, whole, and nothing else is."""
    place = folder / "small"
    assert faults.committed(place) == iterations
    found = [name for name in faults.names(place) if name != LOCK_NAME]
    assert len(found) == 2 * len(iterations), found
    for path in place.glob("*.pth"):
        helios.load_checkpoint(path)


@pytest.mark.parametrize("mode", _MODES)
def test_a_full_disk_keeps_the_old_checkpoints_and_the_training_goes_on(
    mode: str, whole: Outcome, small_disk: Path
) -> None:
    setting, plugin = make_setting(mode), Faults()
    cause = r"small_epoch_\d+_iter_\d+\.pth, was NOT saved: .*No space left on device.* The newest"
    with faults.nothing_left_open(), pytest.raises(SaveError, match=cause):
        train(small_disk, setting, plugin)
    assert len(refusals(plugin)) == 3
    assert plugin.trainer.exit_code == 1
    check_sound(small_disk, [2, 4, 6])
    with pytest.raises(SaveError):
        train(small_disk, setting, Faults())
    check_sound(small_disk, [2, 4, 6])
    enlarge(small_disk)
    assert_equal(train(small_disk, setting, Faults()), whole, since=6)


@pytest.mark.shows("S37")
@pytest.mark.parametrize("mode", _MODES)
def test_a_folder_deleted_between_saves_is_made_again_aloud(
    mode: str, whole: Outcome, tmp_path: Path
) -> None:
    folder, plugin = tmp_path / "run", Faults()
    delete = DeleteAt(5, folder)
    assert_equal(train(folder, make_setting(mode), plugin, delete), whole, since=0)
    (text,) = besides_the_ledger(plugin)
    assert text.startswith(f"WARNING The folder {folder / 'small'} disappeared during the run")
    check_sound(folder, [6, 8, 10, 12])
    assert not (folder / "small" / LOCK_NAME).exists()


class _Started(Plugin):
    """Notes whether anything was set up or trained."""

    unsaved = ("events",)

    def __init__(self) -> None:
        super().__init__("started")
        self.events: list[str] = []

    def setup(self) -> None:
        self.events.append("setup")

    def on_training_start(self) -> None:
        self.events.append("training")


def _refuse(folder: Path, setting: Setting, reason: str) -> None:
    started = _Started()
    message = (
        rf"Trainer\(chkpt_root=\.\.\.\) must be a folder that can be created .*{reason}.* Pass"
    )
    with pytest.raises(ArgumentError, match=message) as caught:
        train(folder, setting, started)
    assert repr(str(folder)) in str(caught.value)
    assert started.events == []


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_disk_that_cannot_be_written_to_is_refused_before_the_first_step(
    has_begun: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    setting = make_setting("async")
    if has_begun:
        train(folder, dataclasses.replace(setting, total_steps=4), Faults())
    before = sorted(path.name for path in folder.rglob("*"))
    with mounted("--bind", str(folder), at=folder):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        _refuse(folder, setting, "Read-only file system")
        assert sorted(path.name for path in folder.rglob("*")) == before
        reading = dataclasses.replace(setting, chkpt_frequency=None)
        assert train(folder, reading).records
    assert sorted(path.name for path in folder.rglob("*")) == before
