"""A training whose setup goes through a set of names, whose order is an option.

Prints the order of the set, then that of the optimizer's parameters and a digest of their weights
and moments at the end.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helios
from helios.state import TrainingState
from tests.support.kills import KillAt
from tests.support.quiet import Quiet
from tests.support.runs import IndexModule, Setting, digest

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


class Shuffling(str):
    """A name whose place in a set follows from a number, as that of a string does from a seed."""

    order: int

    def __hash__(self) -> int:
        return zlib.crc32(f"{self.order}{self}".encode())

    __eq__ = str.__eq__


class Shuffled(helios.Model):
    """Five linear layers of equal shape.

    Args:
        kind: what is shuffled: ``parameters`` of one group, ``groups``, or the ``networks``.
    """

    unsaved = ("kind", "order")

    def __init__(self, kind: str, order: int) -> None:
        super().__init__("shuffled")
        self.kind = kind
        self.order = order

    def setup(self, fast_init: bool = False) -> None:
        shuffling = type("Shuffling", (Shuffling,), {"order": self.order})
        names = [str(name) for name in set(map(shuffling, NAMES))]
        order = names if self.kind == "networks" else sorted(names)
        self.nets = nn.ModuleDict({name: nn.Linear(5, 1) for name in order})
        parts = [self.nets[name].parameters() for name in names]
        groups: list[Any] = [{"params": part} for part in parts]
        self.optimizer = torch.optim.Adam(
            groups if self.kind == "groups" else [p for part in parts for p in part], lr=0.05
        )
        if self.rank == 0:
            print("built", *names)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        _, features = batch
        outputs = [(k + 1) * self.nets[name](features) for k, name in enumerate(NAMES)]
        return (torch.cat(outputs, 1).sum(1) - 1).square().mean()


class Report(Quiet):
    monitor = True

    def on_training_end(self) -> None:
        model = self.trainer.model
        assert isinstance(model, Shuffled)
        names = {id(part): name for name, part in model.nets.named_parameters()}
        order = [names[id(p)] for group in model.optimizer.param_groups for p in group["params"]]
        tensors = dict(model.nets.named_parameters())
        if self.trainer.rank == 0:
            print("order", *order)
            print(
                "bits",
                digest([(tensors[n], model.optimizer.state[tensors[n]]) for n in sorted(order)]),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--order", type=int, default=0)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--nproc", type=int)
    options = parser.parse_args()
    kill = [KillAt("on_training_batch_end", options.kill)] if options.kill else []
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=8,
        chkpt_frequency=1,
        chkpt_root=options.folder,
        random_seed=3,
        print_banner=False,
        use_cpu=True,
        clip_norm=0.5,
        plugins=[*kill, Report()],
        store=helios.CheckpointStore(is_async=False),
        **({"nproc": options.nproc, "num_replicas": options.nproc} if options.nproc else {}),
    )
    trainer.fit(Shuffled(options.kind, options.order), IndexModule(Setting(validates=False)))


if __name__ == "__main__":
    main()
