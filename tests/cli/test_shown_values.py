"""Declared parameters are shown wherever a run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helios.cli.commands import main
from tests.integration.test_changed_start import Model, fit, sgd


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("a", 0.1), ("b", 0.2)):
        for epochs, width in ((1, 8), (2, 9)):
            params = {"rate": lr, "net": {"width": width}}
            options: dict[str, Any] = {"params": params, "ledger": "steps"}
            if epochs == 2:
                options["allow_changes"] = ("params.net",)
            fit(folder / name, epochs, Model(sgd(lr=lr), lr / 2), **options)
    return folder


def _print(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    main([str(word) for word in words])
    return " ".join(capsys.readouterr().out.split())


def test_they_are_shown_wherever_a_run_is(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "params rate 0.1, net.width 9" in _print(capsys, "ls", runs / "a")
    (folder,) = json.loads(_print(capsys, "ls", "--json", runs / "a"))["folders"]
    assert folder["params"] == {"rate": 0.1, "net.width": 9}
    (path,) = (runs / "a" / "line").glob("*_iter_2.pth")
    alone = tmp_path / path.name
    alone.write_bytes(path.read_bytes())
    for inspected in (path, alone):
        text = _print(capsys, "inspect", inspected)
        assert "'rate': 0.1" in text
        assert "'net.width': 9" in text
    (head, *_) = _print(capsys, "compare", runs / "a" / "line", runs / "b" / "line").split(" a")
    assert {"rate"} <= {*head.split()}
    assert "width" not in head
