"""Several loaders in validation, testing and prediction, one after the other (L32, L34, K33)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.core import rng
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.plugins import Plugin
from helios.terminal.progress import NullDisplay
from tests.data.datasets import walk
from tests.loops.recorded import record
from tests.support.resume import resume_everywhere
from tests.support.runs import (
    IndexData,
    IndexModule,
    Outcome,
    Requester,
    Setting,
    SmallModel,
    noisy_collate,
)

_LENGTHS = (6, 9, 3)
_NAMES = ("near", "far", "odd")


def _pairs(module: IndexModule, count: int, *, named: bool, **options: Any) -> Any:
    params = helios.DataLoaderParams(batch_size=4, collate_fn=noisy_collate, **options)
    pairs = [module._create_dataset(IndexData(length), params) for length in _LENGTHS[:count]]
    return dict(zip(_NAMES, pairs, strict=False)) if named else pairs


class SeveralModule(IndexModule):
    """The data of a setting, with as many evaluation loaders as wanted."""

    def __init__(self, setting: Setting, count: int = 2, *, named: bool = True) -> None:
        super().__init__(setting)
        self.count = count
        self.named = named
        self.worker_options: dict[str, Any] = {}

    def setup(self) -> None:
        super().setup()
        pairs = _pairs(self, self.count, named=self.named, **self.worker_options)
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


class Hearing(Plugin):
    """Hears the events of evaluations, some with the loader and some without."""

    def __init__(self) -> None:
        super().__init__("hearing")
        self.heard: list[tuple[Any, ...]] = []

    unsaved = ("heard",)

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_validation_batch_start(self, step: int) -> None:
        self.heard.append(("start", step))

    def on_validation_batch_end(self, step: int, dataloader_idx: int = -1) -> None:
        self.heard.append(("end", step, dataloader_idx))

    def on_testing_batch_end(self, step: int, dataloader_idx: int | None = None) -> None:
        self.heard.append(("test", step, dataloader_idx))

    def on_predicting_batch_end(self, step: int, prediction: Any, dataloader_idx: int = -1) -> None:
        self.heard.append(("predict", step, prediction, dataloader_idx))


class Bar(NullDisplay):
    """Notes what it is to show."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def start_evaluation(self, label: str, num_batches: int | None) -> None:
        self.shown.append([label, num_batches, 0])

    def advance_evaluation(self) -> None:
        self.shown[-1][2] += 1


class ShowOn(Plugin):
    """Shows the run on a display."""

    def __init__(self, bar: Bar) -> None:
        super().__init__("show-on")
        self.bar = bar

    def setup(self) -> None:
        """Nothing to prepare."""

    def _show(self, *args: Any) -> None:
        self.trainer._session.display = self.bar

    on_fit_start = _show


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
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
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


def _names(count: int, *, named: bool) -> list[str]:
    if count == 1:
        return ["score"]
    return [f"score/{_NAMES[n] if named else n}" for n in range(count)]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_loader_has_scores_of_its_own(count: int, named: bool) -> None:
    setting = Setting()
    for call in ("fit", "validate", "test"):
        model, data = SeveralModel(setting), SeveralModule(setting, count, named=named)
        if call == "fit":
            _fit(model, data)
        else:
            getattr(_trainer(), call)(model, data, checkpoint=None)
        scores = model.test_scores if call == "test" else model.metrics
        assert list(scores) == _names(count, named=named), call
        assert len(set(scores.values())) == count


@pytest.mark.shows("K32", "K33")
@pytest.mark.parametrize("count", [1, 2, 3])
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


@pytest.mark.shows("K33")
def test_testing_tells_the_loader_to_those_who_ask() -> None:
    setting, hearing = Setting(), Hearing()
    _trainer(hearing).test(SeveralModel(setting), SeveralModule(setting), checkpoint=None)
    assert hearing.heard == [("test", step, loader) for loader, step in _steps(2)]


def test_a_step_without_the_argument_is_told_nothing_of_loaders() -> None:
    setting = Setting()
    model = SmallModel(setting)
    _trainer().validate(model, SeveralModule(setting), checkpoint=None)
    assert list(model.metrics) == ["score/near", "score/far"]


def test_one_loader_of_several_gives_the_scores_that_it_gives_alone() -> None:
    # Its streams do not depend on what follows it.
    setting = Setting()
    alone, several = SeveralModel(setting), SeveralModel(setting)
    _trainer().validate(alone, SeveralModule(setting, 1), checkpoint=None)
    _trainer().validate(several, SeveralModule(setting, 3), checkpoint=None)
    assert several.metrics["score/near"] == alone.metrics["score"]


def test_what_steps_draw_differs_between_the_loaders() -> None:
    class Drawing(SmallModel):
        def predict_step(self, batch: Any, step: int) -> Any:
            return torch.rand(4)

    found = _trainer().predict(Drawing(Setting()), SeveralModule(Setting(), 3), checkpoint=None)
    numbers = torch.cat([batch for batches in found for batch in batches])
    assert len(numbers.unique()) == len(numbers)


class Features(SmallModel):
    """Predicts what it is given."""

    def predict_step(self, batch: Any, step: int) -> Any:
        return batch[1]


def test_the_first_loader_is_fetched_as_a_single_one_always_was() -> None:
    trainer = _trainer(random_seed=5)
    found = trainer.predict(Features(Setting()), SeveralModule(Setting(), 2), checkpoint=None)
    source = open_source(*_loader(), run_seed=5, purpose="fetch-prediction")
    with rng.numpy_global_kept():
        expected = [batch[1] for batch in walk(source, 0)]
    assert all(map(torch.equal, found[0], expected))
    assert len(found[0]) == len(expected) == 2


