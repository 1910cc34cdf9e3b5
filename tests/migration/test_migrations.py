"""Migration: every published format is read, bit for bit, and no content is believed blindly."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.checkpoint import file_names, loading
from helios.checkpoint.record import REQUIRED
from helios.migration import helios_ml
from helios.migration.folder_migration import (
    BACKUP_FOLDER,
    Report,
    Result,
    migrate_checkpoints,
)
from tests.support import old_files as old
from tests.support.paused import locked


def migrate(path: Path, **options: Any) -> Report:
    (report,) = migrate_checkpoints(path, **options)
    return report


def write_old(path: Path, **entries: Any) -> Path:
    """Write a file as releases before 1.1 did."""
    state = {"current_iteration": 4, "global_iteration": 4, "global_epoch": 1, "dataset_iter": 4}
    torch.save({"version": "1.0.0", "training_state": state, "model": {}, **entries}, path)
    return path


def load_migrated(path: Path) -> dict[str, Any]:
    report = migrate(path)
    assert report.result is Result.MIGRATED, report
    return loading.load(path).payload


@pytest.mark.shows("H27", "S25", "S39")
@pytest.mark.parametrize("name", old.FILES)
def test_a_migrated_file_is_an_ordinary_one_with_the_bytes_of_the_old_one(
    tmp_path: Path, name: str
) -> None:
    path = old.lay_out(tmp_path, name)
    report = migrate(path)
    loaded = loading.load(path)
    payload, sidecar = loaded.payload, loaded.sidecar
    assert old.is_same(old.raw_model(old.GOLDEN / name), payload["model"])
    generators = old.entry(old.read_raw(old.GOLDEN / name), "rng")
    assert old.is_same(generators["torch"], payload["rng"]["torch"])
    assert generators["rand"] == payload["rng"]["rand"]
    assert generators["numpy"] == payload["rng"]["numpy"]
    release = name.split("/")[0]
    assert set(REQUIRED) <= payload.keys()
    assert payload["migrated_from"] == (release if release >= "0.3" else "")
    assert payload["schema"] == file_names.SCHEMA
    assert sidecar is not None
    assert sidecar.migrated_from == payload["migrated_from"]
    assert sidecar.num_replicas == payload["num_replicas"] == 0
    assert sidecar.run_name == "linear"
    assert sidecar.iteration == payload["training_state"]["global_iteration"]
    assert report.backup is not None
    assert report.backup.read_bytes() == (old.GOLDEN / name).read_bytes()


@pytest.mark.shows("S26")
@pytest.mark.parametrize("name", old.FILES)
def test_every_release_goes_on_at_the_batch_that_its_counters_mean(
    tmp_path: Path, name: str
) -> None:
    path = old.lay_out(tmp_path, name)
    payload = load_migrated(path)
    counters = old.raw_counters(path.parent / BACKUP_FOLDER / path.name)
    state, cursor = payload["training_state"], payload["cursor"]
    batches = cursor["epoch"] * old.NUM_BATCHES + cursor["batch"]
    assert batches == state["global_iteration"] == counters["global_iteration"]
    assert cursor["batch"] == state["dataset_iter"] == counters["dataset_iter"]
    assert state["global_epoch"] == cursor["epoch"] + (cursor["batch"] > 0)
    for field in ("current_iteration", "validation_cycles", "early_stop_count", "running_iter"):
        assert state[field] == counters[field]
    assert state["global_step"] == counters["current_iteration"]


def test_what_else_was_in_the_file_is_kept(tmp_path: Path) -> None:
    payload = load_migrated(old.lay_out(tmp_path, "2.0.1/linear_epoch_4_iter_8.pth"))
    assert payload["datamodule"] == {"phase": 0}
    assert payload["engine"]["scaler"]["scale"] == 65536.0
    own = write_old(tmp_path / "own_epoch_1_iter_4.pth", notes={"seen": [1, 2]}, tables={"mine": 1})
    payload = load_migrated(own)
    assert payload["notes"] == {"seen": [1, 2]}
    assert payload["tables"].keys() == {
        *("_loss_items", "_val_scores", "_running_losses", "_test_scores")
    }


class Shown:
    """Something that is pickled as a call of a function with arguments, and perhaps a state."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self._parts = (function, arguments, *(() if state is None else (state,)))

    def __reduce__(self) -> Any:
        return self._parts


