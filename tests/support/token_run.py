"""A small transformer on any device, and all that it leaves, for comparisons on bytes.

Tokens follow from the index of their sample, are dropped at random while they are fetched, and the
batch holds the index, too: the losses of a wrong order differ.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.ledger.book import FILE_NAME
from helios.plugins import Plugin
from helios.plugins.averaging import EMA
from helios.state import TrainingState
from tests.support.runs import digest_checkpoint

NAME = "tokens"
WORDS, LENGTH, WIDTH, BATCH = 64, 12, 32, 8
EXACT_GPU: dict[str, Any] = {"gpus": [0], "enable_deterministic": True}
# What says where and when a checkpoint was written, and not what the run is.
_STAMPS = ("options", "machine", "resumed_from", "ledger", "events", "log_path", "run_path")


@dataclasses.dataclass(frozen=True)
class TokenRun:
    options: dict[str, Any]
    num_workers: int = 0
    kills_worker: bool = False
    averages: bool = False
    backend: str | None = None
    num_epochs: int = 3
    num_samples: int = 60

    @property
    def last(self) -> int:
        replicas = self.options.get("num_replicas", 1)
        return self.num_epochs * -(-self.num_samples // (BATCH * replicas))


class Tokens(Dataset[Any]):
    """Texts that follow from their index.

    Args:
        mark: whoever fetches a certain sample dies, unless this file exists; it makes it first.
    """

    def __init__(self, length: int, mark: Path | None = None) -> None:
        self.length, self.mark = length, mark

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if self.mark is not None and index == self.length // 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        words = torch.arange(LENGTH + 1) * (index + 3) % (WORDS - 1) + 1
        return index, words.where(torch.rand(LENGTH + 1) > 0.1 * random.random(), 0)


class TokenData(helios.DataModule):
    def __init__(self, run: TokenRun, folder: Path) -> None:
        super().__init__()
        self.run, self.folder = run, folder

    unsaved = ("run", "folder")

    def setup(self) -> None:
        mark = self.folder / "a worker has died" if self.run.kills_worker else None
        params = helios.DataLoaderParams(
            batch_size=BATCH, shuffle=True, num_workers=self.run.num_workers
        )
        self._train_dataset = self._create_dataset(Tokens(self.run.num_samples, mark), params)
        params = helios.DataLoaderParams(batch_size=BATCH)
        self._valid_dataset = self._create_dataset(Tokens(20), params)


class Decoder(nn.Module):
    """Embeddings, two layers with causal attention and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=words.device)
        features = self.embedding(words) + self.positions
        return self.head(self.layers(features, mask=mask, is_causal=True))


class TokenModel(helios.Model):
    """Predicts the next word; samples weigh more the higher their index is."""

    unsaved = ("run",)

    def __init__(self, run: TokenRun) -> None:
        super().__init__(NAME)
        self.run = run

    def setup(self, fast_init: bool = False) -> None:
        network = Decoder().to(self.device)
        backend = self.run.backend
        self.network: Any = torch.compile(network, backend=backend) if backend else network
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    def _loss(self, batch: Any) -> torch.Tensor:
        index, words = batch
        scores = self.network(words[:, :-1]).float()
        weights = 1 + index.unsqueeze(1) / self.run.num_samples
        losses = nn.functional.cross_entropy(
            scores.flatten(0, 1), words[:, 1:].flatten(), reduction="none"
        )
        return (losses.view_as(words[:, 1:]) * weights).mean()

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return self._loss(batch)

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return {"loss": (self._loss(batch) * len(batch[0]), len(batch[0]))}


def train_tokens(folder: Path, run: TokenRun, plugins: Iterable[Plugin] = ()) -> None:
    """Train in the folder, from what lies there."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "total_steps": run.num_epochs,
        "valid_frequency": 1,
        "chkpt_frequency": 1,
        "chkpt_root": folder,
        "print_banner": False,
        "clip_norm": 1.0,
        "plugins": [*plugins, *([EMA(0.9)] if run.averages else [])],
        **run.options,
    }
    helios.Trainer(**options).fit(TokenModel(run), TokenData(run, folder))


def start_tokens(folder: Path, run: TokenRun, *plugins: Plugin) -> int:
    return start(train_tokens, folder, run, plugins)


def start(train: Callable[..., Any], *given: Any) -> int:
    """Train in a process of its own; returns its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=train, args=given)
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the training did not end within 300 s"
    return process.exitcode


def read_tokens(folder: Path) -> dict[str, Any]:
    """Return digests of all parts of the newest checkpoint, and the lines of the ledger."""
    newest = helios.find_last_checkpoint(folder / NAME)
    assert newest is not None
    payload = helios.load_checkpoint(newest)
    names = payload.keys() - {*_STAMPS, "training_state", "model"}
    return {
        "name": newest.name,
        **digest_checkpoint(payload, *names),
        "ledger": newest.with_name(FILE_NAME).read_text().splitlines(),
    }
