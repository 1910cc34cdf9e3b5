"""What an optimizer gets in mid-run brings no gradients along: these would depend on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helios.state import TrainingState
from tests.support.elastic import Elastic, ElasticData, ElasticModel, make_trainer
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks


class Unfreezing(ElasticModel):
    """Trains the head only at first; the body's gradients are summed up all the time."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        del self.scheduler
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.05)


class Unfreeze(Quiet):
    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        model: Any = self.context.model
        if state.global_iteration == 3:
            model.optimizer.add_param_group({"params": list(model.body.parameters())})


def _train(rank: int, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    setting = Elastic(num_replicas=4, total_steps=6)
    model = Unfreezing(setting, folder)
    make_trainer(folder, setting, Unfreeze()).fit(model, ElasticData(setting))
    return "".join(p.detach().numpy().tobytes().hex() for p in model.body.parameters())


@pytest.mark.shows("S58")
def test_parameters_that_join_an_optimizer_train_alike_on_any_number_of_processes(
    tmp_path: Path,
) -> None:
    whole = {
        weights
        for number in (1, 3)
        for weights in run_ranks(_train, number, tmp_path / f"{number}")
    }
    assert len(whole) == 1
