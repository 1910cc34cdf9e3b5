"""Names of the historical API, used as scripts for Helios 1 use them (API.md sections 11 to 15).

The classifier below is written in the manner of such scripts: the model steps its own optimizer,
saves its own state, logs by the package's loggers and fills the tables by hand.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
import helios.core as hlc
import helios.core.logging as hll
import helios.data as hld
import helios.model as hlm
import helios.trainer as hlt
from helios.core import rng
from tests.support.kills import kill_self, run_in_child
from tests.support.runs import digest


class Points(Dataset):
    """Points of three classes, with noise of all generators; each knows its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        noise = rng.get_default_numpy_rng().generator.normal(size=4).astype("float32")
        return (
            torch.sin(torch.arange(4) * (index + 1.0)) + torch.from_numpy(noise),
            index % 3,
            index,
        )


class PointsModule(hld.DataModule):
    """Changes one table of options between the data sets: each keeps a copy."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers

    def setup(self) -> None:
        params = hld.DataLoaderParams()
        params.batch_size = 5
        params.shuffle = True
        params.drop_last = True
        params.num_workers = self.num_workers
        self._train_dataset = self._create_dataset(Points(23), params)
        params.shuffle = params.drop_last = False
        self._valid_dataset = self._create_dataset(Points(7), params)
        self._test_dataset = self._create_dataset(Points(7), {"batch_size": 4, "unknown": 1})


@dataclass
class Best:
    """A type of the user's own in a checkpoint."""

    accuracy: float = -1.0
    cycle: int = -1


