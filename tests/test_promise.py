"""Kill a run anywhere, run the same command on any number of processes, and get the same bits.

It uses public names only, and is itself the script that is killed:
``python tests/test_promise.py FOLDER PROCESSES``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios

STEPS = 12
"""Three epochs of four steps: four replicas, each with a batch of 3 out of 48 samples."""


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their index, with noise."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        values = torch.sin(torch.arange(8) * (index + 1.0))
        return index, values + 0.1 * torch.rand(8) + 0.1 * random.random()


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=3, shuffle=True, num_workers=1)
        self._train_dataset = self._create_dataset(Numbers(), params)


class Net(helios.Model):
    """Appends samples and loss of each replica's step to a file of its process."""

    unsaved = ("folder",)

    def __init__(self, folder: Path) -> None:
        super().__init__("net")
        self.folder = folder

    def setup(self, fast_init: bool = False) -> None:
        self.network = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        indices, values = batch
        loss = nn.functional.cross_entropy(self.network(values), indices % 4)
        with (self.folder / f"steps-{os.getpid()}.txt").open("a") as file:
            print(state.global_iteration, indices.tolist(), loss.item().hex(), file=file)
        return loss

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        # In one piece, whatever other processes print.
        print(f"iteration {state.global_iteration}\n", end="", flush=True)


def train(folder: Path, processes: int) -> None:
    """Train to the end, and write down the weights."""
    model = Net(folder)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=STEPS,
        chkpt_frequency=1,
        chkpt_root=folder,
        num_replicas=4,
        nproc=processes,
        use_cpu=True,
    )
    trainer.fit(model, Data())
    state = model.network.state_dict()
    (folder / "weights").write_bytes(b"".join(each.numpy().tobytes() for each in state.values()))


def start(folder: Path, processes: int, *, kill_at: int | None = None) -> None:
    """Run this file; kill all its processes once it has reached an iteration."""
    folder.mkdir(exist_ok=True)
    script = [sys.executable, __file__, str(folder), str(processes)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        script,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line == f"iteration {kill_at}\n":
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == (0 if kill_at is None else -signal.SIGKILL)


def read_results(folder: Path) -> tuple[bytes, bytes, list[str]]:
    """Return the weights, the ledger, and the samples and losses of each step.

    Steps that were repeated after a kill count once, if they are equal.
    """
    lines = {line for each in folder.glob("steps-*") for line in each.read_text().splitlines()}
    ledger = (folder / "net" / "ledger.jsonl").read_bytes()
    return (folder / "weights").read_bytes(), ledger, sorted(lines)


@pytest.mark.long
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(whole, 1)
    start(killed, 3, kill_at=5)
    start(killed, 2)
    expected = read_results(whole)
    assert len(expected[2]) == STEPS * 4
    assert read_results(killed) == expected


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
