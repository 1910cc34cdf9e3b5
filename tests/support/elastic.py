"""A training over several replicas whose every bit is written down, whoever carries the replicas.

The network has a convolution, BatchNorm, dropout, a branch that only some replicas use and a layer
that nobody uses; the data is augmented by all four generators and knows its own index. Each turn
of a replica appends a line to a file of its process, so that what a killed run did is known too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.core import rng
from helios.ledger.book import FILE_NAME
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.runs import digest, digest_checkpoint

SIDE = 6
CLASSES = 5


@dataclasses.dataclass(frozen=True)
class Elastic:
    """What a training is made of.

    Attributes:
        num_replicas: replicas of the run; ``None``: as many as there are processes.
    """

    num_replicas: int | None = 4
    accumulation: int = 1
    unit: str = "iteration"
    total_steps: int = 12
    chkpt_frequency: int = 1
    length: int = 29
    batch_size: int = 2
    num_workers: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    make_data: Callable[[Elastic], helios.DataModule] | None = None


class Pictures(Dataset):
    """Small images that follow from their index, augmented by all four generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        image = torch.sin(torch.arange(SIDE * SIDE) * (index + 1.0)).view(1, SIDE, SIDE)
        if random.random() < 0.5:
            image = image.flip(2)
        noise = rng.get_default_numpy_rng().generator.normal() + np.random.normal()
        return index, image + 0.1 * torch.rand(1, SIDE, SIDE) + 0.01 * noise


