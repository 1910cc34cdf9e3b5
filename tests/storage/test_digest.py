"""Digests taken while writing and while reading."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from helios.storage import files

_SIZES = (0, 1, 1 << 18, (1 << 18) - 1, 3 << 20)


@pytest.mark.parametrize("size", _SIZES)
def test_the_digest_of_what_was_written_is_that_of_the_file(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    with files.create(path) as handle:
        writer = files.DigestWriter(handle)
        for chunk in (b"head", data, memoryview(data), b"tail"):
            assert writer.write(chunk) == len(chunk)
        writer.flush()
        written = writer.digest()
    expected = b"head" + data + data + b"tail"
    assert path.read_bytes() == expected
    assert written == "sha256:" + hashlib.sha256(expected).hexdigest()
    assert files.digest_file(path) == written
