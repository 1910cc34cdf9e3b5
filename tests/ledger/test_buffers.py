"""The last line of a ledger has the persistent buffers, and comparisons of runs name them."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.cli.commands import main
from helios.ledger import Replay, diff
from helios.ledger.compare import BUFFERS
from helios.ledger.line import TAIL_BYTES

TOTAL = 4


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.linspace(-1, 1, 12).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(TensorDataset(x, 2 * x), params)


class Net(helios.Model):
    """No gradient and no loss sees its buffers.

    Args:
        gain: what is added to a buffer in each step.
        rate: the learning rate.
    """

    def __init__(self, *, gain: float = 0.5, rate: float = 0.1) -> None:
        super().__init__("net")
        self.gain, self.rate = gain, rate

    def setup(self, *, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.net.register_buffer("seen", torch.zeros(2))
        self.net.register_buffer("fixed", torch.tensor([1, 2, 3], dtype=torch.int16))
        self.net.register_buffer("empty", None)
        self.net.register_buffer("passing", torch.zeros(1), persistent=False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            self.net.seen += self.gain
            self.net.passing += 1
        return (self.net(x) - y).square().mean()


class Beside(Net):
    """Has a network that is not saved, and one with a buffer whose content cannot be read."""

    unsaved = ("teacher",)

    def setup(self, *, fast_init: bool = False) -> None:
        super().setup(fast_init=fast_init)
        self.teacher = nn.BatchNorm1d(1)
        self.parts = nn.ModuleDict({"table": nn.Module()})
        self.parts["table"].register_buffer("sparse", torch.eye(2).to_sparse())


def make_trainer(folder: Path, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        train_unit="iteration",
        **{"total_steps": TOTAL, "chkpt_frequency": 2} | options,
        chkpt_root=folder,
        random_seed=1,
        use_cpu=True,
        print_banner=False,
        enable_progress_bar=False,
    )


def train(folder: Path, model: helios.Model | None = None, **options: Any) -> Path:
    make_trainer(folder, **options).fit(model or Net(), Data())
    return folder / "net"


def replay(run: Path, model: helios.Model) -> Replay:
    return make_trainer(run.parent).replay(model, Data(), start=0)


def lines_of(run: Path) -> list[bytes]:
    return (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def hash_by_definition(dtype: str, shape: str, content: bytes) -> str:
    form = f"torch.{dtype} {shape}".encode()
    data = struct.pack("<I", len(form)) + form + struct.pack("<Q", zlib.crc32(content))
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return digest[::-1].hex()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that differs in a buffer only."""
    return train(tmp_path_factory.mktemp("other"), Net(gain=0.25))


@pytest.mark.shows("P136")
def test_the_last_line_has_the_hash_of_each_persistent_buffer(known: Path) -> None:
    *_, before, last = lines_of(known)
    content = json.loads(last)
    assert list(content)[-2] == "buffers"
    assert content["buffers"] == {
        "net.fixed": hash_by_definition("int16", "(3,)", struct.pack("<3h", 1, 2, 3)),
        "net.seen": hash_by_definition("float32", "(2,)", struct.pack("<2f", 2, 2)),
    }
    body = json.loads(before)["h"].encode() + last[:-TAIL_BYTES]
    assert content["h"] == hashlib.sha256(body).hexdigest()[:16]
    assert not any(b"buffers" in line for line in lines_of(known)[:-1])


@pytest.mark.shows("P136")
def test_runs_that_differ_in_a_buffer_only_are_not_equal(
    known: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(known), str(other)]) == 1
    found = diff(known, other)
    assert (found.iteration, found.what, found.num_equal) == (TOTAL, [BUFFERS], TOTAL)
    assert [*found.details["buffers"][0]] == [*found.details["buffers"][1]] == ["net.seen"]
    assert (found.may_begin_earlier, found.weights_at) == (True, TOTAL)
    first, named, *_ = capsys.readouterr().out.splitlines()
    assert first == "they differ at the latest from iteration 4 on, first in: buffers"
    assert named.startswith("  buffers: net.seen ")


@pytest.mark.shows("P136")
def test_a_replay_compares_buffers(known: Path) -> None:
    found = replay(known, Net())
    assert (found.is_equal, found.has_ended, found.not_compared) == (True, True, [])
    found = replay(known, Net(gain=0.25))
    assert (found.iteration, found.what) == (TOTAL, [BUFFERS])
    assert [*found.details["buffers"][0]] == ["net.seen"]


@pytest.mark.shows("P136")
def test_what_is_not_saved_does_not_count_and_what_cannot_be_read_is_null(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(number), Beside()) for number in range(2)]
    table = json.loads(lines_of(runs[0])[-1])["buffers"]
    assert [*table] == ["net.fixed", "net.seen", "parts.table.sparse"]
    assert table["parts.table.sparse"] is None
    found = diff(*runs)
    assert (found.is_equal, found.not_compared) == (True, [])
    assert main(["verify", str(runs[0])]) == 0
