"""A model whose validations have given scores, its data, and where its checkpoints lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helios import Trainer
from helios.plugins import Plugin
from tests.typed.user_script import Line, Numbers

STEPS = 4
"""Iterations of an epoch."""


class Graded(Line):
    """A model whose validations have given scores."""

    unsaved = ("grades",)

    def __init__(self, grades: Sequence[float] = (3.0, 1.0, 1.0, 2.0)) -> None:
        super().__init__("line")
        self.grades = grades

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        if validation_cycle < len(self.grades):
            self._val_scores["quality"] = self.grades[validation_cycle]

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, int]]:
        return self.valid_step(batch, step)

    def predict_step(self, batch: Any, step: int) -> Any:
        return self.net(batch[0])


class Samples(Numbers):
    """Its data, which is validated, tested and predicted, too."""

    def setup(self) -> None:
        super().setup()
        self._test_dataset = self._predict_dataset = self._valid_dataset


def make(root: Path | None, *plugins: Plugin, **options: Any) -> Trainer:
    return Trainer(
        chkpt_root=root, use_cpu=True, print_banner=False, plugins=list(plugins), **options
    )


def fit(root: Path | None, *plugins: Plugin, model: Line | None = None, **options: Any) -> Trainer:
    """Train for epochs, each with a validation; return the trainer."""
    frequency = None if root is None else 1
    options = {"total_steps": 4, "valid_frequency": 1, "chkpt_frequency": frequency, **options}
    trainer = make(root, *plugins, **options)
    assert trainer.fit(model or Graded(), Samples())
    return trainer


def file_of(root: Path, epoch: int) -> Path:
    return root / "line" / f"line_epoch_{epoch}_iter_{STEPS * epoch}.pth"


def epochs_of(root: Path) -> list[int]:
    iterations = [path.stem.rpartition("_")[2] for path in (root / "line").glob("*.pth")]
    return sorted(int(text) // STEPS for text in iterations)
