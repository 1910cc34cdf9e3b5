"""A run that branches off another one, goes back, and writes logs, rows and event files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import helios
from helios.plugins import CSVLogger, JSONLLogger
from tests.golden.today.exact import Exact, ExactModel, Numbers, Record, Recorder

NAME = "history"
TOTAL = 10
SAVED = (6, 8)
KEPT = ("ledger.jsonl", "rows.csv", "rows.jsonl")
BRANCH, LEFT = 3, 6


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net")


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(26), params)


def start(root: Path, record: Record, total_steps: int, **options: Any) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=total_steps,
        chkpt_frequency=1,
        chkpt_root=root,
        print_frequency=1,
        random_seed=17,
        print_banner=False,
        use_cpu=True,
        **options,
    )
    trainer.fit(Learner(record, "history"), Data())


def train(root: Path) -> dict[str, list[str]]:
    """Train what is not yet there: the other run, the branch, the branch after going back."""
    record = Record()
    files = {
        "enable_file_logging": True,
        "enable_tensorboard": True,
        "log_path": root / "logs",
        "run_path": root / "runs",
    }
    newest = helios.find_last_checkpoint(root / "history")
    number = 0
    if newest is not None:
        number = helios.load_checkpoint(newest)["training_state"].global_iteration
    if number == 0:
        start(root / "other", Record(), BRANCH)
        other = helios.find_last_checkpoint(root / "other" / "history")
        options = {"resume": other, **files}
        start(root, record, LEFT, plugins=[*_loggers(root), Recorder(record)], **options)
    elif number < LEFT:
        start(root, record, LEFT, plugins=[*_loggers(root), Recorder(record)], **files)
    record.end.clear()
    skips: dict[str, Any] = {"skip_batches": (LEFT,), "allow_changes": ("skip_batches",)}
    if number < LEFT:
        (skips["resume"],) = (root / "history").glob(f"*_iter_{LEFT - 1}.pth")
    start(root, record, TOTAL, plugins=[*_loggers(root), Recorder(record)], **skips, **files)
    for name in ("rows.csv", "rows.jsonl"):
        text = (root / "history" / name).read_text("utf-8")
        record.end += [f"{name} {line}" for line in text.splitlines()]
    return record.result()


def _loggers(root: Path) -> list[helios.Plugin]:
    folder = root / "history"
    return [CSVLogger(folder / "rows.csv"), JSONLLogger(folder / "rows.jsonl")]


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
