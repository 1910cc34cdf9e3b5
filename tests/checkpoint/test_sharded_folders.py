"""Checkpoints that are folders: what is written, read, verified and refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterator
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
from helios.checkpoint.shard_index import INDEX_NAME, RECORD_NAME, RankNote, Rows
from helios.checkpoint.sharded_commit import RankParts
from helios.checkpoint.status import examine, examine_folder, look_into
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.core.sharded_tensors import RowShare, is_deferred, read_deferred
from helios.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompatibleCheckpointError,
    SaveError,
)
from helios.storage import files
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


@pytest.mark.shows("P92")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_standard_reader_opens_the_file_of_each_rank(folder: RunFolder, num_ranks: int) -> None:
    path = save_sharded(folder, 1, 4, num_ranks)
    parts = [load_file(each) for each in sorted(path.glob("*.safetensors"))]
    assert len(parts) == num_ranks
    for name in FORMS:
        rows = [part[name] for part in parts if name in part]
        assert torch.cat(rows).equal(tensor_of(name, 4))


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


@pytest.mark.shows("P93")
def test_a_process_reads_no_more_than_its_rows(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4, 3)
    damage_rows(path, NETWORK[3], 2)
    loading.load(path, share=RowShare(0, 3))
    with pytest.raises(DamagedCheckpointError, match="rank-00002"):
        loading.load(path, share=RowShare(2, 3))


def damage_rows(path: Path, name: str, rank: int) -> None:
    """Flip a bit in the rows of a tensor that a rank has written."""
    index = json.loads((path / INDEX_NAME).read_text())
    (begin,) = (piece[3] for piece in index["tensors"][name]["pieces"] if piece[0] == rank)
    damage(path / index["files"][rank]["name"], begin + 3 * BLOCK_BYTES // 2)


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


@pytest.mark.shows("P93")
def test_a_block_that_is_not_the_own_is_verified_when_it_is_read(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4, 3)
    net = loading.load(path, share=RowShare(0, 3)).payload["model"]["objects"]["net"]
    damage_rows(path, NETWORK[3], 2)
    assert read_deferred(net["large"], RowShare(0, 3)).equal(tensor_of(NETWORK[3], 4)[:3])
    with pytest.raises(DamagedCheckpointError, match="rank-00002"):
        read_deferred(net["large"])


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


@pytest.mark.shows("P96")
@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["files", 0, "name"], "../rank-00000-of-00003.safetensors"),
        (["files", 0, "size"], -1),
        (["tensors", NETWORK[0], "pieces", 1, 1], 2),
        (["tensors", NETWORK[0], "pieces", 1, 0], 9),
        (["tensors", NETWORK[0], "pieces"], []),
        (["record", "name"], "other.pth"),
        (["tensors"], 3),
    ],
)
def test_an_index_that_no_save_has_written_is_damaged(
    folder: RunFolder, keys: list[Any], value: Any
) -> None:
    path = save_sharded(folder, 1, 4)
    file_names.sidecar_path(path).unlink()
    index = inner = json.loads((path / INDEX_NAME).read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(DamagedCheckpointError, match=INDEX_NAME):
        loading.load(path)


def test_an_index_of_a_later_version_is_not_renamed(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4)
    index = json.loads((path / INDEX_NAME).read_text())
    (path / INDEX_NAME).write_text(json.dumps(index | {"schema": 2}))
    with pytest.raises(IncompatibleCheckpointError, match="later one"):
        folder.load_newest()
    assert path.exists()


@pytest.mark.shows("P96")
def test_a_damaged_folder_is_renamed_and_the_next_older_one_is_taken(folder: RunFolder) -> None:
    save(folder, 1, 2)
    save_sharded(folder, 1, 3)
    damage(save_sharded(folder, 1, 4) / "rank-00001-of-00003.safetensors", 99)
    loaded = folder.load_newest()
    assert loaded is not None
    assert is_whole(loaded.payload, 3)
    damaged = ["run_epoch_1_iter_4.ckpt.damaged", "run_epoch_1_iter_4.json.damaged"]
    assert [name for name in names(folder.path) if "iter_4" in name] == damaged
    aside = examine_folder(folder.path).files[-1]
    assert aside.condition is Condition.ASIDE
    assert aside.size > 0
    assert [each.name for each in folder.clean()] == [
        "run_epoch_1_iter_2.pth",
        "run_epoch_1_iter_3.ckpt",
    ]


@pytest.mark.shows("P96")
def test_only_damaged_folders_are_no_silent_restart(folder: RunFolder) -> None:
    damage(save_sharded(folder, 1, 4) / RECORD_NAME, 99)
    with pytest.raises(DamagedCheckpointError):
        folder.load_newest()
    with pytest.raises(DamagedCheckpointError, match=r"iter_4\.ckpt\.damaged"):
        RunFolder(folder.path).load_newest()


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


@pytest.mark.shows("P97")
def test_the_folder_is_moved_and_found_like_a_file(folder: RunFolder) -> None:
    path = save_sharded(folder, 1, 4)
    assert file_names.find_last_checkpoint(folder.path) == path
    assert folder.find(1, 4) == path
    folder.mark_finished(path, "stopped")
    sidecar = loading.read_sidecar(path)
    assert sidecar is not None
    assert sidecar.finished == "stopped"
    aside = folder.move_aside()
    assert aside is not None
    assert is_whole(loading.load(aside / path.name).payload, 4)


@pytest.mark.shows("P97")
def test_a_file_of_the_name_of_a_folder_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "run_epoch_1_iter_4.ckpt").write_bytes(b"of another trainer")
    (tmp_path / "run_epoch_1_iter_5.pth").mkdir()
    assert file_names.find_checkpoints(tmp_path) == []
    assert RunFolder(tmp_path).load_newest() is None
    assert RunFolder(tmp_path).clean() == []
    assert len(names(tmp_path)) == 2


def test_without_digests_sizes_and_the_container_are_compared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(digest=False))
    path = save_sharded(folder, 1, 4)
    assert is_whole(loading.load(path).payload, 4)
    assert examine(path, Depth.BYTES).checked is Checked.SUMS
    damage(path / RECORD_NAME, (path / RECORD_NAME).read_bytes().index(bytes([4] * 16)))
    with pytest.raises(DamagedCheckpointError):
        loading.load(path)


@pytest.mark.shows("P97")
def test_a_vanishing_folder_is_called_gone(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_sharded(folder, 1, 4)
    net = loading.load(path, share=RowShare(1, 3)).payload["model"]["objects"]["net"]
    folder._delete(folder.entries()[0])
    # What it has verified is mapped, and stays until it is read.
    own = read_deferred(net["large"], RowShare(1, 3))
    assert own.equal(tensor_of(NETWORK[3], 4)[3:6])
    with pytest.raises(CheckpointError, match="There is no file"):
        loading.load(path)


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


@pytest.mark.shows("P95")
@pytest.mark.usefixtures("short_pauses")
def test_a_rank_that_goes_on_writing_is_waited_for(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_parts(make_plan(folder, 1, 4, 2), 4)
    parts = RankParts(own, lambda: False, Clock())
    growing = itertools.count()

    def grow(self: RankParts) -> dict[str, int]:
        number = next(growing)
        if number == 200:
            other.publish()
        return {"rank-00001-of-00002.safetensors": number}

    monkeypatch.setattr(RankParts, "_measure", grow)
    assert is_whole(loading.load(commit(folder, 1, 4, parts)).payload, 4)


def test_names_inside_of_a_folder_are_on_the_disk_before_its_own(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def record(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            order.append(f"{name} {Path(getattr(args[0], 'name', args[0])).name}")
            return call(*args)

        return recorded

    for name in ("fsync", "replace", "fsync_folder"):
        monkeypatch.setattr(files, name, record(name, getattr(files, name)))
    draft = save_sharded(folder, 1, 4).name + files.TEMPORARY_SUFFIX
    committed = order.index(f"replace {draft}")
    assert order[committed - 1 :][:3] == [
        f"fsync_folder {draft}",
        f"replace {draft}",
        f"fsync_folder {folder.path.name}",
    ]
    assert {f"fsync {INDEX_NAME}", f"fsync {RECORD_NAME}"} <= {*order[:committed]}


def test_a_file_that_grows_is_a_sign_of_life(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_parts(make_plan(folder, 1, 4, 2), 4)
    parts = RankParts(own, lambda: False, Clock())
    partial = own.plan.draft / "rank-00001-of-00002.safetensors"
    looks = itertools.count()
    read = RankParts._read

    def write_on(self: RankParts, rank: int) -> Any:
        if next(looks) < 200:
            with partial.open("ab") as handle:
                handle.write(b"0")
        elif not other.plan.note(1).exists():
            other.publish()
        return read(self, rank)

    monkeypatch.setattr(RankParts, "_read", write_on)
    assert is_whole(loading.load(commit(folder, 1, 4, parts)).payload, 4)


def test_a_note_that_is_renamed_while_rank_0_looks_is_no_failure(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_parts(make_plan(folder, 1, 4, 2), 4)
    scandir = os.scandir

    def look(place: Any) -> Any:
        with scandir(place) as entries:
            listed = list(entries)
        if Path(place) == other.plan.draft and not other.plan.note(1).exists():
            # What was listed is gone when its size is asked for.
            gone = Path(place) / "rank-00001.json.tmp"
            gone.touch()
            with scandir(place) as entries:
                listed = list(entries)
            gone.unlink()
            other.publish()
        return contextlib.nullcontext(listed)

    monkeypatch.setattr(os, "scandir", look)
    parts = RankParts(own, lambda: False)
    assert is_whole(loading.load(commit(folder, 1, 4, parts)).payload, 4)


def test_a_rank_has_nothing_to_do_in_the_folder_after_its_note(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_parts(make_plan(folder, 1, 4, 2), 4)
    replace = files.replace

    def commit_at_once(source: Path, target: Path) -> None:
        replace(source, target)
        if target == other.plan.note(1):
            monkeypatch.setattr(files, "replace", replace)
            commit(folder, 1, 4, RankParts(own, lambda: False))

    monkeypatch.setattr(files, "replace", commit_at_once)
    other.publish()
    assert is_whole(loading.load(other.plan.path).payload, 4)


@pytest.mark.shows("P95")
def test_a_part_that_cannot_be_written_costs_the_save_at_once(
    folder: RunFolder, full_disk: list[str]
) -> None:
    own, other, last = make_parts(make_plan(folder, 1, 4, 3), 4)
    other.publish()
    full_disk.append("rank-00002-of")
    with pytest.raises(SaveError, match=r"rank 2 could not write .*No space left") as own_error:
        last.publish()
    with pytest.raises(SaveError) as error:
        commit(folder, 1, 4, RankParts(own, lambda: False))
    assert str(error.value) == str(own_error.value)
    assert names(folder.path) == []


@pytest.mark.shows("P95")
def test_rank_0_is_told_where_not_even_that_can_be_written(
    folder: RunFolder, full_disk: list[str]
) -> None:
    own, last = make_parts(make_plan(folder, 1, 4, 2), 4)
    full_disk.append("rank-00001")
    with pytest.raises(SaveError, match="No space left"):
        last.publish()
    parts = RankParts(own, lambda: False)
    parts.fail("another save", "is not meant")
    parts.fail(parts.plan.token, "rank 1 has told so")
    with pytest.raises(SaveError, match="rank 1 has told so"):
        commit(folder, 1, 4, parts)
    assert names(folder.path) == []


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of files that cannot be written."""
    create, refused = files.create, list[str]()

    def check(path: Path) -> Any:
        if any(name in path.name for name in refused):
            raise OSError(28, "No space left on device", str(path))
        return create(path)

    monkeypatch.setattr(files, "create", check)
    return refused


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


@pytest.mark.shows("P95")
def test_processes_that_hold_different_tensors_commit_nothing(folder: RunFolder) -> None:
    own, other = make_parts(make_plan(folder, 1, 4, 2), 4)
    del own._rows[NETWORK[1]]
    other.publish()
    with pytest.raises(SaveError, match=NETWORK[1]):
        commit(folder, 1, 4, RankParts(own, lambda: False))
    assert names(folder.path) == []


def test_a_note_is_read_as_it_was_written() -> None:
    note = RankNote(7, ["a"], {"x": Rows("F32", (3, 4), 0, 2, 128)})
    assert RankNote.from_json(note.to_json()) == note


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


@pytest.mark.shows("P94")
def test_leftovers_of_a_killed_save_are_removed(folder: RunFolder) -> None:
    for part in make_parts(make_plan(folder, 1, 4, 3), 4)[1:]:
        part.publish()
    assert names(folder.path) == ["run_epoch_1_iter_4.ckpt.tmp"]
    assert folder.clean() == []
    assert names(folder.path) == []


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
