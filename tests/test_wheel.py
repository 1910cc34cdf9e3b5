"""The wheel: the same bytes twice, and all that is needed in an environment with nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import build_wheel
from tests.codebase import ROOT, source_files

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the sources are those of git"),
    pytest.mark.skipif(sys.platform == "win32", reason="scripts are in Scripts there"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder beside an environment that holds the wheel and the libraries it needs."""
    folder = tmp_path_factory.mktemp("clean")
    python = folder / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    # The libraries of this environment, without the checkout that it was installed from: files
    # that add paths count in folders of the environment itself only.
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    options = ("--quiet", "--no-deps", "--no-index")
    install = [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel]
    subprocess.run(install, check=True)
    return folder


def run(clean: Path, *command: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [clean / "env" / "bin" / command[0], *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=clean,
        env=variables | {"COLUMNS": "80", "NO_COLOR": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_same_sources_give_the_same_bytes(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    before = os.umask(0o077)
    try:
        second = build_wheel.build(tmp_path)
    finally:
        os.umask(before)
    assert second.name == wheel.name
    assert second.read_bytes() == wheel.read_bytes()


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {f"helios/{path}" for path in source_files()}
    pages = {"helios/py.typed", "helios/reports/run_report.html"}
    assert names == {*modules, *pages, "chkpt_migrator.py"}


def test_the_command_and_all_packages_are_there(clean: Path) -> None:
    golden = (ROOT / "tests" / "golden" / "help" / "helios.txt").read_text("utf-8")
    assert run(clean, "helios", "--help") == golden
    packages = {f"helios.{path.rpartition('/')[0]}" for path in source_files() if "/" in path}
    names = ", ".join(sorted(name.replace("/", ".") for name in packages))
    code = f"import chkpt_migrator, {names}; from helios import *; print(helios.__file__)"
    assert Path(run(clean, "python", "-c", code).strip()).is_relative_to(clean / "env")


def test_the_example_of_the_readme_runs(clean: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    (clean / "train.py").write_text(example.group(1), "utf-8")
    run(clean, "python", "train.py")
    found = run(clean, "helios", "ls", "runs")
    assert "sine_epoch_20_iter_320.pth" in found
    assert found.count("not verified") >= 3, "those that the example keeps"
