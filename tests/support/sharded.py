"""A training whose networks may be sharded, with everything that could make a shard differ.

Units are called twice, computed again in backward, tied, frozen, never used, and used by some
replicas only, or by chance; no size can be divided by a number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, dropout, gelu
from torch.utils.checkpoint import checkpoint

import helios
from helios import Unit
from helios.core.sharded_tensors import whole_of
from helios.loops import OptimizerLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.elastic import KillRank
from tests.support.ranks import alone, run_ranks

IS_ABLE = "set_reduce_scatter_unused_params" in dir(FSDPModule)
"""Whether this PyTorch has an FSDP that reduces as we say."""
WIDTH = 11
WORDS = 53


@dataclasses.dataclass(frozen=True)
class Sharded:
    """What a training is made of.

    Attributes:
        again: what computes activations again in backward: ``"forward"`` of the network, that of
            the ``"units"``, ``"both"``, units in units (``"nested"``) or ``"none"``.
    """

    num_replicas: int = 3
    total_steps: int = 4
    sharding: str = "full"
    num_samples: int = 96
    num_valid: int = 0
    has_norm: bool = True
    again: str = "forward"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Block(nn.Module):
    """A unit of the network."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.at_random = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, is_odd: bool) -> Tensor:
        hidden = gelu(self.up(self.norm(x)))
        hidden = self.down(dropout(hidden, 0.1, self.training)) + self.frozen(x)
        if is_odd:
            hidden = hidden + self.sometimes(x)
        if self.training and torch.rand(()) < 0.15:
            hidden = hidden + self.at_random(x)
        return x + self.scale * self.batch_norm(hidden)


class Network(nn.Module):
    """Two blocks, the first of which runs twice, between an embedding and its transpose."""

    def __init__(self, *, has_norm: bool, checkpoints: bool = True) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(has_norm=has_norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, is_odd: bool) -> Tensor:
        x = self.embedding(words)
        first, second = self.layers
        if self.training and self.checkpoints:
            x = checkpoint(first, x, is_odd, use_reentrant=False)
        else:
            x = first(x, is_odd)
        return self.head(first(second(x, is_odd=is_odd), is_odd))


class Words(torch.utils.data.Dataset):
    """Pairs of words that follow from their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, (7 * index) % WORDS, (7 * index + 5) % WORDS


class ShardedModel(helios.Model):
    """Writes a digest of all parameters, buffers and states of the optimizer when it is trained."""

    unsaved = ("folder", "setting", "num_seen", "num_trained")

    def __init__(self, folder: Path, setting: Sharded) -> None:
        super().__init__("sharded")
        self.folder = folder
        self.setting = setting

    def setup(self, fast_init: bool = False) -> None:
        self.num_seen = self.num_trained = 0
        checkpoints = self.setting.again in ("forward", "both")
        self.net = Network(has_norm=self.setting.has_norm, checkpoints=checkpoints)
        trained = [part for part in self.net.parameters() if part.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)

    def shard(self) -> Sequence[nn.Module | Unit]:
        if self.setting.again in ("units", "both"):
            return [Unit(layer, checkpoint=True) for layer in self.net.layers]
        if self.setting.again == "nested":
            again = [self.net, *self.net.layers, *(layer.up for layer in self.net.layers)]
            units = [Unit(part, checkpoint=True) for part in again]
            return [*units, *(layer.down for layer in self.net.layers)]
        return [*self.net.layers]

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        indices, words, following = batch
        self.num_trained += len(indices)
        return cross_entropy(self.net(words, int(indices[0]) % 2 == 1), following)

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        indices, words, following = batch
        self.num_seen += len(indices)
        loss = cross_entropy(self.net(words, False), following, reduction="sum")
        return {"loss": (loss.item(), len(indices)), "seen": (len(indices), 1)}

    def on_training_end(self) -> None:
        text = digests_of(self.net, self.optimizer)
        if self.trainer.global_rank == 0:
            (self.folder / "bits.txt").write_text(text)


def digests_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a line for each tensor of both; all processes call this together."""
    found: dict[str, Tensor] = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value
    return "\n".join(f"{name} {digest_of(part)}" for name, part in found.items())


def digest_of(tensor: Tensor) -> str:
    """Return a digest of the whole of a tensor; all processes call this together."""
    whole = whole_of(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


class Data(helios.DataModule):
    unsaved = ("setting",)

    def __init__(self, setting: Sharded) -> None:
        super().__init__()
        self.setting = setting

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Words(self.setting.num_samples), params)
        if self.setting.num_valid:
            params = helios.DataLoaderParams(batch_size=2)
            self._valid_dataset = self._create_dataset(Words(self.setting.num_valid), params)


class Kill(KillRank):
    def __init__(self, iteration: int, rank: int) -> None:
        super().__init__("on_backward_start", iteration, rank)


def train_here(
    folder: Path,
    model: helios.Model,
    data: helios.DataModule,
    *plugins: Plugin,
    optimizer_loop: OptimizerLoop | None = None,
    **options: Any,
) -> None:
    """Train as a rank, by iterations; where it is killed, with a checkpoint at each."""
    folder.mkdir(exist_ok=True)
    is_killed = any(isinstance(each, KillRank) for each in plugins)
    given = {"train_unit": "iteration", "chkpt_root": folder}
    given |= {"chkpt_frequency": 1 if is_killed else 2}
    given |= {"use_cpu": True, "print_banner": False, "plugins": plugins}
    trainer = helios.Trainer(**{**given, **options})
    if optimizer_loop is not None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=optimizer_loop)  # type: ignore[union-attr]
    with alone():
        trainer.fit(model, data)


def fit(
    rank: int,
    folder: Path,
    setting: Sharded,
    *plugins: Plugin,
    kind: type[ShardedModel] = ShardedModel,
) -> dict[str, Any]:
    """Train a model of a kind as a rank; returns the scores of the last validation."""
    model = kind(folder, setting)
    options = {
        "total_steps": setting.total_steps,
        "num_replicas": setting.num_replicas,
        "sharding": setting.sharding,
        "valid_frequency": 2 if setting.num_valid else None,
        **setting.options,
    }
    train_here(folder, model, Data(setting), *plugins, **options)
    return {**model.metrics, "num_seen": model.num_seen, "num_trained": model.num_trained}


def train(folder: Path, num_processes: int, setting: Sharded, *plugins: Plugin) -> list[Any]:
    """Train in as many processes; returns what each rank's :func:`fit` has returned."""
    return run_ranks(fit, num_processes, folder, setting, *plugins)


def read_bits(folder: Path) -> tuple[str, bytes]:
    return (folder / "bits.txt").read_text(), (folder / "sharded" / "ledger.jsonl").read_bytes()
