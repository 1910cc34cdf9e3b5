"""Networks and tools of other libraries: transformers, torchmetrics.

They are imported by the tests that use them, for that takes seconds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from helios.state import TrainingState
from tests.ordinary.harness import LENGTH, Case, Data, Regression, assert_ordinary

WORDS = 17


class Gpt2(Regression):
    """A tiny GPT-2, with the learning rate that transformers warms up."""

    def setup(self, fast_init: bool = False) -> None:
        from transformers import get_linear_schedule_with_warmup

        super().setup(fast_init)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 3, 20)

    def make_net(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False
        )
        return GPT2LMHeadModel(config)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


def sentences() -> TensorDataset:
    """Return sentences of eight words."""
    return TensorDataset(torch.arange(LENGTH * 8).reshape(LENGTH, 8) ** 2 % (WORDS - 1) + 1)


def test_a_language_model_resumes_without_a_warning(tmp_path: Path) -> None:
    assert_ordinary(Case(Gpt2, partial(Data, sentences)), tmp_path)


class Measured(Regression):
    """Measures itself by torchmetrics: one metric, a collection, a running mean."""

    def setup(self, fast_init: bool = False) -> None:
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef

        super().setup(fast_init)
        self.error = MeanAbsoluteError()
        self.scores = MetricCollection([MeanAbsoluteError(), PearsonCorrCoef()])
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        found = self.net(inputs)
        if torch.is_grad_enabled():
            self.error(found.detach(), targets)
            self.scores.update(found.detach()[:, 0], targets[:, 0])
        return super().loss(batch)

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.mean.update(self.loss_items["loss"])
        if state.global_iteration % 5 == 0:
            self.mean.reset()

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.error.compute()
        self.error.reset()


def test_torchmetrics_among_the_attributes_resume_without_a_warning(tmp_path: Path) -> None:
    assert_ordinary(Case(Measured, options={"valid_frequency": 4}), tmp_path)
