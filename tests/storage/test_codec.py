"""Writing and reading files, and what a hostile or broken one can do: nothing (H26)."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage import codec, files
from helios.storage.container_checks import check_container


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1


class Touch:
    """Unpickled without care, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class System:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def write(path: Path, tree: Any, safe_types: tuple[type, ...] = ()) -> Path:
    with files.create(path) as handle:
        codec.write_encoded(handle, codec.encode(tree, where="", safe_types=safe_types))
    return path


class Recorder:
    """A file that can do nothing but take bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        self.data += data
        return len(data)

    def flush(self) -> None:
        pass


class FullDisk(Recorder):
    def write(self, data: bytes | memoryview) -> int:
        if len(self.data) + len(data) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_is_reported_as_such(size: int) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        codec.write_encoded(FullDisk(), {"a": torch.zeros(size), "b": torch.zeros(5000)})
    assert caught.value.errno == errno.ENOSPC


def test_what_is_read_is_what_was_encoded(tmp_path: Path) -> None:
    path = write(tmp_path / "file", {"a": np.arange(3), b"k": (1, {2})})
    loaded = codec.read(path)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded[b"k"] == (1, {2})


@pytest.mark.shows("H26", "S21")
def test_safe_types_are_allowed_for_one_reading_only(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [Settings()], (Settings,))
    before = set(torch.serialization.get_safe_globals())
    assert codec.read(path, [Settings])[0].rate == 0.1
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(IncompatibleCheckpointError, match=r"Settings.*types_for_safe_load"):
        codec.read(path)


@pytest.mark.shows("H26")
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_executes_nothing_and_is_named(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "executed"
    for number, evil in enumerate((Touch(mark), System(f"touch '{mark}'"))):
        path = tmp_path / f"evil{number}.pth"
        torch.save({"model": [evil]}, path, pickle_protocol=protocol)
        with pytest.raises((IncompatibleCheckpointError, DamagedCheckpointError)) as caught:
            codec.read(path)
        assert str(path) in str(caught.value)
        assert not mark.exists()


def test_the_message_names_the_refused_global_and_does_not_advise_to_switch_safety_off(
    tmp_path: Path,
) -> None:
    torch.save([System("true")], tmp_path / "evil.pth")
    with pytest.raises(IncompatibleCheckpointError, match=r"posix\.system") as caught:
        codec.read(tmp_path / "evil.pth")
    assert "weights_only" not in str(caught.value)


def test_a_plain_pickle_is_damaged_and_executes_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps(System(f"touch '{mark}'"), protocol=2))
    with pytest.raises((DamagedCheckpointError, IncompatibleCheckpointError), match=r"evil\.pth"):
        codec.read(path)
    with pytest.raises(DamagedCheckpointError, match=r"evil\.pth"):
        check_container(path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"hello", bytes(5000)])
def test_a_file_that_is_no_container_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    for call in (codec.read, check_container):
        with pytest.raises(DamagedCheckpointError, match=r"file\.pth"):
            call(path)


def test_codes_that_no_encoder_makes_are_damaged(tmp_path: Path) -> None:
    for code in ({"__helios__": "unknown", "value": 1}, {"__helios__": "set", "items": [[]]}, {}):
        path = tmp_path / "file.pth"
        torch.save([code], path)
        if code:
            with pytest.raises(DamagedCheckpointError, match=r"file\.pth"):
                codec.read(path)


def test_check_sums_of_the_container_find_a_changed_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "file.pth", {"a": torch.zeros(1000)})
    check_container(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"file\.pth"):
        check_container(path)


def test_a_container_without_check_sums_is_accepted(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = write(tmp_path / "file.pth", {"a": torch.zeros(1000)})
    finally:
        torch.serialization.set_crc32_options(before)
    with zipfile.ZipFile(path) as container:
        assert not any(record.CRC for record in container.infolist())
    check_container(path)
    assert codec.read(path)["a"].sum() == 0


@pytest.mark.shows("H24")
def test_tensors_come_to_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    path = write(tmp_path / "file.pth", {"a": torch.ones(2), "b": np.arange(5000), "c": b""})
    with torch.device("meta"):
        loaded = codec.read(path)
        code = codec.encode(loaded, where="")
    assert loaded["a"].device.type == "cpu"
    assert loaded["b"].sum() == 4999 * 2500
    assert codec.decode(code)["b"].sum() == 4999 * 2500


def test_unsafe_globals_are_listed_without_being_imported(tmp_path: Path) -> None:
    torch.save([System("true"), Path("x")], tmp_path / "file.pth")
    assert "posix.system" in codec.unsafe_globals(tmp_path / "file.pth")
    (tmp_path / "empty").touch()
    assert codec.unsafe_globals(tmp_path / "empty") == []
