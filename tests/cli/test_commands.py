"""The commands: what they print, their exit codes, and what no file can make them do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint.store import RunFolder
from helios.cli import main
from tests.checkpoint import hostile
from tests.checkpoint.helpers import make_payload, make_sidecar, save, save_payload
from tests.cli import helps

COMMANDS = {
    "ls": lambda path: ["ls", str(path.parent)],
    "inspect": lambda path: ["inspect", str(path)],
    "verify": lambda path: ["verify", str(path)],
    "export to pt": lambda path: ["export", str(path), "--to", "pt"],
    "export to safetensors": lambda path: ["export", str(path), "--to", "safetensors"],
    "export to huggingface": lambda path: ["export", str(path), "--to", "huggingface"],
}


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str | Path) -> None:
        try:
            self.code = main([str(word) for word in words])
        except SystemExit as leaving:
            self.code = leaving.code
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = RunFolder(tmp_path / "root" / "run")
    for iteration in (1, 2, 3):
        save(run, 1, iteration)
    return tmp_path / "root"


def newest(root: Path) -> Path:
    return root / "run" / "run_epoch_1_iter_3.pth"


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.shows("S29")
@pytest.mark.parametrize("name", helps.help_texts())
def test_the_help_is_that_of_the_golden_file(name: str) -> None:
    text = helps.help_texts()[name]
    assert text == (helps.FOLDER / name).read_text("utf-8"), "Meant so? scripts/make_golden.py."
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.shows("S27")
def test_ls_lists_and_marks_where_a_start_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(newest(root))
    ran = Ran(capsys, "ls", root)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == str(root / "run")
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[2:5]]
    assert rows[1][:3] == ["*", "run_epoch_1_iter_2.pth", "2"]
    assert rows[1][4:6] == ["not verified", "loss=0.3333"]
    assert rows[2][0] == "run_epoch_1_iter_3.pth"
    assert rows[2][3] == "damaged"
    assert "run_epoch_1_iter_3.pth is not a complete archive" in lines[5]


@pytest.mark.shows("S27")
def test_verify_says_good_or_why_not_and_its_code_too(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "verify", root)
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["good"] * 3
    newest(root).with_suffix(".json").unlink()
    ran = Ran(capsys, "verify", newest(root))
    assert ran.code == 0
    assert "no digest to compare" in ran.out
    damage(newest(root))
    ran = Ran(capsys, "verify", root)
    assert ran.code == 1
    assert ran.out.splitlines()[2].startswith(
        f"damaged     {newest(root)} is not a complete archive"
    )
    ran = Ran(capsys, "verify", root, "--json")
    assert ran.code == 1
    assert ran.json["is_good"] is False
    assert [part["state"] for part in ran.json["files"]] == ["good", "good", "damaged"]


@pytest.mark.shows("S27")
def test_inspect_shows_sidecar_counters_and_tensors(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "inspect", newest(root))
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^run_name +run$", ran.out, re.MULTILINE)
    assert re.search(r"^training_state +global_epoch 1, global_iteration 3$", ran.out, re.M)
    assert re.search(r"^model\.weight +float32 +\[50\] +200 bytes$", ran.out, re.MULTILINE)
    assert ran.out.splitlines()[-1] == "2 tensors, 216 bytes"


@pytest.mark.shows("S27", "P100")
@pytest.mark.parametrize("name", hostile.CASES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_kind_of_file_ends_in_a_code_and_a_message_with_its_name(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, make = hostile.CASES[name]
    path = tmp_path / "run" / hostile.NAME
    make(path)
    before = set(path.parent.iterdir())
    ran = Ran(capsys, *COMMANDS[command](path))
    assert hostile.NAME.removesuffix(".pth") in ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err
    if command == "verify" or command.startswith("export"):
        assert ran.code == (state != "good")
    if command == "verify":
        assert state in ran.out
    if command.startswith("export"):
        assert bool(ran.err) == (state != "good")
        assert len(set(path.parent.iterdir()) - before) == (state == "good")


def test_export_does_not_write_over_a_file_without_force(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = root / "weights"
    target.write_text("mine")
    words = ("export", newest(root), "--to", "pt", "--out", target)
    ran = Ran(capsys, *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"helios export: {target} exists already.")
    assert target.read_text() == "mine"
    assert Ran(capsys, *words, "--force").code == 0
    assert list(torch.load(target, weights_only=True)) == ["weight"]


WRONG = {
    "no command": [],
    "an unknown command": ["list"],
    "ls of nothing": ["ls", "ROOT/none"],
    "inspect a folder": ["inspect", "ROOT"],
    "verify nothing": ["verify", "ROOT/none"],
    "verify an empty folder": ["verify", "EMPTY"],
    "export to nothing": ["export", "FILE"],
    "export to another format": ["export", "FILE", "--to", "onnx"],
    "export no network": ["export", "FILE", "--to", "pt", "--network", "none"],
    "export no average": ["export", "FILE", "--to", "pt", "--average", "none"],
    "export over a checkpoint": ["export", "FILE", "--to", "pt", "--force", "--out", "FILE"],
}


@pytest.mark.shows("S29")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_told_on_stderr_with_code_2(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "FILE": newest(root),
        "ROOT": root,
        "EMPTY": tmp_path / "empty",
    }
    words = [re.sub("^[A-Z]+", lambda m: str(places[m.group()]), word) for word in WRONG[name]]
    before = newest(root).read_bytes()
    ran = Ran(capsys, *words)
    assert (ran.code, ran.out) == (2, "")
    assert re.search(r"^helios( \w+)?: ", ran.err, re.MULTILINE)
    assert newest(root).read_bytes() == before


def test_no_name_in_a_file_reaches_the_terminal_unescaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\ngood"
    payload = make_payload(1, 1, **{evil: torch.zeros(1), "text": evil})
    payload["cursor"][evil] = evil
    sidecar = make_sidecar(1, 1, run_name=evil, metrics={evil: 1.0})
    path = save_payload(RunFolder(tmp_path), payload, stem="run_epoch_1_iter_1", sidecar=sidecar)
    for words in (["ls", tmp_path], ["inspect", path], ["verify", path]):
        ran = Ran(capsys, *words)
        assert ran.code == 0
        assert "\x1b" not in ran.out
        assert "\ngood\n" not in ran.out


@pytest.mark.shows("S29")
def test_the_module_is_the_command(root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "helios", "verify", str(root), "--json"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert json.loads(ran.stdout)["is_good"] is True
    assert ran.stderr == b""
