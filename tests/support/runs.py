"""Small trainings that show every bit that matters: sample ids, losses, weights, events."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.core import rng
from helios.hooks.events import EVENTS, Receiver, Verb
from helios.ledger import Replay
from helios.plugins import Plugin
from helios.state import Cursor, TrainingState
from tests.support.quiet import Quiet

NUM_SAMPLES = 22
# Lets a test go on in its process after an interruption.
RETURNS = helios.Signals(on_interrupt="return")
WIDTH = 5


class IndexData(Dataset):
    """Samples that know their own index, with features augmented by all four generators."""

    def __init__(
        self, length: int = NUM_SAMPLES, fetched: Callable[[int], None] | None = None
    ) -> None:
        self.length = length
        self.fetched = fetched

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if self.fetched is not None:
            self.fetched(index)
        noise = rng.get_default_numpy_rng().generator.normal() + np.random.normal()
        features = torch.sin(torch.arange(WIDTH) * (index + 1.0))
        return index, features + torch.rand(WIDTH) * random.random() + noise


def noisy_collate(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack samples, with noise of its own."""
    ids = torch.tensor([index for index, _ in samples])
    noise = torch.rand(1) + float(np.random.normal())
    return ids, torch.stack([features for _, features in samples]) + noise


@dataclasses.dataclass
class Setting:
    """What a training is made of; every field is varied by some test."""

    unit: str = "iteration"
    total_steps: float = 14
    accumulation: int = 1
    batch_size: int = 4
    num_workers: int = 0
    persistent_workers: bool = False
    is_manual: bool = False
    scheduler: str = "step"
    validates: bool = True
    valid_frequency: int | None = 3
    chkpt_frequency: int | None = 1
    print_frequency: int | None = None
    unfreezes: bool = True
    shuffle: bool = True
    drop_last: bool = False
    early_stop_cycles: int | None = None
    seed: int = 5
    requests: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    make_data: Callable[[Setting], IndexModule] | None = None


class Average:
    """An average of weights with an update counter: a plain object with state."""

    def __init__(self, source: nn.Module) -> None:
        self.source = source
        self.shadow = [p.detach().clone() for p in source.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (self.updates + 10))
        for kept, present in zip(self.shadow, self.source.parameters(), strict=True):
            kept.mul_(decay).add_(present.detach(), alpha=1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        for kept, loaded in zip(self.shadow, state_dict["shadow"], strict=True):
            kept.copy_(loaded)


class SmallModel(helios.Model):
    """Dropout, BatchNorm, a frozen layer that thaws, an average of weights, noise in the step."""

    def __init__(self, setting: Setting, name: str = "small") -> None:
        super().__init__(name)
        self.setting = setting
        self.records: dict[int, tuple[list[int], str]] = {}
        self.seen: list[float] = []

    unsaved = ("records", "setting")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        )
        if self.setting.unfreezes:
            self.net[0].requires_grad_(False)
        self.average = Average(self.net)
        if not fast_init:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
            self._make_scheduler()

    def _make_scheduler(self) -> None:
        kind = self.setting.scheduler
        if kind == "step":
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=30)
        elif kind == "epoch":
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
            self.scheduler_interval = {"scheduler": "epoch"}
        elif kind == "plateau":
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                self.optimizer, patience=0, factor=0.5
            )
            self.scheduler_interval = {"scheduler": "validation:score"}

    def on_training_epoch_start(self, current_epoch: int) -> None:
        if current_epoch == 2 and self.setting.unfreezes:
            self.net[0].requires_grad_(True)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor | None:
        if isinstance(batch, int):
            batch = torch.tensor([batch] * 4), torch.rand(4, WIDTH)
        ids, features = batch
        self.ids = ids.tolist()
        features = features + 0.1 * torch.rand(1) * random.random()
        features = features + rng.get_default_numpy_rng().generator.normal() * 0.01
        features = features + np.random.normal() * 0.01
        loss = (self.net(features) - ids.float().unsqueeze(1) / 10).square().mean()
        self._loss_items["loss"] = loss.detach()
        if not self.setting.is_manual:
            return loss
        (loss / self.setting.accumulation).backward()
        if state.global_iteration % self.setting.accumulation == 0:
            self.optimizer.step()
            if self.setting.scheduler == "step":
                self.scheduler.step()
            self.optimizer.zero_grad()
        return None

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.average.update()
        bits = self._loss_items["loss"].numpy().tobytes().hex()
        self.records[state.global_iteration] = (self.ids, bits)

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        _, features = batch
        features = features + torch.rand(1) + float(np.random.normal())
        return {"score": (self.net(features).abs().sum(), len(features))}

    def have_metrics_improved(self) -> bool:
        self.seen.append(self._val_scores["score"])
        return self._val_scores["score"] <= min(self.seen)

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return self.valid_step(batch, step)

    def predict_step(self, batch: Any, step: int) -> Any:
        return batch[0]


class IndexModule(helios.DataModule):
    unsaved = ("fetched", "setting")

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.fetched: list[int] = []

    def setup(self) -> None:
        setting = self.setting
        self._train_dataset = self._create_dataset(
            IndexData(fetched=self.fetched.append if setting.num_workers == 0 else None),
            helios.DataLoaderParams(
                batch_size=setting.batch_size,
                shuffle=setting.shuffle,
                num_workers=setting.num_workers,
                persistent_workers=setting.persistent_workers,
                drop_last=setting.drop_last,
                collate_fn=noisy_collate,
            ),
        )
        params = helios.DataLoaderParams(batch_size=4, collate_fn=noisy_collate)
        if setting.validates:
            self._valid_dataset = self._create_dataset(IndexData(6), params)
        self._test_dataset = self._create_dataset(IndexData(6), params)
        self._predict_dataset = self._create_dataset(IndexData(6), params)


