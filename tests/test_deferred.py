"""Names that a package imports when they are first used."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import helios
from helios import exports
from tests import codebase

_HEAVY = "print([name for name in ('torch', 'numpy', 'tqdm', 'matplotlib') if name in sys.modules])"


def _run(code: str) -> str:
    """Run code in a new interpreter; returns what it printed."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(codebase.ROOT)},
    )
    return ran.stdout


@pytest.mark.shows("P73")
def test_the_package_shows_the_names_that_its_exports_import() -> None:
    names = {name for name in vars(exports) if not name.startswith("__")}
    assert {*helios.__all__} - {"__version__"} == names
    for name in names:
        assert getattr(helios, name) is getattr(exports, name)


@pytest.mark.shows("P73")
def test_the_first_use_of_a_name_binds_all_of_them() -> None:
    code = f"""
import helios
{_HEAVY}
print("Trainer" in vars(helios), {{*helios.__all__}} <= {{*dir(helios)}})
helios.Model
print({{*helios.__all__}} <= {{*vars(helios)}}, helios.plugins.EMA.__name__)
"""
    assert _run(code).splitlines() == ["[]", "False True", "True EMA"]


@pytest.mark.shows("P73")
def test_commands_that_read_text_import_no_pytorch(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    code = f"""
import contextlib, io
from helios.cli import main
def call(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main([word.replace("D", {str(tmp_path)!r}) for word in words])
for words in (["--help"], ["ls", "D"], ["diff", "D", "D"], ["doctor", "--help"]):
    call(*words)
{_HEAVY}
call("compare", "D", "D")
{_HEAVY}
call("verify", "D")
call("report", "D")
{_HEAVY}
"""
    assert _run(code).splitlines() == ["[]", "[]", "['numpy', 'tqdm', 'matplotlib']"]


@pytest.mark.shows("P73")
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "small_epoch_1_iter_2.pth"],
        ["migrate", "."],
        ["doctor"],
    ],
)
def test_a_command_that_needs_pytorch_says_so_where_there_is_none(
    words: list[str], tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "small_epoch_1_iter_2.pth", "w") as archive:
        archive.writestr("data.pkl", b"")
    code = f"""
import contextlib, io, os, sys
sys.modules["torch"] = None
os.chdir({str(tmp_path)!r})
from helios.cli import main
error = io.StringIO()
with contextlib.redirect_stderr(error):
    code = main({words!r})
print(code, error.getvalue())
"""
    found = _run(code)
    assert found.startswith(f"2 helios {words[0]}: torch is not installed for")
    assert "pytorch.org" in found