class Classifier(hlm.Model):
    """A model as Helios 1 wanted them."""

    unsaved = ("_seen",)  # what this process has seen, for the test

    def __init__(self, kill_at: int = 0) -> None:
        super().__init__("classifier")
        self._kill_at = kill_at
        self._seen: dict[int, tuple[list[int], str]] = {}
        self._fast_init: list[bool] = []

    def setup(self, fast_init: bool = False) -> None:
        self._fast_init.append(fast_init)
        self._net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))
        self._net = self._net.to(self.device)
        self._best = Best()
        if fast_init:
            return
        self._criterion = nn.CrossEntropyLoss().to(self.device)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.1, momentum=0.9)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, step_size=3, gamma=0.8)

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self._net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "best": self._best,
        }

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self._fast_init.append(fast_init)
        self._net.load_state_dict(state_dict["net"])
        self._best = state_dict["best"]
        if not fast_init:
            self._optimizer.load_state_dict(state_dict["optimizer"])
            self._scheduler.load_state_dict(state_dict["scheduler"])

    def types_for_safe_load(self) -> list[Any]:
        return [Best]

    def train(self) -> None:
        self._net.train()

    def eval(self) -> None:
        self._net.eval()

    def append_metadata_to_chkpt_name(self, chkpt_name: str) -> str:
        return f"{chkpt_name}_accuracy_{self._best.accuracy:.2f}"

    def append_to_banner(self, banner: str) -> str:
        return f"{banner}\nThree classes of points"

    def on_training_start(self) -> None:
        writer = hlc.get_from_optional(hll.get_tensorboard_writer())
        writer.add_graph(self._net, torch.zeros(1, 4).to(self.device))

    def train_step(self, batch: Any, state: hlt.TrainingState) -> None:
        points, labels, ids = batch
        self._ids = ids.tolist()
        self._optimizer.zero_grad()
        loss = self._criterion(self._net(points.to(self.device)), labels.to(self.device))
        loss.backward()
        self._optimizer.step()
        self._loss_items["loss"] = loss

    def on_training_batch_end(self, state: hlt.TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        loss = self._loss_items["loss"]
        self._scheduler.step()
        self._seen[state.global_iteration] = self._ids, loss.detach().numpy().tobytes().hex()
        if state.global_iteration == self._kill_at:
            kill_self()
        if should_log:
            mean = self._running_losses["loss"].item() / state.running_iter
            hll.get_root_logger().info(
                f"[{state.global_epoch:3d}] [{state.global_iteration:5d}] loss {loss:.3f}, "
                f"{mean:.3f}, {state.average_iter_time:.2f} s"
            )
            writer = hlc.get_from_optional(hll.get_tensorboard_writer())
            writer.add_scalar("train/loss", loss.item(), state.global_iteration)
            writer.add_scalar("train/mean loss", mean, state.global_iteration)

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self._val_scores["total"] = self._val_scores["correct"] = 0

    def valid_step(self, batch: Any, step: int) -> None:
        points, labels, _ = batch
        found = self._net(points).argmax(dim=1)
        self._val_scores["total"] += len(labels)
        self._val_scores["correct"] += (found == labels).sum().item()

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        accuracy = self._val_scores["correct"] / self._val_scores["total"]
        self._val_scores["accuracy"] = accuracy
        writer = hlc.get_from_optional(hll.get_tensorboard_writer())
        writer.add_scalar("accuracy", accuracy, validation_cycle)

    def have_metrics_improved(self) -> bool:
        if self._val_scores["accuracy"] <= self._best.accuracy:
            return False
        self._best = Best(self._val_scores["accuracy"], self.trainer.model is self)
        return True

    def on_training_end(self) -> None:
        writer = hlc.get_from_optional(hll.get_tensorboard_writer())
        writer.add_hparams({"lr": 0.1}, {"accuracy": self._val_scores["accuracy"]})

    def on_testing_start(self) -> None:
        super().on_testing_start()
        self._test_scores["count"] = 0

    def test_step(self, batch: Any, step: int) -> None:
        self._test_scores["count"] += len(batch[0])


_UNITS: dict[str, dict[str, Any]] = {
    "epoch": {"total_steps": 3, "valid_frequency": 1, "chkpt_frequency": 1},
    "iteration": {"total_steps": 12, "valid_frequency": 4, "chkpt_frequency": 3},
}


def make_trainer(folder: Path, unit: str = "epoch", **options: Any) -> hlt.Trainer:
    """Return a trainer with everything that such a script switches on."""
    return hlt.Trainer(
        **{
            "run_name": "points",
            "train_unit": unit,
            "print_frequency": 2,
            "use_cpu": True,
            "enable_deterministic": True,
            "enable_tensorboard": True,
            "enable_file_logging": True,
            "enable_progress_bar": True,
            "chkpt_root": folder / "chkpt",
            "log_path": folder / "logs",
            "run_path": folder / "runs",
            **_UNITS[unit],
            **options,
        }
    )


def run_script(folder: Path, unit: str, num_workers: int, kill_at: int = 0) -> dict[str, Any]:
    """Train as a script of Helios 1 does; return what must be equal."""
    model = Classifier(kill_at)
    # A kill comes after the save before it.
    store = helios.CheckpointStore(is_async=False)
    assert make_trainer(folder, unit, store=store).fit(model, PointsModule(num_workers)) is True
    return {
        "seen": model._seen,
        "weights": digest(model.state_dict()["net"]),
        "optimizer": digest(model.state_dict()["optimizer"]),
        "scheduler": model.state_dict()["scheduler"],
        "scores": dict(model._val_scores),
        "best": model._best,
    }


def points_of(folder: Path) -> list[tuple[str, int, float]]:
    """Return all scalars of the run below a folder, doubles included."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (run,) = (path for path in folder.iterdir() if path.name.startswith("points_"))
    return sorted(
        (value.tag, event.step, value.tensor.float_val[0])
        for path in run.glob("events.out.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tensor.float_val
    )


@pytest.mark.shows("H45")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("unit", _UNITS)
def test_a_script_of_helios_1_is_killed_and_resumes_bit_for_bit(unit: str, tmp_path: Path) -> None:
    """The model's own state methods, its own steps, its own logging."""
    whole = run_script(tmp_path / "whole", unit, 0)
    killed = tmp_path / "killed"
    for kill_at in (6, 8):
        work = functools.partial(run_script, killed, unit, 0, kill_at)
        assert run_in_child(work, tmp_path / "result") == -9
    resumed = run_script(killed, unit, num_workers=2)
    seen = resumed.pop("seen")
    assert 0 < len(seen) < 12
    assert seen == {number: whole["seen"][number] for number in seen}
    assert {name: whole[name] for name in resumed} == resumed
    assert whole["scores"]["total"] == 7
    points = points_of(tmp_path / "whole" / "runs")
    assert points_of(killed / "runs") == points
    # The script logs this curve itself, as Helios does: each point stands there once.
    assert [step for tag, step, _ in points if tag == "train/loss"] == [2, 4, 6, 8, 10, 12]
    (log,) = (killed / "logs").glob("points_*.log")
    assert log.read_text().count("Three classes of points") == 3


@pytest.mark.shows("H56")
def test_a_script_of_helios_1_is_tested_on_its_newest_checkpoint(tmp_path: Path) -> None:
    """`fast_init` in `setup` and `load_state_dict`."""
    whole = run_script(tmp_path, "epoch", 0)
    model = Classifier()
    assert make_trainer(tmp_path).test(model, PointsModule())
    assert model._fast_init == [True, True]
    assert digest(model._net.state_dict()) == whole["weights"]
    assert model._test_scores == {"count": 7}


PUBLISHED = """run_name='' train_unit=<TrainingUnit.EPOCH: 1> total_steps=0.0 valid_frequency='auto'
chkpt_frequency='auto' print_frequency='auto' accumulation_steps=1 enable_cudnn_benchmark=False
enable_deterministic=False early_stop_cycles=None use_cpu=None gpus=None random_seed=None
enable_tensorboard=False enable_file_logging=False capture_warnings=False enable_progress_bar=False
chkpt_root=None log_path=None run_path=None src_root=None import_prefix='' print_banner=True"""


@pytest.mark.shows("H66", "R34")
def test_the_arguments_of_a_trainer_keep_order_and_defaults() -> None:
    """All may be given by position."""
    found = inspect.signature(hlt.Trainer).parameters.values()
    by_position = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    shown = " ".join(f"{each.name}={each.default!r}" for each in by_position)
    assert shown == " ".join(PUBLISHED.split("\n"))