@pytest.mark.shows("S25")
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("prefix", ["", "Pure"])
def test_paths_of_either_system_are_read_on_either_system(
    tmp_path: Path, module: str, prefix: str
) -> None:
    path = tmp_path / "a_epoch_1_iter_4.pth"
    with old.pickled_as(f"{module}.{prefix}WindowsPath", type("W", (), {})) as windows:
        write_old(path, log_path=Shown(windows, "C:\\", "logs", "a.log"))
    assert load_migrated(path)["log_path"] == "C:\\logs\\a.log"
    path = tmp_path / "b_epoch_1_iter_4.pth"
    with old.pickled_as(f"{module}.{prefix}PosixPath", type("P", (), {})) as posix:
        write_old(path, run_path=Shown(posix, "/", "runs", "a"), log_path=Shown(posix, "/l/b"))
    payload = load_migrated(path)
    assert (payload["run_path"], payload["log_path"]) == ("/runs/a", "/l/b")


DAY = datetime.date(2024, 2, 29)
ARRAYS = (
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.arange(3, dtype=">u4"),
    np.array(["ab", "c"]),
)


@pytest.mark.shows("S25")
@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_arrays_and_numbers_of_numpy_1_and_2_are_read(
    tmp_path: Path, module: str, array: np.ndarray[Any, Any]
) -> None:
    _, arguments, state = array.__reduce__()
    with (
        old.pickled_as(f"{module}._reconstruct", type("R", (), {})) as reconstruct,
        old.pickled_as(f"{module}.scalar", type("S", (), {})) as scalar,
    ):
        made = Shown(reconstruct, *arguments, state=state)
        number = Shown(scalar, *np.float64(2.5).__reduce__()[1])
        path = tmp_path / "a_epoch_1_iter_4.pth"
        write_old(path, model={"array": made, "again": made, "number": number})
    model = load_migrated(path)["model"]
    assert model["array"].dtype == array.dtype
    assert model["array"].tobytes() == array.tobytes()
    assert model["array"].flags.f_contiguous == array.flags.f_contiguous
    assert model["array"] is model["again"]
    assert model["number"] == 2.5
    assert type(model["number"]) is np.float64


def test_numbers_of_numpy_in_the_generators_state_become_plain(tmp_path: Path) -> None:
    generator = np.random.default_rng(3).bit_generator.state
    generator["has_uint32"] = np.int64(0)
    path = write_old(tmp_path / "a_epoch_1_iter_4.pth", rng={"numpy": generator})
    state = load_migrated(path)["rng"]["numpy"]
    assert state == generator
    assert type(state["has_uint32"]) is int


