"""What steps and later saves alone show: the scale of losses, tables, findings and claims."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

import helios
from helios.cli import main
from tests.golden.full_state.own_places import Place
from tests.golden.full_state.scaled import Data
from tests.golden.today.exact import Exact, ExactModel, Record, bits

NAME = "facts"
TOTAL = 8
SAVED = (3, 7)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)
        self.callback: Any = None

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self.callback = lambda: ids
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        # The gradient of a loss is the factor by which it is scaled.
        number = state.global_iteration
        if loss.requires_grad:
            loss.register_hook(lambda scale: self.record.steps.append(f"{number} {bits(scale)}"))
        return loss

    def on_training_start(self) -> None:
        self.record.line("tables", bits(dict(self.loss_items)), bits(dict(self.metrics)))

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, numbers = batch
        return {"error": ((self.net(ids, numbers) - ids).abs().sum(), 1)}


class WithValidation(Data):
    def valid_dataloader(self) -> Any:
        return [(torch.tensor([1, 2]), torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]]))], None


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        valid_frequency=3,
        chkpt_frequency=1,
        chkpt_root=root,
        precision=helios.Precision.fp16(init_scale=4.0, growth_interval=2),
        random_seed=22,
        print_banner=False,
        use_cpu=True,
        plugins=[Place(Record())],
        **options,
    )
    trainer.fit(Learner(record, NAME), WithValidation())
    newest = helios.find_last_checkpoint(root / NAME)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["inspect", str(newest), "--json"]) == 0
    told = json.loads(printed.getvalue())["sidecar"]
    record.end += [f"{key} {told[key]}" for key in ("level", "claims")]
    record.end += [f"missing {sorted(told['missing'])}"]
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
