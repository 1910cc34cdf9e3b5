"""Which checkpoint is loaded, what counts as damaged, and what is only said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint import file_names, loading
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.errors import CheckpointError, DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage import codec, files
from tests.checkpoint.helpers import (
    is_same,
    make_payload,
    make_sidecar,
    names,
    save,
    swap,
)
from tests.checkpoint.test_mutations import little_memory


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
    return file_names.list_checkpoints(folder.path)[-1]


def cut(path: Path) -> None:
    files.truncate(path, path.stat().st_size // 2)


def swap_sidecars(path: Path) -> None:
    swap(path.with_suffix(".json"), path.with_name("run_epoch_1_iter_2.json"))


def rename_both(path: Path) -> None:
    for suffix in (".pth", ".json"):
        path.with_suffix(suffix).rename(path.with_name(f"run_epoch_1_iter_9{suffix}"))


DAMAGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "a flipped bit": (flip, 2),
    "cut": (cut, 2),
    "sidecar flipped": (lambda path: flip(path.with_suffix(".json")), 2),
    "sidecars swapped": (swap_sidecars, 1),
    "renamed by hand": (rename_both, 2),
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


@pytest.mark.shows("S19")
@pytest.mark.parametrize("renames", [True, False])
def test_when_all_are_damaged_no_start_begins_afresh_in_silence(
    folder: RunFolder, renames: bool
) -> None:
    for path in file_names.list_checkpoints(folder.path):
        flip(path)
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


@pytest.mark.parametrize("is_size", [False, True])
def test_a_file_without_sidecar_is_still_checked_by_the_sums_of_its_container(
    is_size: bool, folder: RunFolder
) -> None:
    path = newest(folder)
    path.with_suffix(".json").unlink()
    data = bytearray(path.read_bytes())
    if is_size:  # of the first record, in the directory: torch would allocate it
        place = data.find(b"PK\x01\x02") + 24
        data[place : place + 4] = b"\xff\xff\xff\xff"
    else:
        data[data.find((torch.arange(50.0) * 3).numpy().tobytes()) + 20] ^= 1
    path.write_bytes(data)
    with little_memory():
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
@pytest.mark.parametrize("schema", [1, 4])
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
    ("module", "name", "failure", "error"),
    [
        (torch, "load", RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError),
        (loading, "digest_file", PermissionError(13, "Permission denied"), CheckpointError),
    ],
)
def test_too_little_memory_and_a_disk_that_fails_are_not_called_damage(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    failure: Exception,
    error: type[Exception],
) -> None:
    before = names(folder.path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise failure

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(error, match=r"run_epoch_1_iter_3\.pth") as caught:
        folder.load_newest()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert names(folder.path) == before


@pytest.mark.shows("S18")
def test_a_migrated_file_may_carry_its_older_name(folder: RunFolder) -> None:
    path = folder.path / "run_epoch_2_iter_400.pth"
    payload = make_payload(2, 4) | {"num_replicas": 0}
    write_payload(path, payload, make_sidecar(2, 4, num_replicas=0))
    loaded = folder.load_newest()
    assert loaded is not None
    assert loaded.path == path
