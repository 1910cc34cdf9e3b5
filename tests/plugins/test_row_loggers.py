"""Loggers of rows: what stands in the file, and a killed run's file is the undisturbed one's."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from helios.plugins.plugin import Plugin
from helios.plugins.row_loggers import CSVLogger, JSONLLogger
from tests.support.kills import KillAt, train_in_child
from tests.support.quiet import Quiet
from tests.support.runs import Outcome, Setting, train

NAMES = ("log.csv", "log.jsonl")


def _setting(**changed: Any) -> Setting:
    return Setting(**{"print_frequency": 1, "total_steps": 14, **changed})


class Talker(Quiet):
    """Logs wherever a training has something to say."""

    def on_fit_start(self) -> None:
        if self.context.state.global_iteration == 0:
            self.context.log({"early": 0.5})

    def on_validation_batch_end(self, step: int) -> None:
        self.context.log({"inside": 0.1 * step})

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.context.log({f"epoch {current_epoch}": 1 / 3, "nan": math.nan})


def _loggers(folder: Path) -> list[Plugin]:
    return [CSVLogger(folder / "log.csv"), JSONLLogger(folder / "log.jsonl"), Talker()]


def _run(folder: Path, setting: Setting | None = None, *more: Plugin) -> Outcome:
    return train(folder, setting or _setting(), *_loggers(folder), *more)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def _objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_csv_has_a_row_for_each_number_and_jsonl_an_object_for_each_call(tmp_path: Path) -> None:
    _run(tmp_path)
    rows = _rows(tmp_path / "log.csv")
    assert list(rows[0]) == ["epoch", "iteration", "name", "value"]
    losses = [row for row in rows if row["name"] == "train/loss"]
    assert [int(row["iteration"]) for row in losses] == [*range(1, 15)]
    assert [int(row["epoch"]) for row in losses] == [1] * 6 + [2] * 6 + [3] * 2
    scores = [row for row in rows if row["name"] == "valid/score"]
    assert [int(row["iteration"]) for row in scores] == [3, 6, 9, 12]
    assert (tmp_path / "log.csv").read_text().count("epoch,iteration,name,value") == 1
    found = _objects(tmp_path / "log.jsonl")
    assert found[0] == {"epoch": 0, "iteration": 0, "early": 0.5}
    assert {"epoch": 1, "iteration": 6, "epoch 1": 1 / 3, "nan": "NaN"} in found
    spread = [
        (str(line["epoch"]), str(line["iteration"]), name, repr(float(value)))
        for line in found
        for name, value in line.items()
        if name not in ("epoch", "iteration")
    ]
    assert spread == [tuple(row.values()) for row in rows]


class Odd(Quiet):
    """Logs numbers and names that are hard to write."""

    numbers = (
        0.1,
        1 / 3,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        1e22,
        math.nan,
        math.inf,
        -math.inf,
    )
    names = ("plain", "a,b", 'a"b', "a\nb", "a\rb", "é", "", "a b", "x")

    def on_fit_start(self) -> None:
        self.context.log(dict(zip(self.names, self.numbers, strict=True)) | {"epoch": 7.0})


def test_values_and_names_read_back_exactly(tmp_path: Path) -> None:
    """Also those that JSON does not know, and what is logged before the file is open."""
    train(tmp_path, _setting(total_steps=1), Odd(), *_loggers(tmp_path))
    rows = [row for row in _rows(tmp_path / "log.csv") if row["name"] != "epoch"]
    line = _objects(tmp_path / "log.jsonl")[0]
    assert (line.pop("epoch"), line.pop("iteration")) == (0, 0), "a number of that name is left out"
    for found in ({row["name"]: row["value"] for row in rows[: len(Odd.names)]}, line):
        assert tuple(found) == Odd.names
        assert [*map(repr, map(float, found.values()))] == [*map(repr, Odd.numbers)]


def test_real_kills_leave_the_undisturbed_files(tmp_path: Path) -> None:
    setting = _setting(chkpt_frequency=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(whole, setting)
    places = [
        ("on_training_batch_end", 1),
        ("on_training_batch_end", 3),
        ("on_validation_end", 6),
        ("on_training_epoch_end", 6),
        ("on_save_checkpoint", 8),
        ("on_training_batch_end", 13),
        ("on_training_end", 14),
    ]
    for event, iteration in places:
        plugins = [*_loggers(killed), KillAt(event, iteration)]
        assert train_in_child(killed, setting, *plugins) == -9
    assert train_in_child(killed, setting, *_loggers(killed)) == 0
    for name in NAMES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
