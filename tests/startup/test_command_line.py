"""The command line is compared by words, and only what no other line explains is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from helios.core.stored_values import ABSENT, ValueChange
from helios.startup.run_log import KEY, as_change, parse_words, report_arguments
from tests.integration.test_declared_params import fit


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (["--lr", "3e-3", "-v", "--name=a"], {"--lr": "3e-3", "-v": "", "--name": "a"}),
        (["--sizes", "1", "-2", "3"], {"--sizes": "1 -2 3"}),
        (["train", "lr=1", "net.width=3"], {"argument 1": "train", "lr": "1", "net.width": "3"}),
        (["--set", "a=1", "--set", "b=2", "x=1", "x=2"], {"--set": "a=1 b=2 x=1 x=2"}),
        (["x=1", "x=2"], {"x": "1 2"}),
        ([], {}),
    ],
)
def test_words_are_read_as_options(words: list[str], table: dict[str, str]) -> None:
    assert parse_words(words) == table


@pytest.mark.parametrize(
    ("before", "after", "told", "text"),
    [
        ("--lr 3e-3", "--lr 1e-3", [], "--lr 3e-3 -> 1e-3"),
        ("--lr 3e-3", "--lr=1e-3", [], "--lr 3e-3 -> 1e-3"),
        ("--lr 3e-3", "--lr=3e-3", [], ""),
        ("", "--fast", [], "--fast not set -> ''"),
        ("a --n 1", "b", [], "argument 1 a -> b, --n 1 -> not set"),
        ("--lr 3e-3", "--lr 1e-3", [ValueChange("params.lr", 0.003, 0.001)], ""),
        ("--rate 3e-3", "--rate 1e-3", [ValueChange("optimizer.lr", 0.003, 0.001)], ""),
        ("--rate 3e-3", "--rate 1e-3", [ValueChange("optimizer.lr", 0.3, 0.001)], "--rate"),
        ("--batch-size 4", "--batch-size 8", [as_change("batch_size: 4 -> 8")], ""),
        ("--epochs 2", "--epochs 4", [as_change("total_steps: 2 -> 4")], ""),
        ("--epochs 2 --w 1", "--epochs 4 --w 2", [as_change("total_steps: 2 -> 4")], "--w 1 -> 2"),
        ("", "--epochs 4", [as_change("total_steps: 2 -> 4")], ""),
        ("--epochs 2", "", [as_change("total_steps: 2 -> 4")], ""),
        ("", "--w 3", [as_change("total_steps: 2 -> 4")], "--w not set -> 3"),
        ("", "--new 3", [ValueChange("params.new", ABSENT, 3)], ""),
        ("--token abc", "--token abd", [], ""),
    ],
)
def test_words_that_nothing_explains_are_said_at_info(
    before: str,
    after: str,
    told: list[ValueChange],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *before.split()])
    from helios.startup.run_log import read_arguments

    stored: dict[str, Any] = {KEY: read_arguments()}
    monkeypatch.setattr(sys, "argv", ["train.py", *after.split()])
    with caplog.at_level("INFO", "helios"):
        report_arguments(stored, told)
        report_arguments({}, told)
    assert [record.levelname for record in caplog.records] == ["INFO"] * bool(text)
    assert text in caplog.text


def test_a_changed_word_is_one_line_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for total, workers in ((1, "2"), (2, "4"), (3, "4")):
        monkeypatch.setattr(sys, "argv", ["train.py", "--workers", workers])
        fit(tmp_path, total)
    lines = [line for line in capsys.readouterr().err.splitlines() if "workers" in line]
    assert [line.partition(" - ")[2] for line in lines] == [
        "INFO - The command line has changed since the checkpoint: --workers 2 -> 4."
    ]
