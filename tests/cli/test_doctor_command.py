"""The command ``helios doctor``."""

from __future__ import annotations

import json
import platform
import sys

import numpy as np
import pytest
import torch

import helios
from helios.cli import main


@pytest.mark.shows("P74")
def test_the_doctor_shows_versions_devices_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "spread")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    versions = found["versions"]
    assert versions["helios"] == helios.__version__
    assert versions["python_build"].endswith(platform.python_version())
    assert (versions["torch"], versions["numpy"]) == (torch.__version__, np.__version__)
    assert len(found["gpu"].get("devices", ())) == torch.cuda.device_count()
    assert found["switches"]["threads"] == torch.get_num_threads()
    assert found["environment"]["OMP_PROC_BIND"] == "spread"
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert f"threads={torch.get_num_threads()}" in shown
    assert "OMP_PROC_BIND=spread" in shown


@pytest.mark.shows("P74")
def test_without_pytorch_the_doctor_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 2
    assert "no module torch" in capsys.readouterr().err
