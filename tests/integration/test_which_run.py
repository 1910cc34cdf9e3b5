"""Which run is it, and where does it go on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import RunMismatchError
from tests.support.resume import assert_equal
from tests.support.runs import Setting, train

_SETTING = Setting(total_steps=8, valid_frequency=None, validates=False)


def _changed(**changed: Any) -> Setting:
    return dataclasses.replace(_SETTING, **changed)


def _with(**options: Any) -> Setting:
    return _changed(options=options, total_steps=10)


def _files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


@pytest.mark.shows("H20", "H21", "C1")
def test_the_run_name_names_the_files(tmp_path: Path) -> None:
    train(tmp_path, _changed(options={"run_name": "cifar10"}, chkpt_frequency=8))
    assert _files(tmp_path) == ["small"]
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


@pytest.mark.shows("S31")
@pytest.mark.parametrize(
    ("name", "changed", "shown"),
    [
        ("batch_size", {"batch_size": 3}, "batch_size: 4 -> 3"),
        ("train_unit", {"unit": "epoch", "total_steps": 4}, "train_unit: 'iteration' -> 'epoch'"),
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


def test_a_moved_folder_resumes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _changed(total_steps=10))
    train(tmp_path / "here", _SETTING)
    shutil.move(tmp_path / "here", tmp_path / "there")
    resumed = train(tmp_path / "there", _changed(total_steps=10))
    assert_equal(resumed, whole, since=8)


@pytest.mark.shows("H19")
def test_a_root_without_frequency_only_loads(tmp_path: Path) -> None:
    train(tmp_path, _changed(total_steps=4))
    present = _files(tmp_path / "small")
    resumed = train(tmp_path, _changed(total_steps=6, chkpt_frequency=None))
    assert sorted(resumed.records) == [5, 6]
    assert _files(tmp_path / "small") == present


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
