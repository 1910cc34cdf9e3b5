"""Streams of Hugging Face `datasets`: killed and resumed with equal bits.

A stand-in with the same protocol always runs; where the library is installed, it runs too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import helios
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.kills import KillAt, run_in_child

NUM_SHARDS, PER_SHARD = 4, 5
NUM_ROWS = NUM_SHARDS * PER_SHARD
BATCH_SIZE = 3
TOTAL = 12
"""A pass of seven batches, and a part of another."""


class StandIn(IterableDataset[Any]):
    """A stream with the protocol of Hugging Face's."""

    def __init__(self) -> None:
        self.position = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.position < NUM_ROWS:
            self.position += 1
            yield {"row": torch.tensor(float(self.position - 1))}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.epoch = state_dict["position"], state_dict["epoch"]


def _rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(PER_SHARD):
            yield {"row": float(shard * PER_SHARD + number)}


def _hugging_face() -> Any:
    datasets: Any = importlib.import_module("datasets")
    options = {"shards": list(range(NUM_SHARDS))}
    stream = datasets.IterableDataset.from_generator(_rows, gen_kwargs=options)
    return stream.with_format("torch")


_MAKERS = {"stand-in": StandIn, "datasets": _hugging_face}


class Data(helios.DataModule):
    """The data of a stream."""

    unsaved = ("made",)

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=BATCH_SIZE)
        self._train_dataset = self._create_dataset(self.made, params)


class Follower(helios.Model):
    """Follows the rows that it sees, and writes them down with its weight."""

    unsaved = ("log",)

    def __init__(self, log: Path) -> None:
        super().__init__("follower")
        self.log = log

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(2)
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        rows = batch["row"]
        weight = self.net.weight.detach().numpy().tobytes().hex()
        with self.log.open("a") as file:
            file.write(json.dumps([state.global_iteration, rows.tolist(), weight]) + "\n")
        noise = 0.1 * torch.rand(1)
        loss: Tensor = (self.net(rows.unsqueeze(1) / NUM_ROWS) - noise).square().mean()
        return loss


def _train(folder: Path, data: Data, *plugins: Plugin) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_root=folder,
        chkpt_frequency=2,
        use_cpu=True,
        print_banner=False,
        plugins=list(plugins),
    )
    trainer.fit(Follower(folder / "log"), data)


def _start(folder: Path, make: Callable[[], Any], kill_at: int | None = None) -> int:
    folder.mkdir(exist_ok=True)
    plugins = [] if kill_at is None else [KillAt("on_training_batch_end", kill_at)]
    return run_in_child(lambda: _train(folder, Data(make()), *plugins), folder / "outcome")


def _read(folder: Path) -> dict[int, Any]:
    """Return what was seen by iteration; what was done again must have been the same again."""
    found: dict[int, Any] = {}
    for line in (folder / "log").read_text().splitlines():
        number, *seen = json.loads(line)
        assert found.setdefault(number, seen) == seen, f"iteration {number} was another one again"
    return found


def _sidecars(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("follower/*_iter_*.json"))]
    assert found
    return found


def _check_resumes(make: Callable[[], Any], folder: Path) -> None:
    (folder / "whole").mkdir()
    _train(folder / "whole", Data(make()))
    assert _start(folder / "killed", make, 5) == -9
    assert _start(folder / "killed", make, 9) == -9
    assert _start(folder / "killed", make) == 0
    whole = _read(folder / "whole")
    assert sorted(whole) == list(range(1, TOTAL + 1))
    assert _read(folder / "killed") == whole


@pytest.fixture(params=_MAKERS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return which stream is used; its library is there."""
    if request.param == "datasets":
        pytest.importorskip("datasets")
        # Its progress bars leave a thread.
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    return str(request.param)


def test_a_stream_goes_on_after_kills(name: str, tmp_path: Path) -> None:
    _check_resumes(_MAKERS[name], tmp_path)
    for sidecar in _sidecars(tmp_path / "killed"):
        assert sidecar["level"] == "restart"
        (claim,) = sidecar["claims"]
        assert claim.startswith("claimed by ")
        assert claim.endswith(", tried at the first start")
