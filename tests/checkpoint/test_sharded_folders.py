"""Checkpoints that are folders: what is written, read, verified and refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helios.checkpoint import file_names, loading
from helios.checkpoint.export import select_weights
from helios.checkpoint.loading import (
    INDEX_NAME,
    METADATA_NAME,
    RECORD_NAME,
    Checked,
    Condition,
    Depth,
)
from helios.checkpoint.outline import compare_checkpoints, list_tensors
from helios.checkpoint.status import examine, look_into
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.core.sharded_tensors import RowShare
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage import files
from helios.storage.dcp_folder import TensorFolder, copy_rows
from helios.storage.staging import HostBuffers
from tests.checkpoint.helpers import names, save
from tests.checkpoint.sharded_helpers import (
    FORMS,
    commit,
    is_whole,
    make_sharded_payload,
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
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_pytorch_reads_the_tensors(folder: RunFolder) -> None:
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in FORMS.items()}
    dcp.load(state, checkpoint_id=save_sharded(folder, 1, 4))
    assert all(state[name].equal(tensor_of(name, 4)) for name in FORMS)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_commit_is_the_rename_after_all_files_and_names_are_on_the_disk(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, files.replace

    def note_sync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(files, "replace", note_replace)
    path = save_sharded(folder, 1, 4)
    commit_at = events.index(f"rename {path.name}")
    before = [f"sync __{rank}_0.distcp" for rank in range(3)]
    before += [
        "sync .metadata.tmp",
        f"sync {INDEX_NAME}",
        f"sync {RECORD_NAME}",
        f"sync {path.name}.tmp",
    ]
    before += ["sync run_epoch_1_iter_4.json.tmp", "rename run_epoch_1_iter_4.json"]
    assert {*before} <= {*events[:commit_at]}
    assert events[commit_at:] == [f"rename {path.name}", f"sync {folder.path.name}"]


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
        for place in {0, 9, size // 3, size - 1}:
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
@pytest.mark.parametrize("name", [METADATA_NAME, INDEX_NAME, RECORD_NAME, "__1_0.distcp"])
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


def refuse_everywhere(path: Path, match: str) -> None:
    """Check that a checkpoint is refused by what loads, verifies and exports it."""
    with pytest.raises((DamagedCheckpointError, IncompatibleCheckpointError), match=match):
        loading.load(path)
    with pytest.raises((DamagedCheckpointError, IncompatibleCheckpointError), match=match):
        loading.load(path, share=RowShare(0, 2))
    status, tree = look_into(path)
    assert not status.is_good
    assert tree is None
    assert not examine(path, Depth.BYTES).is_good


@pytest.mark.shows("P96")
@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("__9_0.distcp", False),
        ("x.pth", False),
        (METADATA_NAME, False),
        (RECORD_NAME, True),
        (INDEX_NAME, True),
        ("__1_0.distcp", True),
    ],
)
def test_a_pickle_that_no_digest_protects_is_not_executed(
    folder: RunFolder, tmp_path: Path, name: str, is_read: bool
) -> None:
    """The index of PyTorch and foreign files are not even read."""
    path = save_sharded(folder, 1, 4)
    file_names.sidecar_path(path).unlink()
    bomb = Bomb(tmp_path / "executed")
    if is_read:
        size = (path / name).stat().st_size
        torch.save(bomb, path / name)
        with (path / name).open("ab") as handle:
            handle.write(b" " * size)
        with pytest.raises((IncompatibleCheckpointError, DamagedCheckpointError)):
            loading.load(path)
    else:
        (path / name).write_bytes(pickle.dumps(bomb))
        assert is_whole(loading.load(path).payload, 4)
        assert examine(path, Depth.BYTES).is_good
    assert not (tmp_path / "executed").exists()


WEIGHT = "model.objects.net.weight"
Index: TypeAlias = dict[str, Any]


def lead_out_of_the_folder(index: Index) -> None:
    for chunk in index[WEIGHT]["chunks"]:
        chunk[2] = f"../run_epoch_1_iter_4.ckpt/{chunk[2]}"


def lie_about_the_size(index: Index) -> None:
    index[WEIGHT]["shape"][0] = 1 << 40
    index[WEIGHT]["chunks"][-1][1] = (1 << 40) - index[WEIGHT]["chunks"][-1][0]


def leave_rows_out(index: Index) -> None:
    del index[WEIGHT]["chunks"][1]


def overlap(index: Index) -> None:
    index[WEIGHT]["chunks"].append(index[WEIGHT]["chunks"][0])


def read_beyond_the_end(index: Index) -> None:
    for chunk in index[WEIGHT]["chunks"]:
        chunk[4] += 1 << 40


@pytest.mark.shows("P96")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lead_out_of_the_folder, "damaged"),
        (lie_about_the_size, "lacks rows"),
        (leave_rows_out, "lacks rows"),
        (overlap, "lacks rows"),
        (read_beyond_the_end, "too short"),
    ],
)
def test_a_hostile_index_is_refused(
    folder: RunFolder, change: Callable[[Index], None], match: str
) -> None:
    path = save_sharded(folder, 1, 4)
    file_names.sidecar_path(path).unlink()
    index = torch.load(path / INDEX_NAME, weights_only=True)
    change(index)
    torch.save(index, path / INDEX_NAME)
    refuse_everywhere(path, match)


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


def test_what_training_changes_after_the_copy_is_not_in_the_file(folder: RunFolder) -> None:
    live = [rows_of(4, rank, 2) for rank in range(2)]
    for rows in live:
        rows["tied"] = rows[WEIGHT]
    copies = [dict(copy_rows(rows, HostBuffers())) for rows in live]
    for rows in live:
        for own in rows.values():
            own.tensor.zero_()
    path = commit(folder, make_sharded_payload(1, 4), copies)
    assert is_whole(loading.load(path).payload, 4)
    # A tied tensor is in the files once.
    tensors = TensorFolder(path).tensors
    assert tensors["tied"].place == tensors[WEIGHT].place
    assert tensors["plugins.ema.weight"].place != tensors[WEIGHT].place


@pytest.mark.shows("P97")
def test_tools_show_verify_compare_and_export_folders(folder: RunFolder, tmp_path: Path) -> None:
    path = save_sharded(folder, 1, 4)
    looks = {depth: examine(path, depth).checked for depth in Depth}
    assert looks == {
        Depth.HEADER: Checked.NOTHING,
        Depth.STRUCTURE: Checked.NOTHING,
        Depth.BYTES: Checked.DIGEST,
    }
    status, tree = look_into(path)
    assert status.size == sum(each.stat().st_size for each in path.iterdir())
    shown = {entry.path: entry for entry in list_tensors(tree)}
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
