"""Averages of weights, which validation sees."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import helios
from helios.plugins import EMA, SWA
from tests.golden.today.exact import Exact, ExactModel, Numbers, Record, Recorder, bits

TOTAL = 8
SAVED = (3, 6)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net, self.other = Exact(), Exact()
        parameters = [*self.net.parameters(), *self.other.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.25)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers) + self.other.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net", "other")


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(14), params)
        self._valid_dataset = self._create_dataset(
            Numbers(4), helios.DataLoaderParams(batch_size=4)
        )


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    ema = EMA(decay=0.5, network="net")
    # Two updates: the mean of three would be rounded.
    swa = SWA(start=3, every=4, network="other", plug_id="swa")
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        valid_frequency=4,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=8,
        print_banner=False,
        use_cpu=True,
        plugins=[ema, swa, Recorder(record)],
        **options,
    )
    model = Learner(record, "averaged")
    trainer.fit(model, Data())
    for plugin, network in ((ema, "net"), (swa, "other")):
        average = plugin.averaged_state_dict(model, network)
        content = {name: bits(value) for name, value in average.items() if "running" not in name}
        record.end.append(f"{plugin.plug_id} {plugin.num_updates} {content}")
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
