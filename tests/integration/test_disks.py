"""Real disks that fill up, turn read-only or vanish while a training goes on (USERS.md 2, 17)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, SaveError
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from helios.storage.folder_lock import LOCK_NAME
from tests.support import faults
from tests.support.faults import Faults, make_store
from tests.support.kills import outcome_of, run_in_child
from tests.support.resume import assert_equal
from tests.support.runs import Outcome, Setting, train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork, uids and mounts")

_NUM_STEPS = 12
# Each checkpoint takes 1.2 MB: three of them fit.
_DISK_BYTES = 4_500_000
_NOBODY = 65534
_MODES = ("async", "sync")


def make_setting(mode: str, **more: Any) -> Setting:
    """Return two epochs with a save after every second step; all checkpoints stay."""
    options = make_store(mode, **more)
    return Setting(total_steps=_NUM_STEPS, chkpt_frequency=2, valid_frequency=None, options=options)


class At(Plugin):
    """Does something to the disk at the ends of some iterations, when no save is in flight."""

    unsaved = ("actions",)

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        super().__init__("at")
        self.actions = actions

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration in self.actions:
            faults.join_writer()
            self.actions[state.global_iteration]()


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
    cause = r"small_epoch_\d+_iter_\d+\.pth, was NOT saved: No space left on device\. The newest"
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


def test_where_room_is_made_the_next_save_succeeds_and_the_run_ends_well(
    whole: Outcome, small_disk: Path
) -> None:
    plugin = Faults()
    room = At({9: lambda: enlarge(small_disk)})
    assert_equal(train(small_disk, make_setting("async"), plugin, room), whole, since=0)
    assert len(refusals(plugin)) == 1
    assert plugin.trainer.exit_code == 0
    check_sound(small_disk, [2, 4, 6, 10, 12])


def test_a_full_disk_ends_the_training_where_that_is_asked_for(
    whole: Outcome, small_disk: Path
) -> None:
    setting = make_setting("async", on_save_error="raise")
    with pytest.raises(OSError, match="No space left on device") as caught:
        train(small_disk, setting, Faults(settles=True))
    assert not isinstance(caught.value, SaveError)
    check_sound(small_disk, [2, 4, 6])
    enlarge(small_disk)
    assert_equal(train(small_disk, setting, Faults()), whole, since=6)


def test_a_limit_of_the_size_of_files_is_borne_like_a_full_disk(
    whole: Outcome, tmp_path: Path
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limits = At(
        {
            5: lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard)),
            9: lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
        }
    )
    folder = tmp_path / "run"

    def work() -> Outcome:
        plugin = Faults()
        outcome = train(folder, make_setting("async"), plugin, limits)
        assert len(refusals(plugin)) == 2
        assert all("File too large" in text for text in refusals(plugin))
        return outcome

    assert run_in_child(work, folder.with_suffix(".outcome")) == 0
    assert_equal(outcome_of(folder), whole, since=0)
    check_sound(folder, [2, 4, 10, 12])


@pytest.mark.parametrize("rights", [0o555, 0o000], ids=["read only", "no access"])
@pytest.mark.parametrize("mode", _MODES)
def test_a_folder_without_rights_for_a_while_costs_only_the_saves_in_it(
    mode: str, rights: int, whole: Outcome
) -> None:
    """The child is nobody in particular, because permissions mean nothing to root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        place = folder / "small"

        def work() -> Outcome:
            if os.getuid() == 0:
                os.setuid(_NOBODY)
            plugin = Faults()
            changes = At({5: lambda: place.chmod(rights), 9: lambda: place.chmod(0o755)})
            outcome = train(folder, make_setting(mode), plugin, changes)
            assert len(refusals(plugin)) == 2
            assert all("Permission denied" in text for text in refusals(plugin))
            return outcome

        result = Path(name) / "run.outcome"
        if os.getuid() == 0:
            os.chown(name, _NOBODY, _NOBODY)
        assert run_in_child(work, result) == 0
        assert_equal(outcome_of(folder), whole, since=0)
        check_sound(folder, [2, 4, 10, 12])


def test_a_disk_that_turns_read_only_leaves_what_was_committed(
    whole: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    place = folder / "small"

    with contextlib.ExitStack() as stack:

        def freeze() -> None:
            stack.enter_context(mounted("--bind", str(place), at=place))
            subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)

        plugin = Faults()
        with pytest.raises(SaveError, match="Read-only file system"):
            train(folder, make_setting("async"), plugin, At({5: freeze}))
        assert len(refusals(plugin)) == 4
        check_sound(folder, [2, 4])
        plugin = Faults()
        with pytest.raises(ArgumentError, match=r"chkpt_root=.* Read-only file system"):
            train(folder, make_setting("async"), plugin)
    assert_equal(train(folder, make_setting("async"), Faults()), whole, since=4)


