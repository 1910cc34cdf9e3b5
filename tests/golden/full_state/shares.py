"""Memory that setup lets tensors share and training parts, optimizers that share their tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helios
from tests.golden.full_state.parts import float_tensor
from tests.golden.today.exact import ExactModel, Numbers, Record, Recorder, bits

NAME = "shares"
TOTAL = 7
SAVED = (1, 4)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(float_tensor(1, 2, 3, 4))
        whole = float_tensor(*range(8))
        self.register_buffer("wide", whole)
        self.register_buffer("part", whole[2:5])
        self.register_buffer("first", whole[1:3])
        self.register_buffer("tied", self.part)
        self.register_buffer("apart", float_tensor(5, 6, 7))


class Wrapper(torch.optim.Optimizer):
    """It shares the groups and the state of the optimizer that it holds, as published ones do."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.optimizer = torch.optim.SGD(params, **options)
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        for group in self.param_groups:
            for slow, weight in zip(self.slow, group["params"], strict=True):
                slow += weight.detach()
                weight.data += self.state[weight]["momentum_buffer"] * group["lr"]


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Buffers()
        self.optimizer = Wrapper(self.net.parameters(), lr=0.5, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.large = float_tensor(*range(6))
        self.look = self.large[1:3]

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        net, number = self.net, state.global_iteration
        if number == 2:
            net.part = net.part.clone()
            net.tied = net.wide[6:]
            net.apart = self.large[2:5]
            self.look = net.wide[:3]
        with torch.no_grad():
            net.wide += number
            net.part += 2
            net.tied *= 2
            self.large += 1
            self.look += 4
        shared = net.wide.sum() + net.part.sum() + net.first.sum() + net.tied.sum()
        scale = (shared + net.apart.sum() + self.look.sum()) % 8
        loss = (numbers.double() @ net.weight - ids).sum().abs() / 8 * (1 + scale)
        self._loss_items["loss"] = loss.detach()
        self.record.step(number, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.note(weight=self.net.weight, slow=self.optimizer.slow[0])
        self.note(**dict(self.net.named_buffers()))
        self.net.wide += 64
        self.large += 64
        self.note(look=self.look, **dict(self.net.named_buffers()))
        inner = self.optimizer.optimizer
        self.note(groups=self.optimizer.param_groups is inner.param_groups)
        self.note(state=self.optimizer.state is inner.state, lr=inner.param_groups[0]["lr"])
        self.note(momentum=[bits(table["momentum_buffer"]) for table in inner.state.values()])


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(10), params)


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=21,
        print_banner=False,
        use_cpu=True,
        plugins=[Recorder(record)],
    )
    trainer.fit(Learner(record, "shares"), Data())
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
