"""The checkpoint of each schema that every later version must load: how it was made.

The model and its data stay as they are: a file that was written once is resumed with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import helios
from helios.checkpoint import file_names, loading
from helios.state import TrainingState
from tests.support import old_files, runs

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"
DIGEST_SUFFIX = ".digest"


class Model(helios.Model):
    """An optimizer, a scheduler, BatchNorm, and plain values that training changes."""

    def __init__(self) -> None:
        super().__init__("golden")
        self.ids: dict[int, list[int]] = {}

    unsaved = ("ids",)

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.seen: dict[str, Any] = {"count": 0, "last": (), "set": set()}

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        ids, features, wanted = batch
        self.ids[state.global_iteration] = ids.tolist()
        self.seen["count"] += 1
        self.seen["last"] = tuple(ids.tolist()[:2])
        self.seen["set"].add(state.global_iteration)
        loss = (self.net(features)[:, 0] - wanted).square().mean()
        self._loss_items["loss"] = loss.detach()
        return loss


def train(root: Path, total: int) -> Model:
    """Train, or go on, in a folder; in mid-epoch after eight steps."""
    model = Model()
    old_files.make_trainer(root, "iteration", total, run_name="golden").fit(model, old_files.Data())
    return model


def describe(payload: dict[str, Any]) -> str:
    """Return digests of what a resume takes from a checkpoint, by key."""
    state = {key: v for key, v in payload["training_state"].items() if key != "average_iter_time"}
    parts = {**payload, "training_state": state}
    names = ("training_state", "cursor", "model", "tables", "rng", "options")
    lines = [f"{name} {runs.digest(parts[name])}" for name in names]
    return "\n".join([*lines, " ".join(sorted(payload))]) + "\n"


def make(scratch: Path) -> dict[Path, bytes]:
    """Make the files of the present schema; one that is there is kept as it is."""
    target = FOLDER / f"schema_{file_names.SCHEMA}"
    if target.exists():
        return {path: path.read_bytes() for path in sorted(target.iterdir())}
    train(scratch, 8)
    newest = helios.find_last_checkpoint(scratch / "golden")
    assert newest is not None
    digest = describe(loading.load(newest).payload).encode()
    made = [newest, file_names.sidecar_path(newest)]
    return {target / path.name: path.read_bytes() for path in made} | {
        target / newest.with_suffix(DIGEST_SUFFIX).name: digest
    }
