"""A plugin and a loop that are gone for a while: their states are carried, and given back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import helios
from helios.loops import BatchLoop
from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    Numbers,
    Record,
    Recorder,
    bits,
    draw,
)

TOTAL = 9
SAVED = (5, 6)
# In the second of three starts the plugin and the loop are gone.
GONE = range(3, 7)


class Twice(BatchLoop):
    """Runs the step twice on every third batch; notes which, in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.repeated = 0, []

    @property
    def done(self) -> bool:
        return self.left == 0

    def on_run_start(self, batch: Any) -> None:
        self.batch = self.prepare(batch)
        self.left = 1 if self.session.state.global_iteration % 3 else 2

    def advance(self, batch: Any) -> None:
        self.optimizer_loop.run(self.batch)
        self.left -= 1

    def on_run_end(self) -> None:
        self.repeated.append((self.session.state.global_iteration, draw()))
        self.batch = None

    def state_dict(self) -> dict[str, Any]:
        return {"repeated": self.repeated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.repeated = state_dict["repeated"]


class Stop(helios.Plugin):
    """Interrupts a start, so that the script's next one goes on."""

    unsaved = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__("stop")
        self.number = number

    def setup(self) -> None: ...

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        if state.global_iteration == self.number:
            self.context.interrupt("the next start is another one")


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net")


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(14), params)


def start(root: Path, record: Record, stop: int, *, is_gone: bool, **options: Any) -> None:
    """Go on until the iteration ``stop``."""
    counting, staying = Counting(), Counting("staying")
    plugins = [staying, Recorder(record), Stop(stop)]
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=11,
        print_banner=False,
        use_cpu=True,
        signals=helios.Signals(on_interrupt="return"),
        plugins=plugins if is_gone else [counting, *plugins],
        **options,
    )
    loop = BatchLoop() if is_gone else Twice()
    trainer.fit_loop.epoch_loop.connect(batch_loop=loop)
    trainer.fit(Learner(record, "carried"), Data())
    for plugin in (counting, staying):
        record.end.append(f"{plugin.plug_id} {plugin.sums} {bits(plugin.last)}")
    record.end.append(f"repeated {getattr(loop, 'repeated', None)}")


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    """Go on in as many starts as it takes."""
    record = Record()
    newest = helios.find_last_checkpoint(root / "carried")
    number = 0
    if newest is not None:
        number = helios.load_checkpoint(newest)["training_state"].global_iteration
    if number < GONE.start:
        start(root, record, GONE.start, is_gone=False, **options)
    if number < GONE.stop - 1:
        start(root, record, GONE.stop - 1, is_gone=True, **options)
    start(root, record, TOTAL + 1, is_gone=False, **options)
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
