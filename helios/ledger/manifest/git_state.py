"""The state of the git repository that a script is in: commit, branch, and local changes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from helios.ledger.manifest.scrubbing import scrub

_MOST_CHARACTERS = 50_000
_MOST_BYTES = 8 << 20
_SECONDS = 10.0
# No file is locked, and no program runs that a repository configures, except its filters, such as
# that of git-lfs, without which its files would look changed.
_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=")


def describe_git(folder: Path) -> dict[str, Any]:
    """Return the state of the repository that holds a folder; empty without one.

    Returns:
        ``commit``, ``branch`` and ``remote`` where there are any, ``is_dirty``, and for a dirty
        tree the ``patch`` to it, without secrets, its ``patch_hash`` and whether it ``is_cut`` to
        50,000 characters. Files that git does not track are not in the patch.
    """
    status = _run(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return {}
    lines = status.decode("utf-8", "replace").splitlines()
    heads = dict(line[2:].partition(" ")[::2] for line in lines if line.startswith("# "))
    found: dict[str, Any] = {"is_dirty": any(not line.startswith("#") for line in lines)}
    for name, key in (("commit", "branch.oid"), ("branch", "branch.head")):
        if heads.get(key, "(").startswith("("):
            continue
        found[name] = heads[key]
    remote = _run(folder, "config", "--get", "remote.origin.url")
    if remote:
        found["remote"] = scrub(remote.decode("utf-8", "replace").strip())
    if found["is_dirty"] and "commit" in found:
        found |= _describe_patch(folder)
    return found


def find_author(folder: Path) -> list[str]:
    """Return the name and the address with which git would commit in a folder."""
    found = (_run(folder, "config", "--get", key) for key in ("user.name", "user.email"))
    return [text.decode("utf-8", "replace").strip() for text in found if text]


def _describe_patch(folder: Path) -> dict[str, Any]:
    patch = _run(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if patch is None:
        return {}
    text = scrub(patch.decode("utf-8", "replace"))
    return {
        "patch": text[:_MOST_CHARACTERS],
        "patch_hash": hashlib.sha256(patch).hexdigest()[:16],
        "is_cut": len(text) > _MOST_CHARACTERS or len(patch) >= _MOST_BYTES,
    }


def _run(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command, at most 8 MiB; ``None`` if it fails."""
    git = shutil.which("git")
    if git is None:
        return None
    # A loader worker that is forked meanwhile would keep a pipe open, but not a file.
    with tempfile.TemporaryFile() as output:
        try:
            # A repository on a disk that does not answer must not hold up the end of the run. With
            # cwd or close_fds, Python would fork, and wait for a pipe that such a worker has too.
            subprocess.run(
                [git, "-C", str(folder), *_OPTIONS, *arguments],
                close_fds=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        output.seek(0)
        return output.read(_MOST_BYTES)