@pytest.mark.parametrize("mode", _MODES)
def test_a_folder_deleted_between_saves_is_made_again_aloud(
    mode: str, whole: Outcome, tmp_path: Path
) -> None:
    folder, plugin = tmp_path / "run", Faults()
    delete = At({5: lambda: shutil.rmtree(folder)})
    assert_equal(train(folder, make_setting(mode), plugin, delete), whole, since=0)
    (text,) = besides_the_ledger(plugin)
    assert text.startswith(f"WARNING The folder {folder / 'small'} disappeared during the run")
    check_sound(folder, [6, 8, 10, 12])
    assert not (folder / "small" / LOCK_NAME).exists()


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_folder_deleted_under_a_save_costs_that_save(
    operation: str, whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plugin, call = tmp_path / "run", Faults(), getattr(files, operation)

    def delete(subject: Any, *rest: Any) -> Any:
        path = subject if isinstance(subject, Path) else Path(subject.name)
        if "_iter_6.pth" in path.name:
            shutil.rmtree(folder / "small")
        return call(subject, *rest)

    monkeypatch.setattr(files, operation, delete)
    assert_equal(train(folder, make_setting("async"), plugin), whole, since=0)
    assert len(refusals(plugin)) == 1
    assert "_iter_6" in refusals(plugin)[0]
    check_sound(folder, [8, 10, 12])


def test_a_folder_deleted_behind_the_last_save_is_told_at_the_end(
    whole: Outcome, tmp_path: Path
) -> None:
    class Delete(Plugin):
        def setup(self) -> None:
            pass

        def on_training_end(self) -> None:
            faults.join_writer()
            shutil.rmtree(tmp_path / "run")

    plugin = Faults()
    outcome = train(tmp_path / "run", make_setting("async"), plugin, Delete("delete"))
    assert_equal(outcome, whole, since=0)
    (text,) = besides_the_ledger(plugin)
    assert text.startswith("ERROR The last checkpoint")
    assert "was deleted after its save" in text


@pytest.mark.parametrize("place", ["root/run/small", "root/run", "root"])
def test_a_file_in_the_way_is_told_before_the_training(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("of somebody else")
    with pytest.raises(ArgumentError, match=r"must be a folder, got") as caught:
        train(tmp_path / "root" / "run", make_setting("async"))
    assert str(file) in str(caught.value)
    assert file.read_text() == "of somebody else"


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


def test_a_place_where_no_folder_can_be_made_is_refused_before_anything_is_set_up() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("this system has no folder that takes no files")
    _refuse(Path("/proc/nowhere/x"), make_setting("async"), "/proc'")


def test_a_link_that_leads_nowhere_is_refused_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "runs"
    link.symlink_to(tmp_path / "gone")
    _refuse(link, make_setting("async"), "No such file")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


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


def test_a_finished_run_on_a_disk_that_cannot_be_written_to_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    setting = make_setting("async")
    train(folder, setting, Faults())
    with mounted("--bind", str(folder), at=folder):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        assert train(folder, setting).records == {}


def test_a_folder_without_rights_is_refused_before_the_first_step() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o555)

        def work() -> None:
            if os.getuid() == 0:
                os.setuid(_NOBODY)
            _refuse(folder, make_setting("async"), "Permission denied")

        if os.getuid() == 0:
            os.chown(name, _NOBODY, _NOBODY)
            os.chown(folder, _NOBODY, _NOBODY)
        assert run_in_child(work, Path(name) / "run.outcome") == 0


def test_retention_goes_on_where_an_old_checkpoint_cannot_be_deleted(
    whole: Outcome, tmp_path: Path
) -> None:
    """A folder that somebody has put in the place of a file cannot be unlinked."""
    folder, plugin = tmp_path / "run", Faults()
    setting = dataclasses.replace(make_setting("async"), options=make_store("async", keep_last=1))

    def block() -> None:
        path = folder / "small" / "small_epoch_1_iter_4.pth"
        path.unlink()
        path.mkdir()

    outcome = train(folder, setting, plugin, At({5: block}))
    assert_equal(outcome, whole, since=0)
    assert not refusals(plugin)
    assert faults.committed(folder / "small")[-1] == _NUM_STEPS
