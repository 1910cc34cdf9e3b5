"""Sharded models of four replicas: rows of weights, of what an optimizer keeps, of averages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import helios
from helios.plugins import EMA
from tests.golden.today.exact import ExactModel, Numbers, Record, bits

NAME = "sharded"
TOTAL = 6
SAVED = (2, 3)


class Block(nn.Module):
    """Five rows, which no number of processes divides, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randint(-4, 5, (5, 4)).double())
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, numbers: Tensor) -> Tensor:
        if self.training:
            self.seen += numbers.sum().long()
        return (numbers.double() @ self.rows.T).sum(1) + self.bias


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> Tensor:
        first, second = (block(numbers) for block in self.blocks)
        return first - 2 * second + self.shift.sum()


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.5)
        self.count = 0

    def shard(self) -> list[nn.Module]:
        return list(self.net.blocks)

    def train_step(self, batch: Any, state: Any) -> Tensor:
        ids, numbers = batch
        loss = (self.net(numbers) - ids).abs().sum() / 16
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        # With averages of weights. Which process has which batch depends on their number.
        ids, numbers = batch
        return {"error": ((self.net(numbers) - ids).abs().sum(), len(ids))}

    def on_training_batch_end(self, state: Any, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.count += state.global_iteration


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(26), params)
        self._valid_dataset = self._create_dataset(Numbers(8), params)


def train(root: Path, variant: str = "", **options: Any) -> dict[str, list[str]]:
    """Train; what is left is read from the last checkpoint, which holds whole tensors."""
    record = Record()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        valid_frequency=2,
        chkpt_frequency=1,
        chkpt_root=root,
        num_replicas=4,
        sharding="full",
        random_seed=14,
        print_banner=False,
        use_cpu=True,
        plugins=[EMA(decay=0.5, network="net")],
        **options,
    )
    model = Learner(record, "sharded")
    trainer.fit(model, Data())
    newest = helios.find_last_checkpoint(root / "sharded")
    assert helios.load_checkpoint(newest)["training_state"].global_iteration == TOTAL
    whole = Network()
    helios.load_weights(newest, whole)
    tensors = [*whole.named_parameters(), *whole.named_buffers()]
    record.end += [f"{name} {bits(value)}" for name, value in tensors]
    record.end.append(f"count {model.count} {model.scheduler.get_last_lr()}")
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
