"""What training changes in plugins, data, loops and engines comes back, or is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import helios
from helios.checkpoint.file_names import find_last_checkpoint, sidecar_path
from helios.checkpoint.sidecar import Sidecar
from helios.data.params import DataLoaderParams
from helios.engines.engine import Engine
from helios.loops.epoch import EpochLoop
from helios.plugins import Plugin
from helios.plugins.channels import HookContext, PipelineHooks
from helios.state import TrainingState

pytestmark = pytest.mark.filterwarnings("error")


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rng = random.Random(4)
        self.level = 0
        self.names = [str(number) for number in range(20_000)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.level + self.rng.random()])


class Data(helios.DataModule):
    def setup(self) -> None:
        self.stage = 0
        self.numbers = Numbers()
        options = DataLoaderParams(batch_size=1, num_workers=0)
        self._train_dataset = self._create_dataset(Subset(self.numbers, range(8)), options)


class Model(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        nn.init.ones_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.seen: list[float] = []

    def train_step(self, batch: torch.Tensor, state: TrainingState) -> torch.Tensor:
        self.seen.append(float(batch))
        return self.net(batch).sum() * 2**-10


class Counting(Plugin):
    """A plugin without a state_dict, as most are."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.count = 0
        self.rng = np.random.default_rng(2)

    def setup(self) -> None:
        self.net = nn.Linear(1, 1)
        self.handle: Any = None

    def on_training_start(self) -> None:
        self.handle = lambda: 1
        self.borrowed = self.trainer.model.net  # type: ignore[union-attr]

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        self.count += 1
        self.last = self.rng.random()
        data = self.trainer.datamodule  # type: ignore[union-attr]
        data.stage = self.count
        data.numbers.level = self.count
        with torch.no_grad():
            self.net.weight.fill_(self.count)


class Marked(EpochLoop):
    num_batches = 0

    def on_advance_start(self, *args: Any) -> None:
        super().on_advance_start(*args)
        self.num_batches = self.num_batches + 1


class Tracking(Engine):
    num_clips = 0

    def clip_gradients(self, *args: Any, **kwargs: Any) -> Any:
        self.num_clips = self.num_clips + 1
        return super().clip_gradients(*args, **kwargs)


class Context(HookContext):
    def __init__(self) -> None:
        self.num_steps = 0

    def on_enter(self, ctx: Any) -> None:
        self.num_steps += 1


class Parts:
    """Everything that a run consists of, newly made."""

    def __init__(self, tmp_path: Path, total: int, data: type[Data] = Data) -> None:
        self.model, self.data, self.plugin = Model("m"), data(), Counting()
        self.context = Context()
        self.hooks = PipelineHooks()
        self.hooks.register("on_optimizer_step", self.context)
        self.engine = Tracking("cpu", clip_norm=4.0)
        self.trainer = helios.Trainer(
            total_steps=total,
            chkpt_frequency=1,
            chkpt_root=tmp_path,
            plugins=[self.plugin, self.hooks],
            engine=self.engine,
            train_unit="iteration",
        )
        self.loop = Marked()
        self.trainer.fit_loop.connect(epoch_loop=self.loop)

    def run(self) -> Parts:
        assert self.trainer.fit(self.model, self.data)
        return self

    def found(self) -> dict[str, Any]:
        return {
            "plugin": (self.plugin.count, self.plugin.last, self.plugin.net.weight.tolist()),
            "context": self.context.num_steps,
            "data": (self.data.stage, self.data.numbers.level, self.data.numbers.rng.getstate()),
            "loop": self.loop.num_batches,
            "engine": self.engine.num_clips,
            "seen": self.model.seen,
            "weight": self.model.net.weight.tolist(),
        }


def _sidecar(folder: Path) -> Sidecar:
    newest = find_last_checkpoint(folder / "m")
    assert newest is not None
    return Sidecar.from_json(sidecar_path(newest).read_text(), name="sidecar")


@pytest.mark.shows("S42")
def test_every_owner_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Parts(tmp_path / "whole", 6).run()
    Parts(tmp_path / "cut", 3).run()
    assert _sidecar(tmp_path / "cut").missing == {}
    again = Parts(tmp_path / "cut", 6).run()
    assert again.found() == whole.found()
    assert again.plugin.borrowed is again.model.net
    assert "incomplete" not in capsys.readouterr().err


@pytest.mark.shows("S74")
def test_a_data_set_declares_what_need_not_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Declaring(Numbers):
        unsaved = ("rng", "level")

    class Declared(Data):
        def setup(self) -> None:
            super().setup()
            self.numbers = Declaring()
            options = DataLoaderParams(batch_size=1, num_workers=0)
            self._train_dataset = self._create_dataset(Subset(self.numbers, range(8)), options)

    Parts(tmp_path / "here", 3, Declared).run()
    again = Parts(tmp_path / "here", 4, Declared)
    again.data.setup()
    found = again.run().data.numbers
    assert found.level == 4
    fresh = random.Random(4)
    fresh.random()
    assert found.rng.getstate() == fresh.getstate(), "one batch was fetched since the resume"
    assert _sidecar(tmp_path / "here").missing == {}
    assert " - WARNING - " not in capsys.readouterr().err


class Tally:
    """Counts its batches, beside what it returns."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.count += 1
        return torch.stack(samples) + self.count


@pytest.mark.shows("S42")
def test_what_a_collate_function_counts_comes_back(tmp_path: Path) -> None:
    class Collating(Data):
        def setup(self) -> None:
            super().setup()
            options = DataLoaderParams(batch_size=1, num_workers=0, collate_fn=Tally().collate)
            self._train_dataset = self._create_dataset(Subset(self.numbers, range(8)), options)

    whole = Parts(tmp_path / "whole", 5, Collating).run()
    Parts(tmp_path / "cut", 3, Collating).run()
    assert Parts(tmp_path / "cut", 5, Collating).run().found() == whole.found()
