"""Several loaders in validation, testing and prediction, one after the other (L32, L34, K33)."""

from __future__ import annotations

from typing import Any

import pytest

import helios
from helios.data import create_dataloader
from helios.plugins import Plugin
from tests.support.quiet import Quiet
from tests.support.runs import (
    IndexData,
    IndexModule,
    Setting,
    SmallModel,
    noisy_collate,
)

_LENGTHS = (6, 9, 3)
_NAMES = ("near", "far", "odd")


def _pairs(module: IndexModule, count: int, *, named: bool) -> Any:
    params = helios.DataLoaderParams(batch_size=4, collate_fn=noisy_collate)
    pairs = [module._create_dataset(IndexData(length), params) for length in _LENGTHS[:count]]
    return dict(zip(_NAMES, pairs, strict=False)) if named else pairs


class SeveralModule(IndexModule):
    """The data of a setting, with as many evaluation loaders as wanted."""

    def __init__(self, setting: Setting, count: int = 2, *, named: bool = True) -> None:
        super().__init__(setting)
        self.count = count
        self.named = named

    def setup(self) -> None:
        super().setup()
        pairs = _pairs(self, self.count, named=self.named)
        self._valid_dataset = self._test_dataset = self._predict_dataset = pairs


class SeveralModel(SmallModel):
    """Tells in its records which loader a batch came from; its scores depend on it."""

    unsaved = ("records", "setting", "told")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.told: list[tuple[Any, ...]] = []

    def valid_step(self, batch: Any, step: int, dataloader_idx: int = -1) -> Any:
        self.told.append(("step", step, dataloader_idx, batch[0].tolist()))
        return super().valid_step(batch, step)

    def test_step(self, batch: Any, step: int, dataloader_idx: int = -1) -> Any:
        return self.valid_step(batch, step, dataloader_idx)

    def predict_step(self, batch: Any, step: int, dataloader_idx: int = -1) -> Any:
        return dataloader_idx, step, batch[0].tolist()

    def have_metrics_improved(self) -> bool:
        return True


class Hearing(Quiet):
    """Hears the events of evaluations, some with the loader and some without."""

    def __init__(self) -> None:
        super().__init__("hearing")
        self.heard: list[tuple[Any, ...]] = []

    unsaved = ("heard",)

    def on_validation_batch_start(self, step: int) -> None:
        self.heard.append(("start", step))

    def on_validation_batch_end(self, step: int, dataloader_idx: int = -1) -> None:
        self.heard.append(("end", step, dataloader_idx))

    def on_testing_batch_end(self, step: int, dataloader_idx: int | None = None) -> None:
        self.heard.append(("test", step, dataloader_idx))

    def on_predicting_batch_end(self, step: int, prediction: Any, dataloader_idx: int = -1) -> None:
        self.heard.append(("predict", step, prediction, dataloader_idx))


def _trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    return helios.Trainer(use_cpu=True, print_banner=False, plugins=plugins, **options)


def _fit(model: SeveralModel, data: IndexModule, *plugins: Plugin) -> helios.Trainer:
    trainer = _trainer(*plugins, train_unit="iteration", total_steps=2, valid_frequency=2)
    trainer.fit(model, data)
    return trainer


def _steps(count: int) -> list[tuple[int, int]]:
    """Return (loader, step) of each batch, in order."""
    return [(n, step) for n in range(count) for step in range(-(-_LENGTHS[n] // 4))]


@pytest.mark.shows("L32")
@pytest.mark.parametrize(("count", "named"), [(1, True), (3, False)])
def test_the_loaders_follow_each_other_and_steps_begin_anew_in_each(
    count: int, named: bool
) -> None:
    setting, hearing = Setting(), Hearing()
    model = SeveralModel(setting)
    _fit(model, SeveralModule(setting, count, named=named), hearing)
    which = {n: n if count > 1 else -1 for n in range(count)}
    assert [entry[1:3] for entry in model.told] == [(s, which[n]) for n, s in _steps(count)]
    assert [entry[3] for entry in model.told] == [
        list(range(s * 4, min(s * 4 + 4, _LENGTHS[n]))) for n, s in _steps(count)
    ]
    assert hearing.heard == [
        heard for n, s in _steps(count) for heard in (("start", s), ("end", s, which[n]))
    ]


@pytest.mark.shows("K32", "K33")
@pytest.mark.parametrize("count", [1, 3])
def test_predictions_are_a_list_for_each_loader(count: int) -> None:
    setting, hearing = Setting(), Hearing()
    found = _trainer(hearing).predict(
        SeveralModel(setting), SeveralModule(setting, count), checkpoint=None
    )
    which = {n: n if count > 1 else -1 for n in range(count)}
    expected: list[Any] = [
        [
            (which[n], s, list(range(s * 4, min(s * 4 + 4, _LENGTHS[n]))))
            for loader, s in _steps(count)
            if loader == n
        ]
        for n in range(count)
    ]
    assert found == (expected if count > 1 else expected[0])
    heard = [("predict", s, (which[n], s), which[n]) for n, s in _steps(count)]
    assert [(*entry[:2], entry[2][:2], entry[3]) for entry in hearing.heard] == heard


class Returning(IndexModule):
    """Returns loaders of its own making."""

    def __init__(self, found: Any) -> None:
        super().__init__(Setting(validates=False))
        self.found = found

    def valid_dataloader(self) -> Any:
        return self.found


def _loader(length: int = 6) -> Any:
    return create_dataloader(IndexData(length), batch_size=4, collate_fn=noisy_collate)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: _loader()[0], ["score"]),
        (lambda: [_loader()[0], _loader(9)], ["score/0", "score/1"]),
        (lambda: {"a": _loader(), "b": _loader(9)[0]}, ["score/a", "score/b"]),
    ],
)
def test_a_data_module_may_return_loaders_and_pairs_alone_or_several(
    make: Any, names: list[str]
) -> None:
    model = SmallModel(Setting())
    _trainer().validate(model, Returning(make()), checkpoint=None)
    assert list(model.metrics) == names
