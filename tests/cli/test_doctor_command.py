"""The command ``helios doctor``."""

from __future__ import annotations

import json
import platform

import numpy as np
import pytest
import torch

import helios
from helios.cli import main


@pytest.mark.shows("P74")
def test_the_doctor_shows_versions_devices_and_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["helios"], found["python"]) == (helios.__version__, platform.python_version())
    assert (found["torch"], found["numpy"]) == (torch.__version__, np.__version__)
    assert found["threads"] == str(torch.get_num_threads())
    assert {"device", "deterministic_algorithms", "matmul_precision"} <= found.keys()
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(value in shown for value in found.values())
