"""Checkpoints that are folders: what is written, read, verified and refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helios.checkpoint import file_names, loading, sharded_commit
from helios.checkpoint.comparison import compare_checkpoints
from helios.checkpoint.export import select_weights
from helios.checkpoint.loading import Checked, Condition, Depth
from helios.checkpoint.outline import outline
from helios.checkpoint.rank_part import PartWriter
from helios.checkpoint.shard_index import INDEX_NAME, RECORD_NAME
from helios.checkpoint.sharded_commit import RankParts
from helios.checkpoint.status import examine, look_into
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.core.sharded_tensors import RowShare, is_deferred, read_deferred
from helios.errors import (
    DamagedCheckpointError,
    IncompatibleCheckpointError,
    SaveError,
)
from helios.storage.digest import BLOCK_BYTES
from helios.storage.staging import HostBuffers
from tests.checkpoint.helpers import names, save
from tests.checkpoint.sharded_helpers import (
    FORMS,
    commit,
    is_whole,
    make_parts,
    make_plan,
    rows_of,
    save_sharded,
    tensor_of,
)

NETWORK = [name for name in FORMS if name.startswith("model")]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def files_of(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.shows("P92")
def test_each_rank_has_a_file_beside_the_record_and_the_index(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4)
    assert names(folder.path) == ["run_epoch_1_iter_4.ckpt", "run_epoch_1_iter_4.json"]
    ranks = [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
    assert files_of(path) == [INDEX_NAME, *ranks, RECORD_NAME]


@pytest.mark.shows("P93")
def test_any_process_reads_its_rows_and_one_alone_reads_all(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4, 3)
    assert is_whole(loading.load(path).payload, 4)
    for count in (2, 3, 4, 5):
        for rank in range(count):
            share = RowShare(rank, count)
            payload = loading.load(path, share=share).payload
            net = payload["model"]["objects"]["net"]
            for name in NETWORK:
                deferred, whole = net[name.rpartition(".")[2]], tensor_of(name, 4)
                assert is_deferred(deferred)
                assert deferred.shape == whole.shape
                first, end = share.rows(len(whole))
                assert read_deferred(deferred, share).equal(whole[first:end])
            # What no pre-hook cuts is whole.
            average = payload["plugins"]["ema"]["weight"]
            assert average.equal(tensor_of("plugins.ema.weight", 4))


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.shows("P96")
@pytest.mark.parametrize("is_by_rows", [False, True])
def test_one_flipped_bit_anywhere_is_named(folder: RunFolder, is_by_rows: bool) -> None:
    path = save_sharded(folder, 1, 4, 3)
    shares: list[Any] = [RowShare(rank, 2) for rank in range(2)] if is_by_rows else [None]
    for name in files_of(path):
        size = (path / name).stat().st_size
        for place in {0, 9, size // 3, BLOCK_BYTES, BLOCK_BYTES - 1, size - 1}:
            if place >= size:
                continue
            damage(path / name, place)
            found = list(filter(None, (error_of(path, share) for share in shares)))
            assert found, f"{name} at {place}"
            assert name in found[0]
            damage(path / name, place)
    assert all(not error_of(path, share) for share in shares)


def error_of(path: Path, share: RowShare | None) -> str:
    try:
        payload = loading.load(path, share=share).payload
    except DamagedCheckpointError as error:
        return str(error)
    assert payload is not None
    return ""


@pytest.mark.shows("P96")
@pytest.mark.parametrize("name", [INDEX_NAME, RECORD_NAME, "rank-00001-of-00003.safetensors"])
@pytest.mark.parametrize("kind", ["truncated", "missing", "empty"])
def test_what_is_cut_off_or_gone_is_named(folder: RunFolder, name: str, kind: str) -> None:
    path = save_sharded(folder, 1, 4)
    part = path / name
    if kind == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-2] if kind == "truncated" else b"")
    with pytest.raises(DamagedCheckpointError, match=name):
        loading.load(path)
    assert examine(path).condition is Condition.DAMAGED


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.shows("P96")
@pytest.mark.parametrize(
    "name", [RECORD_NAME, INDEX_NAME, "rank-00001-of-00003.safetensors", ".metadata", "x.pth"]
)
def test_a_foreign_pickle_is_refused_by_name_and_not_executed(
    folder: RunFolder, tmp_path: Path, name: str
) -> None:
    path = save_sharded(folder, 1, 4)
    is_own = (path / name).exists()
    (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    kind = DamagedCheckpointError if is_own else IncompatibleCheckpointError
    with pytest.raises(kind, match=name):
        loading.load(path)
    for depth in Depth:
        assert not examine(path, depth).is_good
    if not is_own:
        # Whoever has put it there: the checkpoint itself is as it was written.
        assert folder.path.joinpath("run_epoch_1_iter_4.ckpt").exists()
    assert not (tmp_path / "executed").exists()


@pytest.mark.shows("P96")
def test_a_pickle_whose_digests_were_forged_is_not_executed(
    folder: RunFolder, tmp_path: Path
) -> None:
    path = save_sharded(folder, 1, 4)
    file_names.sidecar_path(path).unlink()
    index = json.loads((path / INDEX_NAME).read_text())
    torch.save(Bomb(tmp_path / "executed"), path / RECORD_NAME)
    index["record"].update(size=(path / RECORD_NAME).stat().st_size, digests=[])
    (path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(IncompatibleCheckpointError, match="mkdir"):
        loading.load(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.shows("P97")
def test_retention_deletes_folders_of_both_forms(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(keep_last=2))
    save(folder, 1, 1)
    for iteration in (2, 3):
        save_sharded(folder, 1, iteration)
    save(folder, 1, 4)
    assert names(tmp_path) == [
        "run_epoch_1_iter_3.ckpt",
        *("run_epoch_1_iter_3.json", "run_epoch_1_iter_4.json", "run_epoch_1_iter_4.pth"),
    ]


class Clock:
    """Advances by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 look again soon, where a test has a clock of its own."""
    monkeypatch.setattr(sharded_commit, "_POLL_SECONDS", (0.0001, 0.0001))


@pytest.mark.shows("P95")
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(("is_lost", "limit"), [(False, 60), (True, 5)])
def test_rank_0_does_not_wait_for_ever(folder: RunFolder, is_lost: bool, limit: int) -> None:
    kept = save_sharded(folder, 1, 3)
    own, other, _ = make_parts(make_plan(folder, 1, 4, 3), 4)
    other.publish()
    clock = Clock()
    parts = RankParts(own, lambda: is_lost, clock)
    with pytest.raises(SaveError, match="rank 2 of 3 has not written its part"):
        commit(folder, 1, 4, parts)
    assert limit < clock.now < 10 * limit
    assert names(folder.path) == [kept.name, "run_epoch_1_iter_3.json"]


@pytest.mark.shows("P94")
def test_notes_of_an_earlier_save_to_the_same_path_do_not_count(folder: RunFolder) -> None:
    plan = make_plan(folder, 1, 4, 2)
    for part in make_parts(plan, 9)[1:]:
        part.publish()
    (plan.draft / "rank-00007-of-00008.safetensors").write_bytes(b"of a start on more processes")
    later = type(plan)(plan.path, "later", 2, plan.hashes)
    own, other = make_parts(later, 4)
    with pytest.raises(SaveError, match="rank 1 of 2"):
        commit(folder, 1, 4, RankParts(own, lambda: True, Clock()))
    own, other = make_parts(later, 4)
    other.publish()
    path = commit(folder, 1, 4, RankParts(own, lambda: False))
    assert is_whole(loading.load(path).payload, 4)


@pytest.mark.parametrize("has_memory", [True, False])
def test_what_training_changes_after_the_copy_is_not_in_the_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    if not has_memory:
        monkeypatch.setattr(HostBuffers, "copy", lead_nowhere)
    plan, writer = make_plan(folder, 1, 4, 1), PartWriter(0, is_async=True, pins=False)
    live = rows_of(4, 0, 1)
    live["tied"] = live[NETWORK[0]]
    part, is_own = writer.draft(plan, live)
    # Without memory, training waits.
    assert is_own == has_memory
    if is_own:
        for own in live.values():
            own.tensor.zero_()
    note = part.write()
    assert note.tensors["tied"] == note.tensors[NETWORK[0]]
    found = load_file(plan.draft / "rank-00000-of-00001.safetensors")
    assert found.keys() == FORMS.keys()
    assert all(found[name].equal(tensor_of(name, 4)) for name in FORMS)
    writer.thread.close()


def lead_nowhere(*arguments: Any) -> None:
    raise MemoryError("no host memory")


@pytest.mark.shows("P97")
def test_tools_show_verify_compare_and_export_folders(folder: RunFolder, tmp_path: Path) -> None:
    path = save_sharded(folder, 1, 4)
    looks = {depth: examine(path, depth).checked for depth in Depth}
    assert looks == {
        Depth.NAMES: Checked.NOTHING,
        Depth.SIDECAR: Checked.NOTHING,
        Depth.HEADER: Checked.CONTAINER,
        Depth.STRUCTURE: Checked.STRUCTURE,
        Depth.BYTES: Checked.DIGEST,
    }
    status, tree = look_into(path)
    assert status.size == sum(each.stat().st_size for each in path.iterdir())
    shown = {node.path: node for node in outline(tree)}
    for name, (shape, dtype) in FORMS.items():
        assert shown[name].shape == shape
        assert shown[name].dtype == str(dtype).removeprefix("torch.")
        assert shown[name].num_bytes == tensor_of(name, 4).nbytes
    values = select_weights(tree).read()
    assert values.keys() == {name.rpartition(".")[2] for name in NETWORK}
    for name in NETWORK:
        assert values[name.rpartition(".")[2]].equal(tensor_of(name, 4))
    other = save_sharded(RunFolder(tmp_path / "other"), 1, 4, 2)
    assert compare_checkpoints(path, other).is_equal
    later = save_sharded(RunFolder(tmp_path / "later"), 1, 5, 2)
    assert {each.path for each in compare_checkpoints(path, later).tensors} >= FORMS.keys()
