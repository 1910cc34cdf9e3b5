"""How often a start looks into the folder of its run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.checkpoint import file_names, loading
from helios.plugins import Plugin
from helios.startup.resume_point import find_stored
from helios.storage.folder_lock import FolderLock
from tests.startup.test_arguments import make
from tests.support.runs import IndexModule, Setting, SmallModel, train

_SETTING = Setting(total_steps=2, validates=False, valid_frequency=None)


class _Looks(Plugin):
    """Counts what is asked of a folder until the training begins."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__("looks")
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._is_locked = False
        self._has_begun = False
        for name in ("scandir", "listdir"):
            patch.setattr(os, name, self._counting(getattr(os, name), "listings"))
        read = self._counting(loading.read_sidecar, "sidecars")
        patch.setattr(loading, "read_sidecar", read)
        acquire = FolderLock.acquire

        def take(lock: FolderLock) -> None:
            acquire(lock)
            self._is_locked = True

        patch.setattr(FolderLock, "acquire", take)

    def _counting(self, function: Any, what: str) -> Any:
        def count(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            place = Path(path) if isinstance(path, str | Path) else Path()
            if not self._has_begun and self._folder in (place, place.parent):
                when = "under the lock" if self._is_locked else "before the lock"
                self.counts[f"{what} {when}"] += 1
            return function(path, *args, **kwargs)

        return count

    def setup(self) -> None: ...

    def on_fit_start(self) -> None:
        self._has_begun = True


def _resume(folder: Path, looks: _Looks, **options: Any) -> bool:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=4,
        chkpt_root=folder,
        chkpt_frequency=1,
        random_seed=_SETTING.seed,
        use_cpu=True,
        print_banner=False,
        plugins=[looks],
        **options,
    )
    return trainer.fit(SmallModel(_SETTING), IndexModule(_SETTING))


@pytest.mark.parametrize("has_path", [False, True])
def test_a_resume_lists_its_folder_once_before_the_lock_and_once_under_it(
    has_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen before the lock is taken may be old by then."""
    train(tmp_path / "first", _SETTING)
    root, options = tmp_path / "first", {}
    if has_path:
        origin = root / "small" / "small_epoch_1_iter_2.pth"
        root, options = tmp_path / "second", {"resume": origin}
        with pytest.MonkeyPatch.context() as patch:
            assert _resume(root, _Looks(root / "small", patch), **options)
    looks = _Looks(root / "small", monkeypatch)
    assert _resume(root, looks, **options)
    assert looks.counts == {
        "listings before the lock": 1,
        "listings under the lock": 1,
        "sidecars before the lock": 1,
        # To resume a path, whether the run came from there is read before the file is.
        "sidecars under the lock": 2 if has_path else 1,
    }


def test_a_listing_that_has_missed_everything_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that goes on there commits a checkpoint, and deletes the one before."""
    train(tmp_path, _SETTING)
    listed, rest = file_names.list_checkpoints, [None]

    def list_late(folder: Path) -> list[Path]:
        if rest:
            rest.pop()
            return []
        return listed(folder)

    monkeypatch.setattr(file_names, "list_checkpoints", list_late)
    options = make(chkpt_root=tmp_path)
    stored = find_stored(options, "small", [], is_fit=True)
    assert stored is not None
    assert stored.path.name == "small_epoch_1_iter_2.pth"
