"""Which run is it, and where does it go on (DESIGN section 6)."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import CheckpointError, DamagedCheckpointError, RunMismatchError, StateError
from helios.storage import files
from tests.support.resume import assert_equal, copy_checkpoint
from tests.support.runs import IndexModule, Setting, SmallModel, train

_SETTING = Setting(total_steps=8, valid_frequency=None, validates=False)


def _changed(**changed: Any) -> Setting:
    return dataclasses.replace(_SETTING, **changed)


def _with(**options: Any) -> Setting:
    return _changed(options=options, total_steps=10)


def _files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


@pytest.mark.shows("H20")
def test_the_folder_of_a_run_is_chkpt_root_and_save_name(tmp_path: Path) -> None:
    train(tmp_path, _changed(chkpt_frequency=4))
    assert _files(tmp_path) == ["small"]
    assert _files(tmp_path / "small", "*.pth") == [
        "small_epoch_1_iter_4.pth",
        "small_epoch_2_iter_8.pth",
    ]


@pytest.mark.shows("H21", "C1")
def test_the_run_name_names_the_files(tmp_path: Path) -> None:
    train(tmp_path, _changed(options={"run_name": "cifar10"}, chkpt_frequency=8))
    assert _files(tmp_path / "small", "*.pth") == ["cifar10_epoch_2_iter_8.pth"]


@pytest.mark.shows("S31")
def test_another_runs_folder_is_refused_by_both_names(tmp_path: Path) -> None:
    train(tmp_path, _SETTING)
    with pytest.raises(RunMismatchError, match=r"'small'.*'other'"):
        train(tmp_path, _with(run_name="other"))


@pytest.mark.shows("S31")
def test_never_starts_anew_and_moves_the_files_aside(tmp_path: Path) -> None:
    whole = train(tmp_path, _SETTING)
    again = train(tmp_path, _changed(options={"resume": "never"}))
    assert again.records == whole.records
    aside = list((tmp_path / "small").glob("before-*"))
    assert len(aside) == 1
    assert len(_files(aside[0], "*.pth")) == 8


@pytest.mark.shows("S31")
def test_a_path_is_gone_on_from_once_and_then_from_what_came_of_it(tmp_path: Path) -> None:
    whole = train(tmp_path / "first", _changed(total_steps=10))
    origin = tmp_path / "first" / "small" / "small_epoch_1_iter_3.pth"
    setting = _changed(total_steps=6, options={"resume": origin})
    first = train(tmp_path / "second", setting)
    assert min(first.records) == 4
    again = train(tmp_path / "second", dataclasses.replace(setting, total_steps=10))
    assert min(again.records) == 7
    assert_equal(again, whole, since=6)


def test_a_path_in_the_runs_own_folder_moves_the_others_aside(tmp_path: Path) -> None:
    train(tmp_path, _SETTING)
    origin = tmp_path / "small" / "small_epoch_1_iter_3.pth"
    resumed = train(tmp_path, _changed(options={"resume": origin}))
    assert sorted(resumed.records) == [4, 5, 6, 7, 8]


def _branch(folder: Path, total_steps: int, **options: Any) -> Setting:
    """Train a first run, and return the setting of one that goes back to its third step."""
    train(folder / "first", _changed(total_steps=4))
    origin = folder / "first" / "small" / "small_epoch_1_iter_3.pth"
    return _changed(total_steps=total_steps, options={"resume": origin, **options})


@pytest.mark.parametrize("harm", ["sidecar damaged", "sidecar missing", "damaged"])
def test_what_came_of_a_path_is_gone_on_from_whatever_has_become_of_its_newest_file(
    harm: str, tmp_path: Path
) -> None:
    setting = _branch(tmp_path, 6)
    whole = train(tmp_path / "whole", _changed(total_steps=10))
    folder = tmp_path / "second" / "small"
    train(tmp_path / "second", setting)
    newest = folder / "small_epoch_1_iter_6.pth"
    sidecar = newest.with_suffix(".json")
    if harm == "sidecar damaged":
        sidecar.write_text(sidecar.read_text().replace("small", "large", 1))
    elif harm == "sidecar missing":
        sidecar.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[:-100])
    since = 6 if harm == "sidecar missing" else 5
    again = train(tmp_path / "second", dataclasses.replace(setting, total_steps=10))
    assert_equal(again, whole, since=since)
    assert not list(folder.glob("before-*"))
    assert newest.with_name(newest.name + ".damaged").exists() == (since == 5)


def test_without_any_sidecar_a_run_still_knows_the_path_that_it_came_of(tmp_path: Path) -> None:
    setting = _branch(tmp_path, 5)
    folder = tmp_path / "second" / "small"
    train(tmp_path / "second", setting)
    for path in folder.glob("*.json"):
        path.unlink()
    train(tmp_path / "second", _changed(total_steps=6))
    again = train(tmp_path / "second", dataclasses.replace(setting, total_steps=8))
    assert sorted(again.records) == [7, 8]
    assert helios.load_checkpoint(folder / "small_epoch_2_iter_8.pth")["resumed_from"] == str(
        setting.options["resume"]
    )


@pytest.mark.parametrize("harm", ["newest", "all", "all with their sidecars"])
def test_where_all_that_came_of_a_path_is_damaged_the_run_goes_back_to_it_loudly(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = _branch(tmp_path, 5)
    folder = tmp_path / "second" / "small"
    train(tmp_path / "second", setting)
    for path in sorted(folder.glob("*.pth"))[-1 if harm == "newest" else 0 :]:
        path.write_bytes(path.read_bytes()[:-100])
        if harm == "all with their sidecars":
            path.with_suffix(".json").write_text("{}")
    again = train(tmp_path / "second", dataclasses.replace(setting, total_steps=6))
    assert min(again.records) == (5 if harm == "newest" else 4)
    shown = capsys.readouterr().err
    assert "Continuing with the next older" in shown
    assert ("The run starts again from" in shown) == (harm != "newest")


def test_where_the_path_is_gone_too_no_start_begins_afresh(tmp_path: Path) -> None:
    setting = _branch(tmp_path, 5)
    train(tmp_path / "second", setting)
    setting.options["resume"].unlink()
    for path in (tmp_path / "second" / "small").glob("*.pth"):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match="All checkpoints"):
            train(tmp_path / "second", setting)


def test_the_file_that_the_command_names_outlives_every_start(tmp_path: Path) -> None:
    store = helios.CheckpointStore(keep_last=2)
    train(tmp_path, _SETTING)
    origin = tmp_path / "small" / "small_epoch_1_iter_3.pth"
    setting = _changed(options={"resume": origin, "store": store}, total_steps=6)
    for total in (6, 10):
        train(tmp_path, dataclasses.replace(setting, total_steps=total))
    train(tmp_path, _changed(options={"store": store}, total_steps=14))
    kept = _files(tmp_path / "small", "*.pth")
    assert [name.split("_iter_")[1] for name in kept] == ["3.pth", "10.pth", "13.pth", "14.pth"]
    assert origin.with_suffix(".json").exists()


def test_a_fit_that_only_loads_passes_over_what_it_cannot_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, _changed(total_steps=4))
    folder = tmp_path / "small"
    newest = folder / "small_epoch_1_iter_4.pth"
    newest.write_bytes(newest.read_bytes()[:-100])
    (folder / "small_epoch_1_iter_5.pth.tmp").write_bytes(b"half")
    present = _files(folder)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for operation in ("create", "unlink", "replace"):
        monkeypatch.setattr(files, operation, refuse)
    resumed = train(tmp_path, _changed(total_steps=6, chkpt_frequency=None))
    assert sorted(resumed.records) == [4, 5, 6]
    assert [name for name in _files(folder) if name != ".helios-lock"] == present
    shown = capsys.readouterr().err
    assert "iter_4.pth could not be renamed" in shown
    assert "iter_5.pth.tmp" in shown


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no_such"):
        train(tmp_path, _with(resume=tmp_path / "no_such.pth"))


@pytest.mark.shows("S31")
@pytest.mark.parametrize(
    ("name", "changed", "shown"),
    [
        ("batch_size", {"batch_size": 3}, "batch_size: 4 -> 3"),
        ("shuffle", {"shuffle": False}, "shuffle: True -> False"),
        ("random_seed", {"seed": 6}, "random_seed: 5 -> 6"),
        ("train_unit", {"unit": "epoch", "total_steps": 4}, "train_unit: 'iteration' -> 'epoch'"),
        ("accumulation_steps", {"accumulation": 2}, "accumulation_steps: 1 -> 2"),
        ("drop_last", {"drop_last": True}, "drop_last: False -> True"),
    ],
)
def test_a_change_of_the_run_needs_an_allowance(
    name: str, changed: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    train(tmp_path, _SETTING)
    setting = _changed(**{"total_steps": 12, **changed})
    with pytest.raises(RunMismatchError, match=shown) as caught:
        train(tmp_path, setting)
    assert name in str(caught.value)
    allowed = dataclasses.replace(setting, options={"allow_changes": (name, "sampler")})
    outcome = train(tmp_path, allowed)
    assert outcome.records
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert shown in newest.with_suffix(".json").read_text()


@pytest.mark.shows("S31")
def test_another_batch_size_goes_on_at_the_stored_sample(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _changed(total_steps=6))
    train(tmp_path / "run", _changed(total_steps=2))
    setting = _changed(total_steps=4, batch_size=7, options={"allow_changes": ("batch_size",)})
    resumed = train(tmp_path / "run", setting)
    seen = [i for n, (ids, _) in sorted(whole.records.items()) if n <= 2 for i in ids]
    rest = [i for _, (ids, _) in sorted(resumed.records.items()) for i in ids]
    assert [len(ids) for ids, _ in resumed.records.values()] == [7, 7]
    assert seen + rest == [i for _, (ids, _) in sorted(whole.records.items()) for i in ids]


def test_a_moved_folder_resumes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _changed(total_steps=10))
    train(tmp_path / "here", _SETTING)
    shutil.move(tmp_path / "here", tmp_path / "there")
    resumed = train(tmp_path / "there", _changed(total_steps=10))
    assert_equal(resumed, whole, since=8)


@pytest.mark.shows("S32")
def test_a_finished_run_does_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, _SETTING)
    again = train(tmp_path, _SETTING)
    assert not again.records
    assert "finished" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_put_aside_and_the_next_older_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", _changed(total_steps=10))
    train(tmp_path / "run", _SETTING)
    newest = helios.find_last_checkpoint(tmp_path / "run" / "small")
    assert newest is not None
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resumed = train(tmp_path / "run", _changed(total_steps=10))
    assert newest.name in capsys.readouterr().err
    assert newest.with_name(newest.name + ".damaged").exists()
    assert_equal(resumed, whole, since=7)


@pytest.mark.shows("S19")
def test_a_run_of_damaged_checkpoints_never_starts_anew_in_silence(tmp_path: Path) -> None:
    train(tmp_path, _changed(chkpt_frequency=8))
    for path in (tmp_path / "small").glob("*.pth"):
        path.write_bytes(b"nothing")
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError):
            train(tmp_path, _SETTING)


@pytest.mark.shows("H19")
def test_a_root_without_frequency_only_loads(tmp_path: Path) -> None:
    train(tmp_path, _changed(total_steps=4))
    present = _files(tmp_path / "small")
    resumed = train(tmp_path, _changed(total_steps=6, chkpt_frequency=None))
    assert sorted(resumed.records) == [5, 6]
    assert _files(tmp_path / "small") == present


@pytest.mark.shows("U13")
def test_retention_keeps_the_last(tmp_path: Path) -> None:
    store = helios.CheckpointStore(keep_last=2)
    train(tmp_path, _changed(options={"store": store}))
    assert _files(tmp_path / "small", "*.pth") == [
        "small_epoch_2_iter_7.pth",
        "small_epoch_2_iter_8.pth",
    ]


def test_weights_start_another_run_warm(tmp_path: Path) -> None:
    train(tmp_path, _changed(chkpt_frequency=8))
    path = helios.find_last_checkpoint(tmp_path / "small")
    assert path is not None
    saved = helios.load_checkpoint(path)
    assert isinstance(saved["training_state"], helios.TrainingState)
    model = SmallModel(_SETTING, "warm")
    model.setup()
    helios.load_weights(path, model)
    for name, weight in saved["model"]["objects"]["net"].items():
        assert model.net.state_dict()[name].equal(weight)
    assert not model.optimizer.state


@pytest.mark.shows("U28")
def test_weights_are_refused_where_none_would_be_loaded(tmp_path: Path) -> None:
    class Renamed(SmallModel):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.other = self.net
            del self.net, self.optimizer, self.scheduler

    train(tmp_path, _changed(total_steps=1))
    path = helios.find_last_checkpoint(tmp_path / "small")
    assert path is not None
    with pytest.raises(
        StateError, match=r"SmallModel has none yet. Call it as the last line of se"
    ):
        helios.load_weights(path, SmallModel(_SETTING, "warm"))
    renamed = Renamed(_SETTING, "warm")
    renamed.setup()
    with pytest.raises(
        StateError, match=r"a network of Renamed, \[.*'other'.*\], in the checkpoint"
    ):
        helios.load_weights(path, renamed)


def test_a_data_module_without_training_data_is_refused(tmp_path: Path) -> None:
    class Empty(IndexModule):
        def setup(self) -> None:
            return

    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False)
    with pytest.raises(ValueError, match="training data"):
        trainer.fit(SmallModel(_SETTING), Empty(_SETTING))


def test_a_model_stands_after_a_finished_run_as_at_its_end(tmp_path: Path) -> None:
    whole = train(tmp_path, _SETTING)
    trainer = helios.Trainer(
        "", "iteration", 8, chkpt_frequency=1, chkpt_root=tmp_path, use_cpu=True, random_seed=5
    )
    model = SmallModel(_SETTING)
    assert trainer.fit(model, IndexModule(_SETTING)) is True
    for name, weight in model.net.state_dict().items():
        assert weight.equal(whole.model["objects"]["net"][name])
    assert model.loss_items["loss"].equal(whole.tables["_loss_items"]["loss"])


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("in the way")
    with pytest.raises(ValueError, match="must be a folder"):
        train(tmp_path, _SETTING)


def test_a_lowered_total_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, _SETTING)
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    copy_checkpoint(newest.with_name("small_epoch_1_iter_4.pth"), tmp_path / "again")
    train(tmp_path / "again", _changed(total_steps=3))
    assert "total_steps: 8 -> 3" in capsys.readouterr().err
