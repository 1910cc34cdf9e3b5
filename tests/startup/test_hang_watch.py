"""A run that stands still says what it waits for; ranks that can speak say it once."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import helios
from helios import DataLoaderParams
from tests.support.ranks import run_ranks

SECONDS = 0.6
# Threads of several ranks have to come to their turn in half of it.
SECONDS_OF_RANKS = 1.5
CLOCK = r"\d\d:\d\d:\d\d"


class Lines(logging.Handler):
    """The warnings of Helios."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("helios").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def wait_for(self, count: int) -> None:
        """Wait until there are so many."""
        deadline = time.monotonic() + 60
        while len(self.texts) < count and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def lines() -> Iterator[Lines]:
    found = Lines()
    yield found
    logging.getLogger("helios").removeHandler(found)


class Samples(Dataset[Any]):
    """Some numbers; in a worker, one of them comes when a file is there."""

    def __init__(self, gate: Path | None = None) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == 9 and self.gate is not None and not self.gate.exists():
            time.sleep(0.01)
        return torch.tensor([float(index)])


class Data(helios.DataModule):
    def __init__(self, num_workers: int = 0, gate: Path | None = None) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.gate = gate

    def setup(self) -> None:
        params = DataLoaderParams(batch_size=4, num_workers=self.num_workers)
        self._train_dataset = self._create_dataset(Samples(self.gate), params)


class Net(helios.Model):
    unsaved = ("act",)

    def __init__(self, act: Any = None) -> None:
        super().__init__("net")
        self.act = act

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        if self.act is not None and state.global_iteration == 2:
            self.act(self)
        return self.net(batch).square().mean()


def make_trainer(seconds: float | None = SECONDS, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        total_steps=1, use_cpu=True, print_banner=False, hang_warning=seconds, **options
    )


@pytest.mark.shows("P139")
def test_a_loader_that_hangs_is_named_again_and_again(tmp_path: Path, lines: Lines) -> None:
    gate = tmp_path / "gate"

    def open_gate() -> None:
        lines.wait_for(2)
        gate.touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    assert make_trainer().fit(Net(), Data(num_workers=1, gate=gate))
    opener.join()
    wanted = rf"step 3: the training waits for its loader since {CLOCK}\."
    assert len(lines.texts) == 2
    assert all(re.fullmatch(wanted, text) for text in lines.texts), lines.texts


@pytest.mark.shows("P139")
def test_code_of_the_user_is_named_by_what_helios_has_called(lines: Lines) -> None:
    def helper(model: Net) -> None:
        lines.wait_for(1)

    assert make_trainer().fit(Net(helper), Data())
    file = Path(__file__).name
    wanted = rf"step 2: the training is in train_step \({file}\) since {CLOCK}\."
    assert re.fullmatch(wanted, lines.texts[0])


@pytest.mark.shows("P139")
def test_a_long_validation_that_moves_is_not_named(lines: Lines) -> None:
    class Checked(Data):
        def setup(self) -> None:
            super().setup()
            params = DataLoaderParams(batch_size=2)
            self._valid_dataset = self._create_dataset(Samples(), params)

    class Slow(Net):
        def valid_step(self, batch: Any, step: int) -> None:
            time.sleep(0.2)

    begin = time.monotonic()
    assert make_trainer(1.2, valid_frequency=1).fit(Slow(), Checked())
    assert time.monotonic() - begin > 1.2
    assert lines.texts == []


def _fit_with_late_rank(
    rank: int, late: int, said: Path, *, adds: bool = False, **options: Any
) -> list[str]:
    """Train on ranks of which one is late until rank 0 has said so; returns what this rank says."""
    lines = Lines()

    def report() -> None:
        lines.wait_for(1)
        said.touch()

    if rank == 0:
        threading.Thread(target=report, daemon=True).start()

    def wait(model: Net) -> None:
        while rank == late and not said.exists():
            time.sleep(0.01)
        if adds:
            dist.all_reduce(torch.zeros(1))

    assert make_trainer(SECONDS_OF_RANKS, **options).fit(Net(wait), Data())
    return lines.texts


@pytest.mark.shows("P139")
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_wait_name_the_one_that_they_wait_for(late: int, tmp_path: Path) -> None:
    found = run_ranks(_fit_with_late_rank, 3, late, tmp_path / "said")
    others = "ranks 1, 2" if late == 0 else "ranks 0, 2"
    text = (
        rf"step 2: {others} wait in the exchange of gradients for rank {late}, which is in "
        rf"train_step \({Path(__file__).name}\) since {CLOCK}\."
    )
    assert [bool(texts) for texts in found] == [True, False, False]
    assert re.fullmatch(text, found[0][0])


_STACKS = """
import os, signal, sys, helios
from tests.startup.test_hang_watch import Data, Net, make_trainer

def show(model):
    os.kill(os.getpid(), signal.SIGQUIT)

if sys.argv[1] == "own":
    signal.signal(signal.SIGQUIT, lambda *_: print("mine", file=sys.stderr))
else:
    # The second as a shell does it for a command in the background.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL if sys.argv[1] == "default" else signal.SIG_IGN)
make_trainer().fit(Net(show), Data())
print("it went on", file=sys.stderr)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGQUIT"), reason="the system has no SIGQUIT")
@pytest.mark.parametrize("kind", ["default", "background", "own"])
def test_sigquit_shows_all_stacks_and_the_training_goes_on(kind: str) -> None:
    command = [sys.executable, "-c", _STACKS, kind]
    environment = {**os.environ, "PYTHONPATH": str(Path(helios.__file__ or "").parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "it went on" in done.stderr
    assert ("mine" in done.stderr) == (kind == "own")
    assert (" in train_step" in done.stderr) == (kind != "own")
