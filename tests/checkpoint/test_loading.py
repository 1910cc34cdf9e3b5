"""Which checkpoint is loaded, what counts as damaged, and what is only said (DESIGN section 5)."""

from __future__ import annotations

import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint import contents, file_names, loading
from helios.checkpoint.store import CheckpointStore, RunFolder, load_checkpoint
from helios.errors import CheckpointError, DamagedCheckpointError, IncompatibleCheckpointError
from helios.state import TrainingState
from helios.storage import codec, files
from tests.checkpoint.helpers import (
    is_same,
    make_payload,
    make_sidecar,
    names,
    save,
    save_payload,
    swap,
)
from tests.checkpoint.hostile import Calling


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    result = RunFolder(tmp_path / "run", CheckpointStore())
    for iteration in (1, 2, 3):
        save(result, 1, iteration)
    return result


def flip(path: Path, position: int = -200) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def newest(folder: RunFolder) -> Path:
    return folder.entries()[-1].path


def cut(path: Path) -> None:
    files.truncate(path, path.stat().st_size // 2)


def swap_sidecars(path: Path) -> None:
    swap(path.with_suffix(".json"), path.with_name("run_epoch_1_iter_2.json"))


def swap_checkpoints(path: Path) -> None:
    """The digests no longer fit, and the older file is damaged too."""
    swap(path, path.with_name("run_epoch_1_iter_2.pth"))


def rename_both(path: Path) -> None:
    for suffix in (".pth", ".json"):
        path.with_suffix(suffix).rename(path.with_name(f"run_epoch_1_iter_9{suffix}"))


def other_replicas(path: Path) -> None:
    sidecar = loading.read_sidecar(path)
    assert sidecar is not None
    table = make_sidecar(1, 3, num_replicas=2, digest=sidecar.digest)
    path.with_suffix(".json").write_text(table.to_json())


DAMAGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "a flipped bit": (flip, 2),
    "cut": (cut, 2),
    "empty": (lambda path: path.write_bytes(b"") and None, 2),
    "text": (lambda path: path.write_text("hello") and None, 2),
    "sidecar flipped": (lambda path: flip(path.with_suffix(".json")), 2),
    "sidecar empty": (lambda path: path.with_suffix(".json").write_text("") and None, 2),
    "sidecars swapped": (swap_sidecars, 1),
    "checkpoints swapped": (swap_checkpoints, 1),
    "renamed by hand": (rename_both, 2),
    "other number of replicas": (other_replicas, 2),
}


@pytest.mark.shows("S18")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken(
    folder: RunFolder, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, expected = DAMAGES[name]
    damage(newest(folder))
    path = newest(folder)
    loaded = folder.load_newest()
    assert loaded is not None
    assert is_same(loaded.payload, make_payload(1, expected))
    assert str(path.name) in caplog.text
    assert "damaged" in caplog.text
    assert caplog.records[0].levelname == "WARNING"
    assert path.with_name(path.name + ".damaged").exists()
    assert path.with_name(path.with_suffix(".json").name + ".damaged").exists()
    assert not path.exists()


def test_a_damaged_checkpoint_that_was_put_aside_can_be_written_again(folder: RunFolder) -> None:
    for _ in range(2):
        flip(newest(folder))
        folder.load_newest()
        save(folder, 1, 3)
        loaded = folder.load_newest()
        assert loaded is not None
        assert file_names.parse(loaded.path) == (1, 3)
    assert sum(name.endswith(".damaged") for name in names(folder.path)) == 4


def test_who_may_not_write_renames_nothing(folder: RunFolder) -> None:
    flip(newest(folder))
    before = names(folder.path)
    loaded = folder.load_newest(renames_damaged=False)
    assert loaded is not None
    assert file_names.parse(loaded.path) == (1, 2)
    assert names(folder.path) == before


@pytest.mark.shows("S19")
@pytest.mark.parametrize("renames", [True, False])
def test_when_all_are_damaged_no_start_begins_afresh_in_silence(
    folder: RunFolder, renames: bool
) -> None:
    for entry in folder.entries():
        flip(entry.path)
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match=r"run_epoch_1_iter_3\.pth.*never"):
            folder.load_newest(renames_damaged=renames)
    folder.move_aside()
    assert folder.load_newest() is None


