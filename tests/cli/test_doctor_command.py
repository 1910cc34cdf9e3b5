"""The command ``helios doctor``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helios.cli import main
from helios.ledger.environment import describe_switches
from helios.reports import doctor
from helios.reports.doctor import Diagnosis, Severity


@pytest.mark.shows("P74")
def test_the_facts_are_those_of_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"] == (code == 0)
    manifest = {"versions", "libraries", "imported", "system", "gpu", "environment"}
    assert {*manifest, "switches", "blas", "shared_memory", "folder"} < found.keys()
    assert found["switches"] == json.loads(json.dumps(describe_switches()))
    assert all(each["remedy"] for each in found["findings"])


@pytest.mark.shows("P74")
@pytest.mark.parametrize("severity", Severity)
def test_the_exit_code_is_that_of_the_worst_finding(
    severity: Severity,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = Diagnosis("gpu", Severity.NOTE, "It is old.", "Buy a new one.")
    facts = doctor.examine_machine(tmp_path).facts
    findings = [Diagnosis("gpu", severity, "It is hot.", "Cool it."), note]
    monkeypatch.setattr(doctor, "examine_machine", lambda path: doctor.Examination(facts, findings))
    assert main(["doctor", str(tmp_path)]) == severity.exit_code
    shown = capsys.readouterr().out.splitlines()
    last = "no problems found" if severity is Severity.NOTE else "1 wrong"
    assert shown[-5:] == [
        *(f"{severity.value}: It is hot.", "  Cool it."),
        *("note: It is old.", "  Buy a new one.", last),
    ]


@pytest.mark.shows("P74")
def test_without_pytorch_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["severity"] == "unusable"
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out.startswith("unusable: PyTorch or NumPy cannot be imported")


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err
