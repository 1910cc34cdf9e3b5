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
        options: dict[str, Any] = {
            "ledger": "steps",
            "enable_tensorboard": True,
            "run_path": folder / name / "tb",
        }
        params = {"rate": lr, "net": {"width": 8}}
        fit(folder / name, 1, Model(sgd(lr=lr), lr / 2), params=params, **options)
        changed = params | {"net": {"width": 9}}
        fit(
            folder / name,
            2,
            Model(sgd(lr=lr), lr / 2),
            params=changed,
            allow_changes=("params.net",),
            **options,
        )
    return folder


def _print(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    main([str(word) for word in words])
    return " ".join(capsys.readouterr().out.split())


def test_ls_shows_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _print(capsys, "ls", runs / "a")
    assert "params rate 0.1, net.width 9" in text
    (folder,) = json.loads(_print(capsys, "ls", "--json", runs / "a"))["folders"]
    assert folder["params"] == {"rate": 0.1, "net.width": 9}


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_inspect_shows_them(
    has_sidecar: bool, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (runs / "a" / "line").glob("*_iter_2.pth")
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())
    if has_sidecar:
        copied.with_suffix(".json").write_bytes(path.with_suffix(".json").read_bytes())
    text = _print(capsys, "inspect", copied)
    assert "'rate': 0.1" in text
    assert "'net.width': 9" in text


def test_compare_shows_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (head, *_) = _print(capsys, "compare", runs / "a" / "line", runs / "b" / "line").split(" a")
    assert {"rate"} <= {*head.split()}
    assert "width" not in head