@pytest.mark.shows("S18")
def test_a_missing_sidecar_is_said_and_the_file_is_loaded(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    newest(folder).with_suffix(".json").unlink()
    loaded = folder.load_newest()
    assert loaded is not None
    assert loaded.sidecar is None
    assert is_same(loaded.payload, make_payload(1, 3))
    assert "not verified" in caplog.text


def test_a_file_without_sidecar_is_still_checked_by_the_sums_of_its_container(
    folder: RunFolder,
) -> None:
    path = newest(folder)
    path.with_suffix(".json").unlink()
    data = path.read_bytes()
    flip(path, data.find((torch.arange(50.0) * 3).numpy().tobytes()) + 20)
    loaded = folder.load_newest()
    assert loaded is not None
    assert is_same(loaded.payload, make_payload(1, 2))


def write_payload(path: Path, payload: Any, sidecar: Any = None) -> None:
    with files.create(path) as handle:
        codec.write_encoded(handle, codec.encode(payload, where=""))
    if sidecar is not None:
        path.with_suffix(".json").write_text(sidecar.to_json())


def refuses(folder: RunFolder, text: str) -> None:
    """The newest file is an error of its own, and nothing is renamed or skipped."""
    before = names(folder.path)
    with pytest.raises(IncompatibleCheckpointError, match=text) as caught:
        folder.load_newest()
    assert newest(folder).stem in str(caught.value)
    assert names(folder.path) == before


@pytest.mark.shows("H25", "R45", "S20")
def test_a_later_format_is_an_error_with_its_remedy(folder: RunFolder) -> None:
    path = folder.path / "run_epoch_2_iter_4.pth"
    write_payload(path, {"schema": file_names.SCHEMA + 1, "renamed": 1})
    refuses(folder, "Install the version")
    write_payload(path, make_payload(2, 4), make_sidecar(2, 4, schema=file_names.SCHEMA + 1))
    refuses(folder, "Install the version")


@pytest.mark.shows("S22")
@pytest.mark.parametrize("schema", range(1, 5))
def test_a_file_of_a_development_version_is_an_error_in_one_line(
    folder: RunFolder, schema: int
) -> None:
    path = folder.path / "run_epoch_2_iter_4.pth"
    write_payload(path, make_payload(2, 4) | {"schema": schema})
    refuses(folder, "written by a development version")
    write_payload(path, make_payload(2, 4), make_sidecar(2, 4, schema=schema))
    refuses(folder, "written by a development version")


@pytest.mark.shows("H25")
def test_a_checkpoint_without_a_required_key_is_an_error(folder: RunFolder) -> None:
    payload = make_payload(2, 4)
    del payload["cursor"]
    write_payload(folder.path / "run_epoch_2_iter_4.pth", payload)
    refuses(folder, "lacks 'cursor'")


@pytest.mark.shows("S20")
@pytest.mark.parametrize(
    "payload",
    [[1, 2], {"weight": torch.zeros(2)}, {"schema": 5}, {"schema": 5, "training_state": 3}],
)
def test_a_foreign_file_under_such_a_name_is_an_error(folder: RunFolder, payload: Any) -> None:
    torch.save(payload, folder.path / "run_epoch_2_iter_4.pth")
    refuses(folder, "not a checkpoint of Helios")


def old_files() -> dict[str, dict[str, Any]]:
    """Payloads like those of helios-ml 0.3 and 1.x, by the objects that they pickled."""

    class TrainingState:
        def __init__(self) -> None:
            self.global_epoch = 1

    TrainingState.__module__ = "helios.trainer"
    TrainingState.__qualname__ = "TrainingState"
    common: dict[str, Any] = {"model": {}, "rng": {}}
    plain = {"global_epoch": 1, "global_iteration": 2}
    return {
        "0.1": {**common, "training_state": plain},
        "0.3": {**common, "version": "0.3.0", "training_state": plain, "log_path": Path("a.log")},
        "1.1": {**common, "version": "1.1.0", "training_state": TrainingState()},
    }


@pytest.mark.shows("H27", "R45", "S20")
@pytest.mark.parametrize("version", ["0.1", "0.3", "1.1"])
def test_a_file_of_helios_ml_is_an_error_that_names_the_migrator(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    payload = old_files()[version]
    fake = types.ModuleType("helios.trainer")
    fake.TrainingState = type(payload["training_state"])  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "helios.trainer", fake)
        torch.save(payload, folder.path / "linear_epoch_2_iter_4.pth")
    refuses(folder, f"python -m chkpt_migrator {folder.path}")


class Own:
    pass


@pytest.mark.shows("S21")
def test_a_type_that_is_not_allowed_is_an_error_with_its_remedy(folder: RunFolder) -> None:
    save_payload(
        folder,
        make_payload(2, 4, own=Own()),
        stem="run_epoch_2_iter_4",
        sidecar=make_sidecar(2, 4),
        safe_types=[Own],
    )
    refuses(folder, r"Own.*types_for_safe_load")
    loaded = folder.load_newest([Own])
    assert loaded is not None
    assert isinstance(loaded.payload["model"]["own"], Own)


def test_a_malicious_checkpoint_executes_nothing(folder: RunFolder) -> None:
    mark = folder.path.parent / "executed"
    payload = make_payload(2, 4, evil=Calling(os.system, f"touch '{mark}'"))
    torch.save(payload, folder.path / "run_epoch_2_iter_4.pth")
    refuses(folder, r"posix\.system")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        load_checkpoint(newest(folder))
    assert not mark.exists()


@pytest.mark.shows("S20")
def test_a_sound_file_that_cannot_be_read_here_is_not_called_damaged(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("unknown dtype float2")

    monkeypatch.setattr(torch, "load", fail)
    refuses(folder, r"unknown dtype float2.*Nothing was renamed")


@pytest.mark.shows("S20")
@pytest.mark.parametrize("digest", [True, False])
def test_too_little_memory_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: bool
) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(digest=digest))
    save(folder, 1, 1)
    before = names(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError, match=r"run_epoch_1_iter_1\.pth"):
        folder.load_newest()
    assert names(tmp_path) == before