def _make_listener(name: str) -> Callable[..., Any]:
    def listen(self: EventLog, *args: Any) -> Any:
        if name == "on_save_checkpoint":
            self.saves[args[0]["training_state"]["global_iteration"]] = len(self.events)
        elif name not in ("on_load_checkpoint", "on_exception"):
            self.events.append((name, *map(_describe, args)))
        return args[0] if name.startswith("process_") else None

    return listen


def _describe(argument: Any) -> Any:
    if isinstance(argument, TrainingState):
        return comparable_state(argument)
    if isinstance(argument, int | bool):
        return argument
    return type(argument).__name__


class EventLog(Quiet):
    """Hears every event, and notes how many were told before each checkpoint."""

    unsaved = ("events", "saves")

    def __init__(self) -> None:
        super().__init__("event-log")
        self.events: list[tuple[Any, ...]] = []
        self.saves: dict[int, int] = {}


for _event in EVENTS.values():
    if Receiver.PLUGIN in _event.receivers and _event.verb in (Verb.EMIT, Verb.ASK):
        setattr(EventLog, _event.name, _make_listener(_event.name))


def comparable_state(state: TrainingState) -> tuple[Any, ...]:
    """Return the counters; a measured time differs from run to run."""
    return dataclasses.astuple(dataclasses.replace(state, average_iter_time=0.0))


def digest(tree: Any) -> str:
    """Return a digest of the bytes of a tree of tensors, numbers and strings."""
    parts = hashlib.sha256()

    def add(value: Any) -> None:
        parts.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            parts.update(f"{value.dtype}{tuple(value.shape)}".encode())
            parts.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name, item in value.items():
                add(str(name))
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            parts.update(repr(value).encode())

    add(tree)
    return parts.hexdigest()


def digest_checkpoint(payload: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Return digests of the model, the state and the parts of these names in a checkpoint."""
    model = payload["model"]
    parts = {
        "state": dict(payload["training_state"].dict(), average_iter_time=0.0),
        "rest of the model": {key: part for key, part in model.items() if key != "objects"},
        **{f"model.{name}": part for name, part in model["objects"].items()},
        **{name: payload[name] for name in names if name in payload},
    }
    return {name: digest(part) for name, part in parts.items()}


@dataclasses.dataclass
class Outcome:
    """What a training left: compared on bytes."""

    records: dict[int, tuple[list[int], str]]
    model: dict[str, Any]
    tables: dict[str, Any]
    randomness: dict[str, Any]
    state: tuple[Any, ...]
    cursor: Cursor | None
    events: list[tuple[Any, ...]]
    saves: dict[int, int]
    fetched: list[int]
    has_ended: bool

    def bits(self) -> dict[str, str]:
        """Return digests by part, so that a difference names its part."""
        return {name: digest(part) for name, part in self.parts().items()}

    def parts(self) -> dict[str, Any]:
        return {
            **{f"model.{name}": part for name, part in self.model["objects"].items()},
            "flags": self.model["flags"],
            "values": {k: v for k, v in self.model["values"].items() if k != "unlogged"},
            "tables": self.tables,
            "rng": self.randomness,
            "state": self.state,
        }


class _EndRecorder(Quiet):
    """Takes the final state while the run is still there."""

    monitor = True

    def __init__(self) -> None:
        super().__init__("end-recorder")
        self.end: dict[str, Any] = {}

    def on_training_end(self) -> None:
        parts = self.trainer._parts
        self.end = {
            "model": parts.model.discovery.capture(),
            "tables": {name: dict(table) for name, table in parts.model.tables.items()},
            "randomness": rng.read_states(),
            "state": comparable_state(parts.run.state),
            "cursor": dataclasses.replace(parts.run.cursor),
        }


class Requester(Quiet):
    """Asks for a checkpoint in every batch: the next safe point honours it."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.trainer.request_checkpoint()


def train(folder: Path, setting: Setting, *plugins: Plugin) -> Outcome:
    """Train in a folder; goes on from what lies there."""
    return _run(folder, setting, plugins, helios.Trainer.fit)[1]


def replay(
    folder: Path, setting: Setting, *plugins: Plugin, **part: int | None
) -> tuple[Replay, Outcome]:

    def act(trainer: helios.Trainer, *given: Any) -> Replay:
        return trainer.replay(*given, **part)

    return _run(folder, setting, plugins, act)


def _run(
    folder: Path, setting: Setting, plugins: tuple[Plugin, ...], act: Callable[..., Any]
) -> tuple[Any, Outcome]:
    log, end = EventLog(), _EndRecorder()
    trainer = helios.Trainer(
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        valid_frequency=setting.valid_frequency,
        chkpt_frequency=setting.chkpt_frequency,
        print_frequency=setting.print_frequency,
        accumulation_steps=setting.accumulation,
        early_stop_cycles=setting.early_stop_cycles,
        chkpt_root=folder,
        random_seed=setting.seed,
        print_banner=False,
        use_cpu=True,
        plugins=[*plugins, *([Requester()] if setting.requests else []), log, end],
        **{"signals": RETURNS, **setting.options},
    )
    model = SmallModel(setting)
    data = (setting.make_data or IndexModule)(setting)
    result = act(trainer, model, data)
    return result, Outcome(
        records=model.records,
        events=log.events,
        saves=log.saves,
        fetched=data.fetched,
        has_ended=bool(end.end),
        **(end.end or {"model": {}, "tables": {}, "randomness": {}, "state": (), "cursor": None}),
    )
