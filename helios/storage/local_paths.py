"""Paths of the file system: Helios opens, locks and renames files, which no URL allows.

``Path("s3://bucket")`` is a path to Python, and writing to it makes a folder ``s3:``.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from helios.errors import ArgumentError

# One letter is a drive of Windows. A Path keeps one slash of two.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def as_local_path(name: str, value: str | Path) -> Path:
    """Return a path of the file system; ``file:///...`` is taken as one.

    Args:
        name: what the path was given as, for the message.
        value: the path.

    Raises:
        ArgumentError: for any other URL.

    Example:
        >>> as_local_path("folder", "file:///data/my%20runs").as_posix()
        '/data/my runs'
    """
    text = value.as_posix() if isinstance(value, Path) else value
    if not _URL.match(text):
        return Path(value)
    url = urlsplit(text)
    if url.scheme == "file" and url.netloc in ("", "localhost"):
        return Path(url2pathname(url.path))
    raise ArgumentError(
        f"{name} must be a path of the file system, got the URL {text!r}. Mount it, or use a local "
        "folder and copy its files there and back between starts."
    )
