"""Sharded runs save in parallel, survive kills, full disks and damage, and resume anywhere."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

import helios
from helios.checkpoint import file_names
from helios.core import sharded_tensors
from helios.errors import SaveError
from helios.plugins import Plugin
from helios.storage import files
from helios.storage.dcp_folder import TensorFolder
from tests.checkpoint.test_sharded_folders import damage
from tests.support.kills import kill_self
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import Network, Sharded, fit, read_bits, train

EACH = {"chkpt_frequency": 1}
SYNC = {"store": helios.CheckpointStore(is_async=False)}
OPERATIONS = [
    *((files, name) for name in ("create", "write", "replace", "unlink", "make_folder")),
    *((FileSystem, "create_stream"), (torch, "save"), (os, "fsync"), (FileSystem, "rename")),
]


def newest(folder: Path) -> Path:
    found = helios.find_last_checkpoint(folder / "sharded")
    assert found is not None
    return found


class NoGathering(Quiet):
    """A save must not make a tensor whole."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert sharded_tensors.is_sharded(checkpoint["model"]["objects"]["net"]["head.weight"])


@pytest.mark.shows("P92")
@pytest.mark.parametrize(
    "options", [{}, pytest.param(SYNC, marks=pytest.mark.full)], ids=["async", "sync"]
)
def test_each_process_writes_its_rows_and_nobody_gathers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    setting = Sharded(3, total_steps=2, options=options)
    train(tmp_path / "run", 2, setting, NoGathering())
    train(tmp_path / "whole", 1, replace(setting, sharding="none"))
    path, whole = newest(tmp_path / "run"), newest(tmp_path / "whole")
    assert (path.suffix, whole.suffix) == (".ckpt", ".pth")
    sizes = [each.stat().st_size for each in sorted(path.glob("*.distcp"))]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * sum(sizes)
    tensors, net = TensorFolder(path).tensors, "model.objects.net"
    # The tied weight is in the files once.
    assert tensors[f"{net}.embedding.weight"].place == tensors[f"{net}.head.weight"].place
    states = [helios.load_checkpoint(each)["model"]["objects"] for each in (path, whole)]
    for name, tensor in states[1]["net"].items():
        assert states[0]["net"][name].equal(tensor), name
    for number, table in states[1]["optimizer"]["state"].items():
        for name, tensor in table.items():
            assert states[0]["optimizer"]["state"][number][name].equal(tensor), (number, name)
    network = Network(has_norm=True)
    helios.load_weights(path, network)
    assert all(network.state_dict()[n].equal(part) for n, part in states[1]["net"].items())


class KillInSave(Quiet):
    """Sends SIGKILL to a rank at a file operation of the third save."""

    def __init__(self, rank: int, number: int) -> None:
        super().__init__()
        self.killed_rank = rank
        self.number = number
        self.is_due = False

    unsaved = ("is_due", "number")

    def on_fit_start(self) -> None:
        if self.context.global_rank == self.killed_rank:
            for holder, name in OPERATIONS:
                setattr(holder, name, self._wrap(getattr(holder, name)))

    def _wrap(self, operation: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.number -= self.is_due
            if self.is_due and self.number == 0:
                kill_self()
            return operation(*args, **kwargs)

        return wrapped

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.is_due = self.context.state.global_iteration == 3


KILLS = [(0, number) for number in range(1, 100, 8)] + [(1, number) for number in range(1, 40, 4)]


@pytest.mark.shows("P94")
@pytest.mark.parametrize(
    ("rank", "number"),
    [pytest.param(*case, marks=() if case == (1, 5) else pytest.mark.full) for case in KILLS],
)
def test_a_kill_in_a_save_costs_no_bit_in_other_processes(
    tmp_path: Path, rank: int, number: int
) -> None:
    setting = Sharded(3, total_steps=4, options=EACH | (SYNC if number % 2 else {}))
    train(tmp_path / "undisturbed", 1, replace(setting, sharding="none"))
    with pytest.raises(RankError, match="code -9"):
        train(tmp_path / "killed", 2, setting, KillInSave(rank, number))
    train(tmp_path / "killed", 3, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
    left = {path.suffix for path in (tmp_path / "killed" / "sharded").iterdir()}
    assert ".tmp" not in left


class FullDisk(Quiet):
    """The disk of one rank refuses its rows in some saves."""

    def __init__(self, rank: int, *iterations: int) -> None:
        super().__init__()
        self.full_rank = rank
        self.iterations = iterations
        self.is_full = False

    unsaved = ("is_full",)

    def on_fit_start(self) -> None:
        save = torch.save

        def refuse(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            # What processes send each other is no file.
            is_full = self.is_full and not isinstance(file, io.BytesIO)
            save(value, _FullFile() if is_full else file, *args, **kwargs)

        if self.context.global_rank == self.full_rank:
            torch.save = refuse

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.is_full = self.context.state.global_iteration in self.iterations


class _FullFile(io.BytesIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fit_or_fail(rank: int, folder: Path, setting: Sharded, *plugins: Plugin) -> str:
    try:
        fit(rank, folder, setting, *plugins)
    except SaveError as error:
        return str(error)
    return ""


@pytest.mark.shows("P95")
@pytest.mark.parametrize(
    ("rank", "is_async"),
    [
        (1, True),
        pytest.param(0, True, marks=pytest.mark.full),
        pytest.param(1, False, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_of_one_rank_ends_all_with_the_same_error(
    tmp_path: Path, rank: int, is_async: bool
) -> None:
    store = helios.CheckpointStore(is_async=is_async, on_save_error="raise")
    setting = Sharded(2, total_steps=5, options={"store": store, **EACH})
    plugin = FullDisk(rank, 2)
    texts = run_ranks(fit_or_fail, 2, tmp_path / "run", setting, plugin)
    assert texts[0] == texts[1]
    assert f"rank {rank} could not write its part" in texts[0]
    assert os.strerror(errno.ENOSPC) in texts[0]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["sharded_epoch_1_iter_1.ckpt"]
    train(tmp_path / "undisturbed", 1, setting)
    train(tmp_path / "run", 1, setting)
    assert read_bits(tmp_path / "run") == read_bits(tmp_path / "undisturbed")


@pytest.mark.shows("P95")
def test_a_save_that_one_rank_could_not_write_leaves_nothing_and_training_continues(
    tmp_path: Path,
) -> None:
    train(tmp_path / "run", 2, Sharded(2, total_steps=3, options=EACH), FullDisk(1, 2))
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "sharded_epoch_1_iter_1.ckpt",
        "sharded_epoch_1_iter_3.ckpt",
    ]
    assert not list((tmp_path / "run" / "sharded").glob("*.tmp"))


def checkpoints(folder: Path) -> list[Path]:
    return file_names.find_checkpoints(folder / "sharded")


@pytest.mark.shows("P96")
def test_damage_that_only_one_process_can_see_leads_all_to_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    setting = Sharded(2, total_steps=3, options=EACH)
    train(tmp_path / "undisturbed", 1, replace(setting, total_steps=4))
    train(tmp_path / "run", 2, setting)
    path = newest(tmp_path / "run")
    part = path / "__1_0.distcp"
    damage(part, part.stat().st_size // 2)
    train(tmp_path / "run", 2, replace(setting, total_steps=4))
    assert read_bits(tmp_path / "run") == read_bits(tmp_path / "undisturbed")
    assert path.with_name(f"{path.name}.damaged").is_dir()