def test_tensors_that_share_memory_do_so_again(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    model = {"a": weight, "b": weight[2:], "c": [weight]}
    model = load_migrated(write_old(tmp_path / "a_epoch_1_iter_4.pth", model=model))["model"]
    model["a"][2] = 9.0
    assert model["b"][0] == 9.0
    assert model["c"][0] is model["a"]


@pytest.mark.shows("S25")
@pytest.mark.parametrize(
    ("stem", "counters", "wanted"),
    [
        ("a_epoch_0_iter_4", (0, 4, 4), (0, 4)),
        ("a_epoch_1_iter_8", (1, 8, 3), (1, 3)),
        ("a_epoch_2_iter_8", (2, 8, 3), (1, 3)),
        ("a_epoch_1_iter_5", (1, 5, 5), (0, 5)),
        # Two epochs of 5, or one of 10: the name tells, and else the later rule holds.
        ("a_epoch_3_iter_13", (2, 13, 3), (2, 3)),
        ("a_epoch_2_iter_13", (2, 13, 3), (1, 3)),
        ("a_epoch_2_iter_10", (2, 10, 0), (2, 0)),
    ],
)
def test_epochs_that_count_from_0_are_told_from_those_that_count_from_1(
    stem: str, counters: tuple[int, int, int], wanted: tuple[int, int]
) -> None:
    names = ("global_epoch", "global_iteration", "dataset_iter")
    state = dict(zip(names, counters, strict=True)) | {"current_iteration": counters[1]}
    cursor = helios_ml.convert({"training_state": state, "model": {}}, stem=stem)["cursor"]
    assert (cursor["epoch"], cursor["batch"]) == wanted
    assert cursor["sample"] == 0


@pytest.mark.shows("S24")
def test_a_backup_never_replaces_another_file(tmp_path: Path) -> None:
    first = old.lay_out(tmp_path, "1.1.0/linear_epoch_2_iter_8.pth", as_name="a_epoch_1_iter_1.pth")
    kept = migrate(first).backup
    second = old.lay_out(
        tmp_path, "0.1.9/linear_epoch_2_iter_8.pth", as_name="a_epoch_1_iter_1.pth"
    )
    other = migrate(second).backup
    assert kept is not None
    assert other is not None
    assert kept.read_bytes() == (old.GOLDEN / "1.1.0/linear_epoch_2_iter_8.pth").read_bytes()
    assert other.read_bytes() == (old.GOLDEN / "0.1.9/linear_epoch_2_iter_8.pth").read_bytes()
    assert [report.path for report in migrate_checkpoints(tmp_path)] == [second]


def test_files_of_others_are_named_and_left_alone(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pth"
    torch.save(torch.nn.Linear(2, 2).state_dict(), weights)
    text = tmp_path / "readme.pth"
    text.write_text("no container at all")
    link = tmp_path / "link_epoch_1_iter_4.pth"
    target = write_old(tmp_path / "target.old")
    link.symlink_to(target)
    unfinished = tmp_path / "a_epoch_9_iter_9.pth.tmp"
    unfinished.write_bytes(b"half")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    results = {report.path: report for report in migrate_checkpoints(tmp_path)}
    assert results[weights].result is Result.FOREIGN
    assert results[text].result is Result.FOREIGN
    assert results[link].result is Result.LINK
    assert results[unfinished].result is Result.UNFINISHED
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert link.is_symlink()


def test_what_cannot_be_migrated_is_named_with_its_reason(tmp_path: Path) -> None:
    read_only = write_old(tmp_path / "a_epoch_1_iter_4.pth")
    read_only.chmod(0o444)
    assert migrate(read_only).result is Result.READ_ONLY
    taken = write_old(tmp_path / "b_epoch_1_iter_4.pth")
    taken.with_suffix(".json").write_text('{"mine": 1}')
    report = migrate(taken)
    assert report.result is Result.FAILED
    assert "b_epoch_1_iter_4.json" in report.reason
    cut = write_old(tmp_path / "c_epoch_1_iter_4.pth")
    cut.write_bytes(cut.read_bytes()[:-300])
    assert migrate(cut).result is Result.DAMAGED
    assert migrate(tmp_path / "gone_epoch_1_iter_1.pth").result is Result.LINK
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".pth") == [
        "b_epoch_1_iter_4.json"
    ]


def test_a_flipped_bit_in_a_tensor_of_an_old_file_is_damage(tmp_path: Path) -> None:
    weight = torch.arange(64.0)
    path = write_old(tmp_path / "a_epoch_1_iter_4.pth", model={"weight": weight})
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert migrate(path).result is Result.DAMAGED
    assert path.read_bytes() == data


@pytest.mark.shows("S24")
def test_a_folder_that_a_run_has_locked_is_left_alone(tmp_path: Path) -> None:
    path = write_old(tmp_path / "a_epoch_1_iter_4.pth")
    before = path.read_bytes()
    with locked(tmp_path):
        assert migrate(path).result is Result.IN_USE
    assert path.read_bytes() == before
    assert migrate(path).result is Result.MIGRATED


def test_a_type_of_the_users_own_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_old(tmp_path / "a_epoch_1_iter_4.pth", model={"day": DAY})
    report = migrate(path)
    assert report.result is Result.REFUSED
    assert "datetime.date" in report.reason
    assert "add_safe_globals" in report.reason


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = old.lay_out(tmp_path, old.FILES[0])
    assert migrate(path, is_dry=True).result is Result.PENDING
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == (old.GOLDEN / old.FILES[0]).read_bytes()
