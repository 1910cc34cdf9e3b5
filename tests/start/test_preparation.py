"""Preparing a model: its networks go where the engine is, without a line of the user's."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.core.utils import collector_at_rest
from helios.engines.engine import Engine
from helios.errors import UsageError
from tests.support.models import Fitting
from tests.support.runs import IndexModule, Setting


class Plain(Fitting):
    """Builds its network where it stands, as on a CPU."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def train(**options: Any) -> Plain:
    model = Plain("plain")
    trainer = helios.Trainer(total_steps=0, print_banner=False, **options)
    trainer.fit(model, IndexModule(Setting()))
    return model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_networks_go_to_the_device_and_optimizers_still_know_them() -> None:
    model = train(gpus=[0])
    tensors = (*model.net.parameters(), *model.net.buffers())
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    held = [id(part) for group in model.optimizer.param_groups for part in group["params"]]
    assert held == [id(part) for part in model.net.parameters()]


@pytest.mark.shows("P144")
def test_the_memory_of_a_run_that_was_dropped_is_free_before_the_next_model_is_built() -> None:
    """A trainer and its model are in a cycle, and an accelerator's memory is scarce."""
    with collector_at_rest():
        dropped = weakref.ref(train(use_cpu=True).net)
        found = []

        class Looking(Plain):
            def make_net(self) -> nn.Module:
                found.append(dropped())
                return super().make_net()

        trainer = helios.Trainer(total_steps=0, print_banner=False, engine=Engine("meta"))
        with pytest.raises(UsageError):
            trainer.fit(Looking("plain"), IndexModule(Setting()))
    assert found == [None]