class ElasticModel(helios.Model):
    """Writes a line for each turn of a replica into ``<folder>/turns-<rank>.jsonl``."""

    unsaved = ("log", "setting", "drawn")

    def __init__(self, setting: Elastic, folder: Path) -> None:
        super().__init__("elastic")
        self.setting = setting
        self.log = folder
        self.drawn = torch.zeros(1)

    def setup(self, fast_init: bool = False) -> None:
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(4 * (SIDE - 2) ** 2, CLASSES)
        self.branch = nn.Linear(4 * (SIDE - 2) ** 2, CLASSES)
        self.idle = nn.Linear(2, 2)
        networks = nn.ModuleList([self.body, self.head, self.branch, self.idle]).to(self.device)
        if not fast_init:
            self.optimizer = torch.optim.Adam(networks.parameters(), lr=0.02)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        if isinstance(batch, int):
            batch = torch.tensor([2 * batch, 2 * batch + 1]), torch.rand(2, 1, SIDE, SIDE)
        ids, images = batch
        noise = 0.01 * torch.rand(1).to(images.device)
        features = self.body(images + noise + 0.01 * float(np.random.normal()))
        scores = self.head(features)
        if (ids % 5 == 0).any():
            scores = scores + 0.1 * self.branch(features)
        loss = nn.functional.cross_entropy(scores, ids % CLASSES)
        self._loss_items["loss"] = loss.detach()
        self._write(state.global_iteration, ids.tolist(), loss, images)
        return loss

    def _write(self, iteration: int, ids: list[int], loss: torch.Tensor, images: Any) -> None:
        line = {
            "iteration": iteration,
            "replica": self.trainer._parts.runner.replica,
            "ids": ids,
            "loss": loss.detach().cpu().numpy().tobytes().hex(),
            "images": digest(images.cpu())[:16],
        }
        with (self.log / f"turns-{self.trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        self.drawn = torch.rand(1) + float(np.random.normal())

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        mean = self._loss_items["loss"]
        line = {"iteration": state.global_iteration, "mean": mean.cpu().numpy().tobytes().hex()}
        drawn = torch.rand(1) + float(np.random.normal())
        line["noise"] = torch.cat([self.drawn, drawn]).numpy().tobytes().hex()
        with (self.log / f"means-{self.trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, images = batch
        noise = torch.rand(1).to(images.device) + float(np.random.normal())
        scores = self.head(self.body(images + 0.01 * noise))
        losses = nn.functional.cross_entropy(scores, ids % CLASSES, reduction="none")
        with (self.log / f"valid-{self.trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids.tolist()}) + "\n")
        return {"loss": (losses.sum(), len(ids)), "seen": (ids.sum(), 1)}

    test_step = valid_step


class ElasticData(helios.DataModule):
    unsaved = ("setting",)

    def __init__(self, setting: Elastic) -> None:
        super().__init__()
        self.setting = setting

    def setup(self) -> None:
        setting = self.setting
        params = helios.DataLoaderParams(
            batch_size=setting.batch_size, shuffle=True, num_workers=setting.num_workers
        )
        self._train_dataset = self._create_dataset(Pictures(setting.length), params)
        params = helios.DataLoaderParams(batch_size=2)
        self._valid_dataset = self._create_dataset(Pictures(11), params)
        self._test_dataset = self._create_dataset(Pictures(11), params)


class KillRank(Quiet):
    """Sends SIGKILL to the process of one rank, or of each, in an event of an iteration."""

    def __init__(self, event: str, iteration: int, rank: int | None) -> None:
        super().__init__("kill-rank")
        self.iteration = iteration
        self.rank_to_kill = rank
        setattr(self, event, self._act)

    def _act(self, *args: Any) -> None:
        is_it = self.rank_to_kill in (None, self.trainer.rank)
        if is_it and self.context.state.global_iteration >= self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(folder: Path, setting: Elastic, *plugins: Plugin, **more: Any) -> helios.Trainer:
    options: dict[str, Any] = {
        "train_unit": setting.unit,
        "total_steps": setting.total_steps,
        "chkpt_frequency": setting.chkpt_frequency,
        "valid_frequency": 5 if setting.unit == "iteration" else 1,
        "accumulation_steps": setting.accumulation,
        "chkpt_root": folder,
        "num_replicas": setting.num_replicas,
        "clip_norm": 0.5,
        "use_cpu": True,
        "print_banner": False,
        "plugins": list(plugins),
        "signals": helios.Signals(on_interrupt="return"),
    }
    return helios.Trainer(**{**options, **setting.options, **more})


def train(
    folder: Path, setting: Elastic, *plugins: Plugin, **more: Any
) -> tuple[helios.Trainer, ElasticModel]:
    """Train in the folder, from what lies there; returns the trainer and the model."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(folder, setting, *plugins, **more)
    model = ElasticModel(setting, folder)
    trainer.fit(model, (setting.make_data or ElasticData)(setting))
    return trainer, model


def _read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob(f"{name}-*.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]


def _collect(
    lines: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> dict[Any, dict[str, Any]]:
    """Return the lines by place; what was done again after a kill must be the same again."""
    found: dict[Any, dict[str, Any]] = {}
    for line in lines:
        known = found.setdefault(key(line), line)
        assert known == line, f"{known} was done again as {line}"
    return found


@dataclasses.dataclass
class Bits:
    """What a run did and left, in plain values that are compared.

    Attributes:
        means: by iteration: the mean loss, and what hooks drew before the turns and after them.
    """

    turns: dict[tuple[int, int], dict[str, Any]]
    means: dict[int, dict[str, Any]]
    state: dict[str, str]
    ledger: list[str] = dataclasses.field(default_factory=list)


def read_bits(folder: Path) -> Bits:
    newest = helios.find_last_checkpoint(folder / "elastic")
    assert newest is not None
    names = ("num_replicas", "cursor", "tables", "engine", "rng")
    state = digest_checkpoint(helios.load_checkpoint(newest), *names)
    return Bits(
        turns=_collect(_read(folder, "turns"), lambda line: (line["iteration"], line["replica"])),
        means=_collect(_read(folder, "means"), lambda line: line["iteration"]),
        state={"name": newest.name, **state},
        ledger=newest.with_name(FILE_NAME).read_text().splitlines(),
    )


def assert_same(found: Bits, expected: Bits) -> None:
    """Assert that two runs have done and left the same, naming the first thing that differs."""
    assert found.turns.keys() == expected.turns.keys()
    for place, line in expected.turns.items():
        assert found.turns[place] == line, f"iteration and replica {place} differ"
    assert found.means.keys() == expected.means.keys()
    for number, line in expected.means.items():
        assert found.means[number] == line, f"the means of iteration {number} differ"
    different = [name for name, bits in expected.state.items() if found.state.get(name) != bits]
    assert not different, f"{different} differ at the end"
    assert found.ledger == expected.ledger
