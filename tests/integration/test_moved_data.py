"""A resume with other data than before is told so, and the fetch that finds it leaves no trace."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import helios
from helios.errors import RunMismatchError
from helios.ledger.book import FILE_NAME
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.kills import kill_self
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.warned import collect_warnings

# Machines with few processors would have fewer workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
COUNT = 22
KEPT = 18
MOVED = "is not what the run was trained on"


class Rows(Dataset[torch.Tensor]):
    unsaved = ("shift",)

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.shift, float(torch.rand(1)), np.random.random()])


class Counting(Rows):
    """It counts, and its samples depend on how much it has fetched in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return super().__getitem__(index) + self.count


class Drawing(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * float(self.generator.random())


def draw(seed: int) -> list[int]:
    return [*map(int, np.random.default_rng(seed).permutation(COUNT))][:KEPT]


FORMS: dict[str, Callable[[int], Any]] = {
    "setup": lambda seed: Subset(Rows(), draw(seed)),
    "normalization": lambda seed: Rows(shift=float(seed)),
}
KINDS: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (Rows, Counting, Drawing)}


@dataclasses.dataclass(frozen=True)
class Make:
    """Makes the data of a form."""

    form: str
    seed: int

    def __call__(self) -> Any:
        return FORMS[self.form](self.seed)


class Data(helios.DataModule):
    def __init__(self, make: Callable[[], Any], **params: Any) -> None:
        super().__init__()
        self._make, self._params = make, params

    unsaved = ("data",)

    def setup(self) -> None:
        self.data = self._make()
        params = helios.DataLoaderParams(batch_size=4, shuffle=True, **self._params)
        self._train_dataset = self._create_dataset(self.data, params)


class Net(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-5)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return self.net(batch).square().mean()


class KillAfter(Quiet):
    """Kills the process in the step after an iteration."""

    unsaved = ("iteration",)

    def __init__(self, iteration: int) -> None:
        super().__init__("kill-after")
        self.iteration = iteration

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration > self.iteration > 0:
            kill_self()


def train(folder: Path, data: Data, *plugins: Plugin, **options: Any) -> None:
    usual: dict[str, Any] = {
        "train_unit": "iteration",
        "total_steps": 14,
        "chkpt_root": folder,
        "chkpt_frequency": 1,
        "store": helios.CheckpointStore(is_async=False),
        "use_cpu": True,
        "print_banner": False,
        "enable_progress_bar": False,
        "plugins": [*plugins],
    }
    helios.Trainer(**{**usual, **options}).fit(Net("net"), data)


def evidence(folder: Path) -> tuple[bytes, bytes]:
    """Return the ledger of a run, and its weights."""
    newest = max((folder / "net").glob("*.pth"), key=lambda p: int(p.stem.rpartition("_")[2]))
    state = torch.load(newest, weights_only=False)["model"]["objects"]["net"]
    return (folder / "net" / FILE_NAME).read_bytes(), state["weight"].numpy().tobytes()


def work(rank: int, folder: Path, seed: int, kill: int, options: dict[str, Any]) -> list[str]:
    """Train in a rank; return what it has logged of warnings and errors."""
    with collect_warnings() as messages:
        try:
            train(folder, Data(Make("setup", seed)), KillAfter(kill), num_replicas=3, **options)
        except RunMismatchError as error:
            messages.append(str(error))
    return messages


def test_processes_find_it_together(tmp_path: Path) -> None:
    before, after = 3, 2
    with pytest.raises(RankError):
        run_ranks(work, before, tmp_path, 1, 3, {})
    for rank, found in enumerate(
        run_ranks(work, after, tmp_path, 2, 0, {"on_incomplete": "raise"})
    ):
        assert MOVED in found[-1], rank
    first, *others = run_ranks(work, after, tmp_path, 2, 0, {"total_steps": 4})
    assert sum(MOVED in text for text in first) == 1
    assert not any(others)
    assert not any(run_ranks(work, before, tmp_path, 2, 0, {}))


def resume(
    caplog: pytest.LogCaptureFixture, folder: Path, make: Callable[..., Any], **how: Any
) -> list[str]:
    """Train with the data of one seed and, from a step on, of another; return the warnings."""
    stop, params = how.pop("stop", 7), how.pop("params", {})
    train(folder, Data(lambda: make(1), **params), total_steps=stop)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(folder, Data(lambda: make(2), **params), **how)
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("form", "num_workers", "stop"),
    [
        ("setup", 0, 7),
        # The first batch of an epoch, and the last one.
        *[("normalization", 2, stop) for stop in (7, 12)],
    ],
)
def test_other_content_of_equal_class_and_length_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, num_workers: int, stop: int
) -> None:
    params = {"num_workers": num_workers}
    (text,) = resume(caplog, tmp_path, FORMS[form], stop=stop, params=params)
    assert MOVED in text
    assert f"iteration {stop} (" in text
    assert "its first sample is" in text


def test_a_start_that_must_be_complete_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunMismatchError, match=MOVED):
        resume(caplog, tmp_path, FORMS["setup"], on_incomplete="raise")


@pytest.mark.parametrize(("kind", "num_replicas"), [("Rows", 3), ("Counting", 1), ("Drawing", 3)])
def test_the_fetch_leaves_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, num_replicas: int
) -> None:
    def run(folder: Path, **options: Any) -> None:
        train(folder, Data(KINDS[kind]), num_replicas=num_replicas, **options)

    run(tmp_path / "whole")
    # Inside of an epoch, at its end and at its first batch, with one replica and with three.
    for stop in (1, 3, 6, 7):
        run(tmp_path / "killed", total_steps=stop)
    with caplog.at_level(logging.INFO):
        run(tmp_path / "killed")
    assert evidence(tmp_path / "killed") == evidence(tmp_path / "whole")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert ("cannot be checked" in caplog.text) == (kind in ("Counting", "Drawing"))
