"""Evaluations, a finished ``fit`` and the process that started ranks find all state of a run.

The optimizer keeps other weights for evaluation than for training, and swaps them in a hook. The
reference is a loop written by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import helios
from helios import DataLoaderParams, Trainer
from helios.loops import EpochLoop
from helios.plugins import Plugin
from tests.support.kills import KillAt, run_in_child
from tests.support.ranks import let_launcher_start_from_server

EPOCHS, BATCHES = 3, 4


class Swapping(torch.optim.Optimizer):
    """Schedule-free SGD: ``eval`` and ``train`` swap the parameters in place."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": True})

    @torch.no_grad()
    def _swap(self, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] is not trains:
                group["trains"] = trains
                weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def eval(self) -> None:
        self._swap(trains=False)

    def train(self) -> None:
        self._swap(trains=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            group["k"] += 1
            for parameter in [each for each in group["params"] if each.grad is not None]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                weight = group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1)
                parameter.add_(parameter.grad, alpha=weight)
                z.sub_(parameter.grad, alpha=group["lr"])


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(BATCHES * 6, 3, generator=torch.Generator().manual_seed(1))
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        return self.x[index], self.x[index].sum().reshape(1)


class Data(helios.DataModule):
    def setup(self) -> None:
        self.num_epochs = 0
        self._train_dataset = self._create_dataset(Rows(), DataLoaderParams(batch_size=6))
        self._valid_dataset = self._create_dataset(Rows(), DataLoaderParams(batch_size=6))
        self._test_dataset = self._predict_dataset = self._valid_dataset


class Net(helios.Model):
    unsaved = ("seen",)

    def __init__(self) -> None:
        super().__init__("net")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(3, 1)
        with torch.no_grad():
            self.net.weight.fill_(0.1)
            self.net.bias.fill_(0.2)
        self.noise = torch.Generator().manual_seed(4)
        self.build(fast_init=fast_init)

    def build(self, *, fast_init: bool) -> None:
        self.optimizer = Swapping(self.net.parameters())
        self.scheduler = StepLR(self.optimizer, 5, gamma=0.5)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_training_epoch_end(self, current_epoch: int) -> None:
        torch.rand((), generator=self.noise)
        self.trainer.datamodule.num_epochs += 1  # type: ignore[union-attr]
        if current_epoch == 2:
            self.net.bias.requires_grad_(False)

    def valid_step(self, batch: Any, step: int) -> None:
        self.seen = weights_of(self.net)

    test_step = valid_step
    predict_step = valid_step

    def on_testing_start(self) -> None:
        super().on_testing_start()
        self.optimizer.eval()

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.optimizer.eval()

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        self.optimizer.train()

    on_predicting_start = on_testing_start


class Counting(EpochLoop):
    num_begun = 0

    def on_run_start(self, *args: Any) -> None:
        super().on_run_start(*args)
        self.num_begun += 1


def weights_of(net: nn.Module) -> list[bytes]:
    return [bytes(part.detach().numpy().tobytes()) for part in net.state_dict().values()]


def by_hand(epochs: int) -> list[bytes]:
    """Return the weights for evaluation after a loop without Helios."""
    model, rows = Net(), Rows()
    model.setup()
    for epoch in range(1, epochs + 1):
        for batch in rows.x.split(6):
            target = batch.sum(dim=1, keepdim=True)
            nn.functional.mse_loss(model.net(batch), target).backward()
            model.optimizer.step()
            model.scheduler.step()
            model.optimizer.zero_grad()
        model.net.bias.requires_grad_(epoch < 2)
    model.optimizer.eval()
    return weights_of(model.net)


def make(root: Path | None, *plugins: Plugin, epochs: int = EPOCHS, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"chkpt_frequency": None if root is None else 1}
    defaults |= {"use_cpu": True, "print_banner": False, "plugins": plugins}
    trainer = Trainer(chkpt_root=root, total_steps=epochs, **defaults | options)
    trainer.fit_loop.connect(epoch_loop=Counting())
    return trainer


@pytest.mark.parametrize(
    ("call", "is_killed"), [("test", True), ("validate", False), ("predict", True)]
)
def test_a_hook_of_an_evaluation_finds_the_state_of_the_checkpoint(
    call: str, is_killed: bool, tmp_path: Path
) -> None:
    """Also that of a run which a kill has cut off, or which trains meanwhile."""
    kill = KillAt("on_training_step_end", 2 * BATCHES + 2 if is_killed else 10**6)
    work = lambda: make(tmp_path, kill).fit(Net(), Data())  # noqa: E731
    assert run_in_child(work, tmp_path / "result") == (-9 if is_killed else 0)
    path = helios.find_last_checkpoint(tmp_path / "net")
    assert path is not None
    epoch = helios.load_checkpoint(path)["training_state"].global_epoch
    assert (epoch == EPOCHS) is not is_killed
    model = Net()
    getattr(make(tmp_path), call)(model, Data())
    assert model.seen == by_hand(epoch)


def state_after(trainer: Trainer, model: Net, data: Data) -> list[Any]:
    """Return all that a script can reach after ``fit``; evaluates the weights."""
    rows = data.train_dataset
    assert isinstance(rows, Rows)
    found = [model.scheduler.state_dict(), model.noise.get_state().tolist()]
    found += [data.num_epochs, rows.num_read, model.net.bias.requires_grad]
    found += [trainer.fit_loop.epoch_loop.num_begun]  # type: ignore[attr-defined]
    model.optimizer.eval()
    return [*found, weights_of(model.net)]


def test_a_finished_run_is_found_as_training_has_left_it(tmp_path: Path) -> None:
    trainer, model, data = make(tmp_path), Net(), Data()
    assert trainer.fit(model, data)
    expected = state_after(trainer, model, data)
    assert expected[-1] == by_hand(EPOCHS)
    for _ in range(2):
        trainer, model, data = make(tmp_path), Net(), Data()
        assert trainer.fit(model, data)
        trainer.test(model, data)
        assert model.seen == expected[-1]
        model.optimizer.train()
        trainer.fit(model, data)
        assert state_after(trainer, model, data) == expected


@pytest.mark.parametrize("has_folder", [False, True])
def test_after_ranks_the_model_is_that_of_a_training_in_this_process(
    has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_launcher_start_from_server(monkeypatch)
    model, data = Net(), Data()
    make(None, num_replicas=2).fit(model, data)
    model.optimizer.eval()
    expected = weights_of(model.net)
    trainer = make(tmp_path if has_folder else None, num_replicas=2, nproc=2)
    model, data = Net(), Data()
    assert trainer.fit(model, data)
    assert (model.scheduler.last_epoch, data.num_epochs) == (6, EPOCHS)
    trainer.test(model, data)
    assert data.num_epochs == EPOCHS
    model.optimizer.eval()
    assert weights_of(model.net) == expected
