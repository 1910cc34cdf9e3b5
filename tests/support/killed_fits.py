"""A small run that is killed for real in an iteration, and what it needs: data and a trainer."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import helios
from helios.plugins import Plugin
from tests.support.kills import KillAt, run_in_child


class Sine(helios.DataModule):
    """32 points, 4 in a batch."""

    def setup(self) -> None:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, x.sin()), params)


def fit(
    model: helios.Model,
    root: Path,
    *plugins: Plugin,
    data: helios.DataModule | None = None,
    **options: Any,
) -> None:
    """Train for 8 iterations, with a checkpoint at each fourth that is written at once."""
    options = {"total_steps": 8, "chkpt_frequency": 4, **options}
    trainer = helios.Trainer(
        train_unit="iteration",
        chkpt_root=root,
        store=helios.CheckpointStore(is_async=False),
        plugins=plugins,
        random_seed=5,
        use_cpu=True,
        print_banner=False,
        **options,
    )
    assert trainer.fit(model, data or Sine())


def kill(train: Callable[..., Any], root: Path, iteration: int) -> None:
    """Call ``train(root, plugin)`` in a child that is killed at the end of an iteration."""
    work = functools.partial(train, root, KillAt("on_training_batch_end", iteration))
    assert run_in_child(work, root.with_suffix(".killed")) == -signal.SIGKILL


def missing(root: Path) -> list[Any]:
    """Return what the checkpoints of a run lack, by their sidecars."""
    sidecars = [json.loads(path.read_text()) for path in root.glob("net/*.json")]
    return [sidecar["missing"] for sidecar in sidecars if sidecar.get("missing")]
