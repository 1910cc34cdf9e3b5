"""A start maps the checkpoint's file, and keeps nothing that lies in it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.plugins import EMA, Plugin
from helios.state import TrainingState
from tests.support.runs import IndexData, Setting, train


class Taking(nn.Module):
    """Takes the tensors of a state instead of copying them, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.total = state[f"{prefix}total"]


class Keeper(helios.Model):
    """Has everything that could keep a part of a checkpoint."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(5, 1)
        self.taking = Taking()
        self.history = torch.zeros(3)
        if not fast_init:
            self.optimizer = torch.optim.Adam(self.net.parameters())

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        self.taking.total += 1
        self.history = self.history + 1
        loss = self.net(batch[1]).square().mean()
        self._loss_items["loss"] = loss.detach()
        return loss


class OwnKeeper(Keeper):
    """The same, by its own hands."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.net.load_state_dict(state_dict["net"], assign=True)
        self.kept = state_dict
        if not fast_init:
            self.optimizer = torch.optim.Adam(self.net.parameters())
            self.optimizer.load_state_dict(state_dict["optimizer"])


class Curious(Plugin):
    """Keeps the whole checkpoint that it is shown."""

    def __init__(self) -> None:
        super().__init__("curious")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint


def is_mapped(path: Path) -> bool:
    gc.collect()
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what is mapped")
@pytest.mark.parametrize("kind", [Keeper, OwnKeeper])
@pytest.mark.parametrize("is_curious", [False, True])
def test_nothing_that_goes_on_living_lies_in_the_file(
    kind: type[Keeper], is_curious: bool, tmp_path: Path
) -> None:
    seen: list[bool] = []

    class Looker(Plugin):
        def __init__(self) -> None:
            super().__init__("looker")

        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_start(self) -> None:
            newest = helios.find_last_checkpoint(tmp_path / "keeper")
            seen.append(newest is not None and is_mapped(newest))

    class Data(helios.DataModule):
        def setup(self) -> None:
            params = helios.DataLoaderParams(batch_size=4)
            self._train_dataset = self._create_dataset(IndexData(), params)
            self._test_dataset = self._create_dataset(IndexData(), params)

    def make(total: int) -> tuple[helios.Trainer, Keeper]:
        plugins: list[Plugin] = [Looker(), EMA()] + [Curious()] * is_curious
        trainer = helios.Trainer(
            "keeper",
            train_unit="iteration",
            total_steps=total,
            chkpt_frequency=2,
            chkpt_root=tmp_path,
            use_cpu=True,
            plugins=plugins,
            print_banner=False,
        )
        return trainer, kind("keeper")

    for total in (4, 8):
        trainer, model = make(total)
        assert trainer.fit(model, Data())
    trainer, model = make(8)
    assert trainer.fit(model, Data())
    assert trainer.test(model, Data())
    trainer, model = make(8)
    assert trainer.test(model, Data())
    newest = helios.find_last_checkpoint(tmp_path / "keeper")
    assert newest is not None
    assert not is_mapped(newest)
    assert seen == [False, False]


@pytest.mark.shows("S40")
def test_the_file_is_mapped_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    load = torch.load

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["mmap"])
        return load(*args, **options)

    train(tmp_path / "run", Setting(total_steps=3))
    monkeypatch.setattr(torch, "load", watched)
    train(tmp_path / "run", Setting(total_steps=5))
    assert asked == [True]
