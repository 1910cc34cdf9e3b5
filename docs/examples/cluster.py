"""Handwritten digits, as a cluster starts them: srun python train_cluster.py --seed 0.

Run it again after an interruption, on any number of tasks up to the number of replicas.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import helios

REPLICAS = 4


class Digits(helios.DataModule):
    """The first 1,280 images to train on; the others score the result."""

    def setup(self) -> None:
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        samples = TensorDataset(images.float() / 16, labels)
        split = [1280, len(samples) - 1280]
        train, valid = torch.utils.data.random_split(
            samples, split, torch.Generator().manual_seed(0)
        )
        self.train_dataset = self.create_dataset(train, batch_size=32 // REPLICAS, shuffle=True)
        self.valid_dataset = self.create_dataset(valid, batch_size=64)


class Classifier(helios.Model):
    """Dropout and BatchNorm: what a restart must bring back besides the weights."""

    def setup(self) -> None:
        first = [nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2)]
        self.network = nn.Sequential(*first, nn.Linear(48, 10)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.003)

    def train_step(self, batch: Any) -> Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        is_right = self.network(batch[0]).argmax(1) == batch[1]
        return {"accuracy": (is_right.sum(), len(is_right))}


class Pause(helios.Plugin):
    """Makes the steps of the first start as long as those of a larger model."""

    unsaved = ("seconds",)

    def __init__(self) -> None:
        super().__init__("pause")

    def setup(self) -> None:
        self.seconds = float(os.environ.get("PAUSE", "0"))

    def on_training_resume(self, state: helios.TrainingState) -> None:
        self.seconds = 0.0

    def on_training_step_end(self, state: helios.TrainingState, committed: bool) -> None:
        time.sleep(self.seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="on a disk all nodes share")
    return parser.parse_args()


def main() -> None:
    options = parse()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=options.steps,
        valid_frequency=100,
        chkpt_frequency=50,
        chkpt_root=options.runs,
        random_seed=options.seed,
        num_replicas=REPLICAS,
        signals=helios.Signals(grace=120),
        use_cpu=not torch.cuda.is_available(),
        enable_deterministic=True,
        plugins=[Pause()],
    )
    trainer.fit(Classifier(f"run-{options.seed}"), Digits())


if __name__ == "__main__":
    main()