@pytest.mark.shows("S20")
def test_a_disk_that_fails_is_not_called_damage(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(folder.path)

    def fail(path: Path, watch: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(contents, "digest_file", fail)
    with pytest.raises(CheckpointError, match=r"run_epoch_1_iter_3\.pth.*Permission") as caught:
        folder.load_newest()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert names(folder.path) == before


@pytest.mark.shows("S18")
def test_files_of_other_names_are_never_touched(folder: RunFolder) -> None:
    others = ["best.pth", "best.json", "weights.pth.tmp", "notes.damaged"]
    for name in others:
        (folder.path / name).write_text("not ours")
    flip(newest(folder))
    folder.clean()
    folder.load_newest()
    assert all((folder.path / name).read_text() == "not ours" for name in others)


@pytest.mark.shows("S18")
def test_a_migrated_file_may_carry_its_older_name(folder: RunFolder) -> None:
    path = folder.path / "run_epoch_2_iter_400.pth"
    payload = make_payload(2, 4) | {"num_replicas": 0}
    write_payload(path, payload, make_sidecar(2, 4, num_replicas=0))
    loaded = folder.load_newest()
    assert loaded is not None
    assert loaded.path == path


@pytest.mark.parametrize("stated", [(0, 1), (1, 0)], ids=["in the sidecar", "in the file"])
def test_an_older_name_needs_that_file_and_sidecar_do_not_name_their_run(
    folder: RunFolder, stated: tuple[int, int]
) -> None:
    path = folder.path / "run_epoch_2_iter_400.pth"
    payload = make_payload(2, 4) | {"num_replicas": stated[0]}
    write_payload(path, payload, make_sidecar(2, 4, num_replicas=stated[1]))
    with pytest.raises(DamagedCheckpointError, match="disagree"):
        folder.load(path)


def test_a_run_folder_that_was_copied_loads_there(folder: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(folder.path, tmp_path / "elsewhere")
    loaded = RunFolder(tmp_path / "elsewhere").load_newest()
    assert loaded is not None
    assert is_same(loaded.payload, make_payload(1, 3))


def test_a_single_file_is_loaded_with_its_counters_as_an_object(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    payload = make_payload(1, 7)
    path = save_payload(folder, payload, stem="run_epoch_1_iter_7", sidecar=make_sidecar(1, 7))
    loaded = load_checkpoint(str(path))
    assert loaded["training_state"] == TrainingState(global_epoch=1, global_iteration=7)
    assert set(loaded) == set(payload)
    shutil.copy(path, tmp_path / "weights.pth")
    assert load_checkpoint(tmp_path / "weights.pth")["version"] == "3.0.0"


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pth"):
        load_checkpoint(tmp_path / "gone.pth")
