"""How the package is built and installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_editable(sys.argv[1]))
"""
_FIND = """
import importlib.util
print(importlib.util.find_spec("helios").origin)
"""


@pytest.mark.full
def test_a_clone_called_helios_beside_a_script_is_not_imported_in_its_place(
    tmp_path: Path,
) -> None:
    pytest.importorskip("setuptools")
    clone, site = tmp_path / "helios", tmp_path / "site"
    (clone / "helios").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "chkpt_migrator.py"):
        (clone / name).write_bytes((_ROOT / name).read_bytes())
    (clone / "helios" / "__init__.py").touch()
    (clone / "helios" / "version.py").write_text('__version__ = "3.0.0"\n')
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(tmp_path)],
        cwd=clone,
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    (tmp_path / "script.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n{_FIND}")
    found = subprocess.run(
        [sys.executable, "-S", "script.py"],
        cwd=tmp_path,
        env={"PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(clone / "helios" / "__init__.py")
