"""A run goes on with its own data: another class, length or fingerprint shows at the resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import RunMismatchError
from helios.plugins import Plugin
from tests.support.quiet import Quiet
from tests.support.runs import IndexData, IndexModule, Setting, SmallModel, noisy_collate

_LENGTH = 24
_SETTING = Setting(total_steps=8, batch_size=4, valid_frequency=None, validates=False)


class OtherData(IndexData):
    """Another class of the same length."""

    def __init__(self) -> None:
        super().__init__(_LENGTH)


class MarkedData(IndexData):
    def __init__(self, fingerprint: str) -> None:
        super().__init__(_LENGTH)
        self.fingerprint = fingerprint


class Given(IndexModule):
    """Trains on a data set that a test has made."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(_SETTING)
        self.dataset = dataset

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True, collate_fn=noisy_collate)
        self._train_dataset = self._create_dataset(self.dataset, params)


def _fit(
    folder: Path, setting: Setting = _SETTING, dataset: Any = None, *plugins: Plugin, **options: Any
) -> SmallModel:
    model, data = SmallModel(setting), Given(dataset or IndexData(_LENGTH))
    trainer = helios.Trainer(
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        chkpt_frequency=1,
        chkpt_root=folder,
        use_cpu=True,
        print_banner=False,
        random_seed=5,
        plugins=plugins,
        **options,
    )
    assert trainer.fit(model, data)
    return model


def _longer(total_steps: int = 12) -> Setting:
    return dataclasses.replace(_SETTING, total_steps=total_steps)


@pytest.mark.shows("S60")
def test_another_class_of_equal_length_stops_the_run(tmp_path: Path) -> None:
    _fit(tmp_path)
    with pytest.raises(RunMismatchError, match="dataset: 'IndexData' -> 'OtherData'") as caught:
        _fit(tmp_path, _longer(), OtherData())
    assert '"dataset"' in str(caught.value)
    resumed = _fit(tmp_path, _longer(), OtherData(), allow_changes=("dataset",))
    # As with another length, the epoch under way begins anew.
    assert min(resumed.records) == 9
    seen = [i for n in range(9, 13) for i in resumed.records[n][0]]
    assert len(seen) == len(set(seen)) == 16
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert "dataset: 'IndexData' -> 'OtherData'" in newest.with_suffix(".json").read_text()


@pytest.mark.shows("S60")
def test_another_fingerprint_warns_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _fit(tmp_path / "whole", _longer())
    _fit(tmp_path / "run", dataset=MarkedData("abc"))
    capsys.readouterr()
    _fit(tmp_path / "run", _longer(10), MarkedData("abc"))
    assert "fingerprint:" not in capsys.readouterr().err
    resumed = _fit(tmp_path / "run", _longer(), MarkedData("xyz"))
    assert "fingerprint: 'abc' -> 'xyz'" in capsys.readouterr().err
    assert resumed.records == {n: whole.records[n] for n in (11, 12)}
    newest = helios.find_last_checkpoint(tmp_path / "run" / "small")
    assert newest is not None
    assert "'abc' -> 'xyz'" in newest.with_suffix(".json").read_text()


class Growing(Quiet):
    """Adds four samples at the end of each epoch."""

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.trainer.datamodule.dataset.length = _LENGTH + 4 * current_epoch


@pytest.mark.shows("S60")
@pytest.mark.parametrize(("unit", "total"), [("iteration", 21), ("epoch", 3)])
def test_a_data_set_that_grows_is_counted_anew_each_epoch(
    unit: str, total: int, tmp_path: Path
) -> None:
    setting = Setting(unit=unit, total_steps=total)
    whole = _fit(tmp_path, setting, IndexData(_LENGTH), Growing())
    samples = [i for _, (ids, _) in sorted(whole.records.items()) for i in ids]
    for length in (24, 28, 32):
        assert sorted(samples[:length]) == list(range(length))
        del samples[:length]
    assert samples == []
