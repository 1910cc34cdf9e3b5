"""Digests taken while writing and while reading."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from helios.storage import digest, files

_SIZES = (0, 1, 1 << 18, (1 << 18) - 1, 3 << 20)


@pytest.mark.parametrize("size", _SIZES)
def test_the_digest_of_what_was_written_is_that_of_the_file(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    with files.create(path) as handle, digest.DigestWriter(handle) as writer:
        for chunk in (b"head", data, memoryview(data), b"tail"):
            assert writer.write(chunk) == len(chunk)
        writer.flush()
        written = writer.digest()
    expected = b"head" + data + data + b"tail"
    assert path.read_bytes() == expected
    assert written == "sha256:" + hashlib.sha256(expected).hexdigest()
    assert digest.digest_file(path) == written


def test_one_changed_bit_changes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    before = digest.digest_file(path)
    path.write_bytes(bytes(4999) + b"\x01")
    assert digest.digest_file(path) != before


def test_large_chunks_are_hashed_before_write_returns_as_their_memory_may_be_reused(
    tmp_path: Path,
) -> None:
    memory = bytearray(4 << 20)
    with files.create(tmp_path / "file") as handle, digest.DigestWriter(handle) as writer:
        for value in range(5):
            memory[:] = bytes([value]) * len(memory)
            writer.write(memoryview(memory))
        written = writer.digest()
    assert written == digest.digest_file(tmp_path / "file")


_AFTER_THE_MAIN_THREAD = """
import pathlib, sys, threading
from helios.storage import digest, files

def work():
    threading.main_thread().join()
    with files.create(pathlib.Path(sys.argv[1])) as handle, digest.DigestWriter(handle) as writer:
        writer.write(bytes(1 << 20))
        print(writer.digest())

threading.Thread(target=work).start()
"""


def test_a_thread_that_outlives_the_main_one_can_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", _AFTER_THE_MAIN_THREAD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == digest.digest_file(path)


def test_without_a_thread_the_digest_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with files.create(tmp_path / "file") as handle, digest.DigestWriter(handle) as writer:
        for value in range(3):
            writer.write(bytes([value]) * (1 << 19))
        assert writer.digest() == digest.digest_file(tmp_path / "file")


def test_an_error_of_the_hash_comes_through_and_its_thread_ends(tmp_path: Path) -> None:
    class Broken:
        """More bytes than a hash takes."""

        def update(self, data: Any) -> None:
            raise OverflowError("too many bytes")

    before = threading.active_count()
    with files.create(tmp_path / "file") as handle:
        writer = digest.DigestWriter(handle)
        writer._helper = digest._Helper(Broken().update)
        with writer, pytest.raises(OverflowError, match="too many bytes"):
            writer.write(bytes(1 << 20))
    assert threading.active_count() == before


def test_no_chunk_is_held_on_to(tmp_path: Path) -> None:
    memory = bytearray(1 << 20)
    with files.create(tmp_path / "file") as handle, digest.DigestWriter(handle) as writer:
        writer.write(memoryview(memory))
        # Refused while anybody looks at it.
        memory.clear()


def test_an_error_of_the_disk_comes_through(tmp_path: Path) -> None:
    handle = files.create(tmp_path / "file")
    handle.close()
    with digest.DigestWriter(handle) as writer, pytest.raises(ValueError, match="closed"):
        writer.write(bytes(1 << 20))


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest.digest_file(tmp_path / "gone")
