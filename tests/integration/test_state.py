"""State in odd places: kill it anywhere, run it again, equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import helios
from helios import DataLoaderParams, DataModule, Trainer
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.resume import copy_checkpoint
from tests.support.warned import collect_warnings


class Running(nn.Module):
    """A running mean in a buffer that no state_dict holds, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean.lerp(x.detach().mean(0), 1 / self.count)
        return x - self.mean


class Master(torch.optim.SGD):
    """Steps a float32 copy of each bfloat16 parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    master = state.setdefault("master", parameter.float())
                    master.sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.copy_(master)


class Odd(helios.Model):
    def __init__(self) -> None:
        super().__init__("odd")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(Running(), nn.Dropout(0.1), nn.Linear(4, 1)).bfloat16()
        self.body = nn.Linear(4, 4).bfloat16()
        self.optimizer = Master(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        if state.global_iteration == 3:
            self.optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.003})
        self.net[1].p += 0.01
        loss: torch.Tensor = self.net(self.body(batch[0].bfloat16())).float().pow(2).mean()
        return loss


class Data(DataModule):
    def setup(self) -> None:
        samples = torch.arange(44.0).reshape(11, 4).sin()
        data = torch.utils.data.TensorDataset(samples)
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=3))


class End(Plugin):
    """Keeps the weights, the losses and the odd state of a run."""

    def __init__(self) -> None:
        super().__init__("end")
        self.end: list[bytes] = []
        self.values: tuple[Any, ...] = ()

    def setup(self) -> None:
        pass

    def on_training_end(self) -> None:
        model = self.trainer.model
        assert isinstance(model, Odd)
        tensors = [*model.net.parameters(), *model.body.parameters(), *model.net.buffers()]
        tensors += [state["master"] for state in model.optimizer.state.values()]
        self.end = [tensor.detach().float().numpy().tobytes() for tensor in tensors]
        self.values = (model.net[0].count, model.net[1].p, len(model.optimizer.param_groups))


def _train(folder: Path) -> End:
    end = End()
    trainer = Trainer(
        chkpt_root=folder,
        plugins=[end],
        train_unit="iteration",
        total_steps=8,
        chkpt_frequency=1,
        use_cpu=True,
        print_banner=False,
        random_seed=1,
    )
    trainer.fit(Odd(), Data())
    return end


def test_state_inside_modules_and_optimizers_resumes_everywhere(tmp_path: Path) -> None:
    with collect_warnings() as warnings:
        whole = _train(tmp_path / "whole")
    assert (whole.values[0], whole.values[2]) == (8, 2)
    checkpoints = sorted((tmp_path / "whole").glob("*/*.pth"))
    assert len(checkpoints) == 8
    for number, path in enumerate(checkpoints):
        if "_iter_8" not in path.stem:
            resumed = _train(copy_checkpoint(path, tmp_path / f"resumed-{number}"))
            assert resumed.values == whole.values, path.stem
            assert resumed.end == whole.end, path.stem
    assert not any("incomplete" in warning for warning in warnings)
