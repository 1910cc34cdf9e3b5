"""Optimizers that compute the loss by themselves, several times a step (L24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helios.state import TrainingState
from tests.loops.recorded import record
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel


class Quasi(SmallModel):
    """Steps LBFGS itself, with a closure."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        if not fast_init:
            del self.scheduler
            self.optimizer = torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)

    def train_step(self, batch: Any, state: TrainingState) -> None:
        ids, features = batch
        self.ids = ids.tolist()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.net(features) - ids.float().unsqueeze(1) / 10).square().mean()
            loss.backward()
            return loss

        self._loss_items["loss"] = self.optimizer.step(closure).detach()


@pytest.mark.shows("L24")
def test_a_manual_step_takes_a_closure_and_resumes_everywhere(tmp_path: Path) -> None:
    """L24, L26: the history of LBFGS is part of the state, dropout too."""
    setting = Setting(unfreezes=False)

    def make_run(folder: Path) -> Outcome:
        return record(
            folder, Quasi(setting), IndexModule(setting), train_unit="iteration", total_steps=7
        )

    resume_everywhere(make_run, tmp_path)
