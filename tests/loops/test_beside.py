"""Numbers that a step returns beside its loss: logged and shown; loss table and ledger stay."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.ledger.book import FILE_NAME
from helios.plugins import CSVLogger
from helios.plugins.plugin import Plugin
from tests.support.quiet import Quiet
from tests.typed.user_script import Line, Numbers


class Returns(Line):
    def __init__(self, *, is_plain: bool = False) -> None:
        super().__init__("line")
        self.is_plain = is_plain

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        loss = super().train_step(batch, state)
        if self.is_plain:
            return loss
        number = state.global_iteration
        return {
            "loss": loss,
            "double": loss * 2,
            "count": number,
            "half": torch.tensor([number / 2]),
            "rows": batch[0],
            "text": "a",
            "flag": True,
        }


class Table(Quiet):
    """Keeps the loss table, and whether anything in the log has a graph."""

    def __init__(self) -> None:
        super().__init__("table")
        self.seen: list[dict[str, float]] = []
        self.logged: list[dict[str, float]] = []

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        items = self.trainer.model.loss_items  # type: ignore[union-attr]
        self.seen.append({name: float(item) for name, item in items.items()})

    def on_log(self, scalars: Any, state: helios.TrainingState) -> None:
        self.logged.append(dict(scalars))


def fit(model: helios.Model, *plugins: Plugin, **options: Any) -> None:
    options = {"total_steps": 6, "train_unit": "iteration", "print_frequency": 2, **options}
    trainer = helios.Trainer(use_cpu=True, print_banner=False, plugins=plugins, **options)
    trainer.fit(model, Numbers())


@pytest.mark.shows("U37")
@pytest.mark.parametrize("options", [{}, {"num_replicas": 2}])
def test_numbers_beside_the_loss_are_logged_and_change_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, table, path = Table(), Table(), tmp_path / "log.csv"
    saves: dict[str, Any] = {"chkpt_frequency": 3, **options}
    fit(Returns(is_plain=True), plain, chkpt_root=tmp_path / "plain", **saves)
    fit(Returns(), table, CSVLogger(path), chkpt_root=tmp_path / "table", **saves)
    assert table.seen == plain.seen
    ledgers = [(tmp_path / name / "line" / FILE_NAME).read_bytes() for name in ("plain", "table")]
    assert ledgers[0] == ledgers[1]
    names = {"train/loss", "train/double", "train/count", "train/half"}
    assert [set(each) for each in table.logged] == [names] * 3
    for number, each in zip((2, 4, 6), table.logged, strict=True):
        assert each["train/double"] == pytest.approx(2 * each["train/loss"], rel=1e-6)
        mean = number - 0.5
        assert (each["train/count"], each["train/half"]) == (mean, mean / 2)
    rows = csv.DictReader(path.read_text().splitlines())
    assert {row["name"] for row in rows} == names
