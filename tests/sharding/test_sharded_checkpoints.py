"""Sharded runs save in parallel, survive kills, full disks and damage, and resume anywhere."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import helios
from helios.checkpoint import file_names
from helios.core import sharded_tensors
from helios.errors import SaveError
from helios.plugins import Plugin
from helios.storage import files
from tests.checkpoint.test_sharded_folders import damage
from tests.support.kills import kill_self
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import (
    Data,
    Kill,
    Network,
    Sharded,
    ShardedModel,
    Words,
    fit,
    read_bits,
    train,
)

SYNC = {"store": helios.CheckpointStore(is_async=False)}
OPERATIONS = ("create", "write", "fsync", "replace", "unlink", "fsync_folder", "make_folder")


def newest(folder: Path) -> Path:
    found = helios.find_last_checkpoint(folder / "sharded")
    assert found is not None
    return found


class NoGathering(Plugin):
    """A save must not make a tensor whole."""

    def __init__(self) -> None:
        super().__init__("no-gathering")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert sharded_tensors.is_sharded(checkpoint["model"]["objects"]["net"]["head.weight"])


@pytest.mark.shows("P92")
@pytest.mark.parametrize("options", [{}, SYNC], ids=["async", "sync"])
def test_each_process_writes_its_rows_and_nobody_gathers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    setting = Sharded(3, total_steps=2, options=options)
    train(tmp_path / "run", 2, setting, NoGathering())
    train(tmp_path / "whole", 1, replace(setting, sharding="none"))
    path, whole = newest(tmp_path / "run"), newest(tmp_path / "whole")
    assert (path.suffix, whole.suffix) == (".ckpt", ".pth")
    sizes = [each.stat().st_size for each in sorted(path.glob("*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * sum(sizes)
    parts = [load_file(each) for each in sorted(path.glob("*.safetensors"))]
    # The tied weight is in the files once.
    assert "model.objects.net.embedding.weight" in parts[0]
    assert "model.objects.net.head.weight" not in parts[0]
    states = [helios.load_checkpoint(each)["model"]["objects"] for each in (path, whole)]
    for name, tensor in states[1]["net"].items():
        assert states[0]["net"][name].equal(tensor), name
    for number, table in states[1]["optimizer"]["state"].items():
        for name, tensor in table.items():
            assert states[0]["optimizer"]["state"][number][name].equal(tensor), (number, name)
    network = Network(has_norm=True)
    helios.load_weights(path, network)
    assert all(network.state_dict()[n].equal(part) for n, part in states[1]["net"].items())


PAIRS = [(before, after) for before in (2, 3, 4) for after in (0, 1, 2, 3, 4)]


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_resumes_in_any_number_of_processes_or_whole(
    tmp_path: Path, before: int, after: int, options: dict[str, Any]
) -> None:
    setting = Sharded(4, total_steps=4, options=options)
    train(tmp_path / "undisturbed", 1, replace(setting, sharding="none"))
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, setting, Kill(iteration=3, rank=before - 1))
    if after:
        train(tmp_path / "killed", after, setting)
    else:
        train(tmp_path / "killed", 2, replace(setting, sharding="none"))
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")


class KillInSave(Plugin):
    """Sends SIGKILL to a rank at a file operation of the third save."""

    def __init__(self, rank: int, number: int) -> None:
        super().__init__("kill-in-save")
        self.killed_rank = rank
        self.number = number
        self.is_due = False

    unsaved = ("is_due", "number")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_fit_start(self) -> None:
        if self.context.global_rank == self.killed_rank:
            for name in OPERATIONS:
                setattr(files, name, self._wrap(getattr(files, name)))

    def _wrap(self, operation: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.number -= self.is_due
            if self.is_due and self.number == 0:
                kill_self()
            return operation(*args, **kwargs)

        return wrapped

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.is_due = self.context.state.global_iteration == 3


KILLS = [(0, number) for number in range(1, 24, 2)] + [(1, number) for number in range(1, 9)]


@pytest.mark.shows("P94")
@pytest.mark.parametrize(
    ("rank", "number"),
    [pytest.param(*case, marks=() if case == (1, 5) else pytest.mark.full) for case in KILLS],
)
def test_a_kill_in_a_save_costs_no_bit_in_other_processes(
    tmp_path: Path, rank: int, number: int
) -> None:
    setting = Sharded(3, total_steps=4, options=SYNC if number % 2 else {})
    train(tmp_path / "undisturbed", 1, replace(setting, sharding="none"))
    with pytest.raises(RankError, match="code -9"):
        train(tmp_path / "killed", 2, setting, KillInSave(rank, number))
    train(tmp_path / "killed", 3, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
    left = {path.suffix for path in (tmp_path / "killed" / "sharded").iterdir()}
    assert ".tmp" not in left


class FullDisk(Plugin):
    """The disk of one rank refuses what it writes in some saves; not even a note fits."""

    def __init__(self, rank: int, *iterations: int, notes_fit: bool) -> None:
        super().__init__("full-disk")
        self.full_rank = rank
        self.iterations = iterations
        self.notes_fit = notes_fit
        self.is_full = False

    unsaved = ("is_full",)

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_fit_start(self) -> None:
        write = files.write

        def refuse(handle: Any, data: Any) -> int:
            is_part = str(handle.name).endswith(".safetensors")
            if self.is_full and (is_part or not self.notes_fit) and "rank-" in str(handle.name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(handle, data)

        if self.context.global_rank == self.full_rank:
            files.write = refuse

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.is_full = self.context.state.global_iteration in self.iterations


def fit_or_fail(rank: int, folder: Path, setting: Sharded, *plugins: Plugin) -> str:
    try:
        fit(rank, folder, setting, *plugins)
    except SaveError as error:
        return str(error)
    return ""


@pytest.mark.shows("P95")
@pytest.mark.parametrize(
    ("rank", "notes_fit", "is_async"),
    [
        pytest.param(1, False, True),
        pytest.param(1, True, True, marks=pytest.mark.full),
        pytest.param(1, True, False, marks=pytest.mark.full),
        pytest.param(1, False, False, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_of_one_rank_ends_all_with_the_same_error(
    tmp_path: Path, rank: int, notes_fit: bool, is_async: bool
) -> None:
    store = helios.CheckpointStore(is_async=is_async, on_save_error="raise")
    setting = Sharded(2, total_steps=5, options={"store": store})
    plugin = FullDisk(rank, 2, notes_fit=notes_fit)
    texts = run_ranks(fit_or_fail, 2, tmp_path / "run", setting, plugin)
    assert texts[0] == texts[1]
    assert f"rank {rank} could not write its part" in texts[0]
    assert os.strerror(errno.ENOSPC) in texts[0]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["sharded_epoch_1_iter_1.ckpt"]
    train(tmp_path / "undisturbed", 1, setting)
    train(tmp_path / "run", 1, setting)
    assert read_bits(tmp_path / "run") == read_bits(tmp_path / "undisturbed")


def checkpoints(folder: Path) -> list[Path]:
    return file_names.find_checkpoints(folder / "sharded")


@pytest.mark.shows("P96")
def test_damage_that_only_one_process_can_see_leads_all_to_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    setting = Sharded(2, total_steps=3)
    train(tmp_path / "undisturbed", 1, replace(setting, total_steps=4))
    train(tmp_path / "run", 2, setting)
    path = newest(tmp_path / "run")
    index = json.loads((path / "index.json").read_text())
    own = [
        piece[3]
        for tensor in index["tensors"].values()
        for piece in tensor["pieces"]
        if piece[0] == 1
    ]
    damage(path / index["files"][1]["name"], min(own))
    train(tmp_path / "run", 2, replace(setting, total_steps=4))
    assert read_bits(tmp_path / "run") == read_bits(tmp_path / "undisturbed")
    assert path.with_name(f"{path.name}.damaged").is_dir()


class ScoredModel(ShardedModel):
    """Has a score of the test data."""

    test_step = ShardedModel.valid_step


class ScoredData(Data):
    """Has test data."""

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(batch_size=2)
        self._test_dataset = self._create_dataset(Words(13), params)


def score(rank: int, folder: Path, setting: Sharded, checkpoint: Any) -> dict[str, float]:
    """Test a checkpoint as a rank; returns its scores."""
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
    trainer = helios.Trainer(
        total_steps=0,
        num_replicas=setting.num_replicas,
        sharding=setting.sharding,
        use_cpu=True,
        print_banner=False,
        chkpt_root=folder,
    )
    model = ScoredModel(folder, setting)
    trainer.test(model, ScoredData(setting), checkpoint=checkpoint)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dict(model.test_scores)
