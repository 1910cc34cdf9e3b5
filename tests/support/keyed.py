"""Trainings with ``Trainer(init="keyed")``, of networks with many kinds of module."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import helios
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.ranks import run_ranks
from tests.support.sharded import digests_of, train_here

WIDTH, WORDS, LENGTH = 12, 29, 7


class Positions(nn.Module):
    """Adds a vector to each position; all of its buffers come from its initializer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.register_buffer("order", torch.empty(LENGTH, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(LENGTH, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.1)
        self.order.copy_(torch.randperm(LENGTH))
        self.mask.copy_(torch.rand(LENGTH) > 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[self.order] * self.mask[:, None]


class Layer(nn.Module):
    """One of each kind of module that PyTorch initializes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = self.batch_norm(self.conv(hidden.transpose(1, 2))).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return x + self.gru(self.lstm(hidden)[0])[0]


class Zoo(nn.Module):
    """An embedding whose transpose is the head, and layers of all kinds, some of them copies."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.head.weight = self.embedding.weight
        self.positions = Positions()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        template = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)
        self.copies = nn.TransformerEncoder(template, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.positions(self.embedding(words))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.copies(x)).clone()


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.projection(nn.functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Initializes its modules in its constructor, as many do, so that ``init_unit`` is needed."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.start = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.words.weight = self.head.weight
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.start
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


@dataclasses.dataclass(frozen=True)
class Keyed:
    """What a training is made of.

    Attributes:
        units: which of the network's modules ``Model.shard`` returns.
    """

    network: str = "zoo"
    units: str = "layers"
    optimizer: str = "AdamW"
    sharding: str = "full"
    total_steps: int = 3
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class KeyedModel(helios.Model):
    """Writes digests of the initial and of the last bits."""

    unsaved = ("folder", "setting")

    def __init__(self, folder: Path, setting: Keyed) -> None:
        super().__init__("keyed")
        self.folder = folder
        self.setting = setting

    def setup(self, fast_init: bool = False) -> None:
        self.net = Zoo() if self.setting.network == "zoo" else GPT()
        make: Any = getattr(torch.optim, self.setting.optimizer)
        self.optimizer = make(self.net.parameters(), lr=0.01)

    def init_unit(self, module: nn.Module, name: str) -> bool:
        if self.setting.network == "zoo":
            return False
        if isinstance(module, GPT):
            nn.init.zeros_(module.start)
        elif isinstance(module, nn.Linear | nn.Embedding):
            is_last = name.endswith(".projection")
            nn.init.normal_(module.weight, std=0.02 / 2 if is_last else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            return False
        return True

    def shard(self) -> list[nn.Module]:
        if self.setting.units == "none":
            return []
        layers = [part for part in self.net.children() if isinstance(part, nn.ModuleList)]
        found = [member for part in layers for member in part]
        if self.setting.units == "many":
            found += [part for layer in found for part in layer.children() if is_simple(part)]
        return found

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        (words,) = batch
        return nn.functional.cross_entropy(self.net(words).flatten(0, 1), words.flatten())

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        (words,) = batch
        loss = nn.functional.cross_entropy(self.net(words).flatten(0, 1), words.flatten())
        return {"loss": (loss.item() * len(words), len(words))}

    def on_training_start(self) -> None:
        self._write("first")

    def on_training_end(self) -> None:
        self._write("last")

    def _write(self, name: str) -> None:
        text = digests_of(self.net, self.optimizer)
        if self.trainer.global_rank == 0:
            (self.folder / f"{name}.txt").write_text(text)


def is_simple(module: nn.Module) -> bool:
    """Return whether a module may be a unit: what it returns must be no view."""
    return isinstance(module, nn.Conv1d | nn.LayerNorm)


class KeyedData(helios.DataModule):
    def setup(self) -> None:
        words = (torch.arange(48 * LENGTH) * 7 % WORDS).view(48, LENGTH)
        dataset = torch.utils.data.TensorDataset(words)
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(dataset, params)
        params = helios.DataLoaderParams(batch_size=2)
        self._valid_dataset = self._create_dataset(dataset, params)


def fit_keyed(rank: int, folder: Path, setting: Keyed, *plugins: Plugin) -> None:
    """Train as a rank."""
    options = {"total_steps": setting.total_steps, "num_replicas": 4, "init": "keyed"}
    options |= {"sharding": setting.sharding, **setting.options}
    train_here(folder, KeyedModel(folder, setting), KeyedData(), *plugins, **options)


def train_keyed(folder: Path, num_processes: int, setting: Keyed, *plugins: Plugin) -> None:
    run_ranks(fit_keyed, num_processes, folder, setting, *plugins)


def read_bits(folder: Path) -> tuple[str, str, bytes]:
    """Return the digests of the first and the last weights, and the ledger."""
    ledger = (folder / "keyed" / "ledger.jsonl").read_bytes()
    return (folder / "first.txt").read_text(), (folder / "last.txt").read_text(), ledger