def test_equal_data_in_two_loaders_is_fetched_on_streams_of_its_own() -> None:
    class Twice(IndexModule):
        def setup(self) -> None:
            params = helios.DataLoaderParams(batch_size=4, collate_fn=noisy_collate)
            pairs = [self._create_dataset(IndexData(4), params) for _ in range(3)]
            self._predict_dataset = pairs

    found = _trainer().predict(Features(Setting()), Twice(Setting()), checkpoint=None)
    numbers = torch.cat([batch for batches in found for batch in batches]).flatten()
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 3},
        {"num_workers": 1, "persistent_workers": True},
    ],
)
def test_the_scores_do_not_depend_on_who_fetches(workers: dict[str, Any]) -> None:
    setting = Setting(total_steps=4, valid_frequency=2)
    found = []
    for options in ({}, workers):
        model, data = SeveralModel(setting), SeveralModule(setting, 2)
        data.worker_options = options
        _trainer(train_unit="iteration", total_steps=4, valid_frequency=2).fit(model, data)
        found.append((dict(model.metrics), model.told))
    assert found[0] == found[1]


def test_the_bar_shows_the_batches_of_all_loaders_together() -> None:
    bar, setting = Bar(), Setting()
    _fit(SeveralModel(setting), SeveralModule(setting, 3), ShowOn(bar))
    assert bar.shown == [["validation", 2 + 3 + 1, 6]]


class TwoScores(SeveralModel):
    """Its schedule and its patience follow the scores of two loaders."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.best = float("inf")
        if not fast_init:
            self.scheduler_interval = {"scheduler": "validation:score/far"}

    def have_metrics_improved(self) -> bool:
        score = self.metrics["score/near"] + self.metrics["score/far"]
        has_improved = score < self.best
        self.best = min(score, self.best)
        return has_improved


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_run_that_follows_two_loaders_resumes_exactly_everywhere(
    unit: str, tmp_path: Path
) -> None:
    setting = Setting(scheduler="plateau")
    is_by_epoch = unit == "epoch"

    def make_run(folder: Path) -> Outcome:
        return record(
            folder,
            TwoScores(setting),
            SeveralModule(setting),
            *([Requester()] if is_by_epoch else []),
            train_unit=unit,
            total_steps=4 if is_by_epoch else 14,
            valid_frequency=1 if is_by_epoch else 3,
            early_stop_cycles=9,
        )

    whole = resume_everywhere(make_run, tmp_path)
    assert {"score/near", "score/far"} == set(whole.tables["_val_scores"])
    rates = whole.model["objects"]["scheduler"]["_last_lr"]
    assert rates[0] < 0.05, "the plateau was never seen, so the scores drive nothing"


def test_an_added_loader_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    setting, outcomes = Setting(), []
    options = {"train_unit": "iteration", "total_steps": 8, "valid_frequency": 2}
    for count in (1, 3):
        model, data = SeveralModel(setting), SeveralModule(setting, count)
        outcomes.append(record(tmp_path / str(count), model, data, **options))
    alone, several = outcomes
    assert several.records == alone.records
    assert several.bits()["model.net"] == alone.bits()["model.net"]
    assert several.bits()["rng"] == alone.bits()["rng"]


class Returning(IndexModule):
    """Returns loaders of its own making."""

    def __init__(self, found: Any, phase: str = "valid") -> None:
        super().__init__(Setting(validates=False))
        self.found = found
        setattr(self, f"{phase}_dataloader", lambda: self.found)


def _loader(length: int = 6, **options: Any) -> Any:
    return create_dataloader(IndexData(length), batch_size=4, collate_fn=noisy_collate, **options)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: _loader()[0], ["score"]),
        (lambda: (_loader()[0], None), ["score"]),
        (lambda: [_loader()], ["score"]),
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (_loader()[0], _loader()[0]), "or a list or dict of these"),
        (lambda: (_loader(), _loader()), "or a list or dict of these"),
        (lambda: [_loader(), None], "loaders of validation, '1',"),
        (list, "must contain at least one"),
        (dict, "must contain at least one"),
        (lambda: {"a/b": _loader()}, "without a slash"),
        (lambda: {3: _loader()}, "without a slash"),
        (lambda: {"": _loader()}, "without a slash"),
        (lambda: {"a": _loader(), "b": ([], None)}, "got none in loader 'b'"),
    ],
)
def test_what_is_no_loader_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        _trainer().validate(SmallModel(Setting()), Returning(make()), checkpoint=None)


def test_a_loader_that_turns_out_empty_is_an_error_that_names_it() -> None:
    class Nothing:
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(UsageError, match="got none in loader 'b'"):
        _trainer().validate(
            SmallModel(Setting()), Returning({"a": _loader(), "b": Nothing()}), checkpoint=None
        )


def test_several_training_loaders_are_refused() -> None:
    class Several(IndexModule):
        def setup(self) -> None:
            super().setup()
            self._train_dataset = [self._train_dataset]

    with pytest.raises(ArgumentTypeError, match="Several must have one training data set"):
        _fit(SeveralModel(Setting()), Several(Setting()))
    with pytest.raises(ArgumentTypeError, match="must return one loader"):
        _fit(SeveralModel(Setting()), Returning([_loader()], "train"))
