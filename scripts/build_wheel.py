"""Build the wheel from the files that git tracks, so that equal sources give equal bytes.

Times are those of the newest commit, and permissions do not depend on the checkout. The tools that
build it are those of the environment, which constraints.txt pins.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("helios", "chkpt_migrator.py", "pyproject.toml", "README.md", "LICENSE")


def copy_sources(target: Path) -> None:
    """Copy what the wheel is made of into a folder."""
    for name in _git("ls-files", "-z", "--", *SOURCES).split("\0"):
        if name:
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            copy.chmod(0o644)


def build(folder: Path) -> Path:
    """Build the wheel into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ}
    environment.setdefault("SOURCE_DATE_EPOCH", _git("log", "-1", "--format=%ct").strip())
    with tempfile.TemporaryDirectory() as scratch:
        sources, wheels = Path(scratch) / "sources", Path(scratch) / "wheels"
        copy_sources(sources)
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
        command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(wheels)]
        subprocess.run([*command, str(sources)], check=True, env=environment, umask=0o022)
        [wheel] = wheels.iterdir()
        return Path(shutil.copy(wheel, folder))


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    """Build the wheel, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
