"""A planted NaN is found, named and kept out of the weights (E26, R26)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.errors import ArgumentError, UsageError
from helios.loops.yielding import YieldLoop
from helios.plugins import Plugin
from helios.plugins.nan_guard import NaNGuard
from helios.state import TrainingState
from helios.state_graph.rollback import BufferCopies
from tests.data.test_order import Remembering
from tests.loops.recorded import record
from tests.support.resume import copy_checkpoint, resume_everywhere
from tests.support.runs import (
    IndexData,
    IndexModule,
    Outcome,
    Requester,
    Setting,
    SmallModel,
    noisy_collate,
)

BAD = 13


class NanData(IndexData):
    """Some samples are not finite."""

    def __init__(self, bad: dict[int, float], **options: Any) -> None:
        super().__init__(**options)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        number, features = super().__getitem__(index)
        return number, features * self.bad.get(index, 1.0)


class NanModule(IndexModule):
    """The data of a setting, with planted samples."""

    def __init__(self, setting: Setting, bad: dict[int, float] | None = None) -> None:
        super().__init__(setting)
        self.bad = {BAD: math.nan} if bad is None else bad
        self.options: dict[str, Any] = {}

    def setup(self) -> None:
        super().setup()
        setting = self.setting
        options: dict[str, Any] = {
            "batch_size": setting.batch_size,
            "shuffle": setting.shuffle,
            "num_workers": setting.num_workers,
            "collate_fn": noisy_collate,
        }
        self._train_dataset = self._create_dataset(
            NanData(self.bad), helios.DataLoaderParams(**options | self.options)
        )


class Counting(Plugin):
    """Notes the counters after each window, whether it made its update, and the weights."""

    unsaved = ("seen", "before")

    def __init__(self) -> None:
        super().__init__("counting")
        self.seen: list[tuple[int, int, int, bool]] = []
        self.before: dict[str, torch.Tensor] = {}

    def setup(self) -> None:
        """Nothing to prepare."""

    def _weights(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.context.model.net.state_dict().items()}

    def on_training_step_start(self, state: TrainingState) -> None:
        self.before = self._weights()

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self.seen.append(
            (state.global_iteration, state.current_iteration, state.global_step, committed)
        )
        moved = {n for n, w in self._weights().items() if not w.equal(self.before[n])}
        assert bool(moved) == committed, moved


def _options(setting: Setting, **more: Any) -> dict[str, Any]:
    return {
        "train_unit": setting.unit,
        "total_steps": setting.total_steps,
        "valid_frequency": setting.valid_frequency,
        "accumulation_steps": setting.accumulation,
        "random_seed": setting.seed,
        **more,
    }


def _train(folder: Path | None, setting: Setting, *plugins: Plugin, **parts: Any) -> Outcome:
    model = parts.pop("model", None) or SmallModel(setting)
    data = parts.pop("data", None) or NanModule(setting)
    return record(folder, model, data, *plugins, **_options(setting, **parts))


def _order(setting: Setting) -> dict[int, list[int]]:
    """Return the samples of each iteration, as a run without planted samples has them."""
    outcome = _train(None, setting, data=NanModule(setting, {}))
    return {number: ids for number, (ids, _) in outcome.records.items()}


def _bad_iterations(setting: Setting) -> list[int]:
    return [number for number, ids in _order(setting).items() if BAD in ids]


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"action": "ignore"}, r"NaNGuard\(action=...\) must be one of raise, skip, stop"),
        ({"checks": "weights"}, r"NaNGuard\(checks=...\) must be one of loss, gradients, both"),
        ({"action": "skip", "limit": 0}, r"NaNGuard\(limit=...\) must be None or a positive int"),
        ({"action": "skip", "limit": 2.0}, r"NaNGuard\(limit=...\) must be"),
        ({"action": "skip", "limit": True}, r"NaNGuard\(limit=...\) must be"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        NaNGuard(**options)


def test_a_limit_without_skips_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    NaNGuard(limit=3)
    assert "has no effect" in caplog.text


# --- raise ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checks", ["loss", "gradients", "both"])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(num_workers=2),
        Setting(accumulation=3, total_steps=8),
        Setting(unit="epoch", total_steps=2, accumulation=3, valid_frequency=1),
    ],
    ids=["one", "workers", "window", "epoch"],
)
def test_the_error_names_the_planted_sample(setting: Setting, checks: str) -> None:
    order = _order(setting)
    bad = _bad_iterations(setting)[0]
    size = setting.accumulation
    window = range((bad - 1) // size * size + 1, (bad - 1) // size * size + size + 1)
    model = SmallModel(setting)
    with pytest.raises(UsageError) as caught:
        _train(None, setting, NaNGuard(checks=checks), model=model)
    text = str(caught.value)
    ids = ", ".join(map(str, order[bad]))
    assert f"batch {bad - 1} (from 0) of epoch 1, samples {ids}" in text
    assert "In epoch 1, iteration" in text
    if checks == "loss":
        assert f"the loss of batch {bad - 1}" in text
        assert "gradients" not in text
    else:
        assert "the gradients of net.0.weight, net.0.bias" not in text  # frozen in epoch 1
        assert "the gradients of net.1.weight, net.1.bias, net.4.weight, net.4.bias" in text
    if checks == "gradients":
        assert all(f"batch {n - 1} (from 0)" in text for n in window if n <= 6)
    else:
        assert sum(f"batch {n - 1} (from 0)" in text for n in window) == 1
    assert all(p.isfinite().all() for p in model.net.parameters())


def test_a_bad_batch_in_the_middle_of_a_window_is_named_alone() -> None:
    for seed in range(50):
        setting = Setting(accumulation=3, total_steps=6, seed=seed)
        (bad, *_) = _bad_iterations(setting)
        if bad % 3 == 2:
            break
    with pytest.raises(UsageError, match=rf"the loss of batch {bad - 1} .*\b{BAD}\b.* \(nan\)"):
        _train(None, setting, NaNGuard())


def test_a_window_over_the_end_of_an_epoch_names_batches_of_both() -> None:
    # 6 batches an epoch: the second window of 4 holds 2 of each epoch.
    for seed in range(50):
        setting = Setting(accumulation=4, total_steps=3, seed=seed)
        bad = _bad_iterations(setting)[0]
        if bad in (5, 6):
            break
    with pytest.raises(UsageError) as caught:
        _train(None, setting, NaNGuard(checks="gradients"))
    text = str(caught.value)
    for place in ("4 (from 0) of epoch 1", "5 (from 0) of epoch 1", "1 (from 0) of epoch 2"):
        assert f"batch {place}" in text
    for number in (5, 6, 7, 8):
        assert ", ".join(map(str, _order(setting)[number])) in text


def test_gradients_that_overflow_alone_are_found() -> None:
    setting = Setting(unfreezes=False)

    class Rooted(SmallModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            loss = super().train_step(batch, state)
            # The root has an infinite slope at zero: 0 * inf.
            return loss + (self.net[4].bias * 0).square().sum().sqrt()

    with pytest.raises(UsageError, match=r"not finite: the gradients of net.4.bias, which come"):
        _train(None, setting, NaNGuard(), data=NanModule(setting, {}), model=Rooted(setting))
    outcome = _train(
        None,
        dataclasses.replace(setting, total_steps=1),
        NaNGuard(checks="loss"),
        data=NanModule(setting, {}),
        model=Rooted(setting),
    )
    assert outcome.has_ended


def test_large_gradients_whose_squares_overflow_are_finite() -> None:
    class Large(SmallModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            loss = super().train_step(batch, state)
            return loss * 1e25

    setting = Setting(total_steps=2)
    assert _train(
        None, setting, NaNGuard(), data=NanModule(setting, {}), model=Large(setting)
    ).has_ended


@pytest.mark.parametrize("bad", [None, 2])
def test_sparse_gradients_are_checked_too(bad: int | None) -> None:
    class Sparse(SmallModel):
        def _make_scheduler(self) -> None:
            self.table = nn.Embedding(22, 3, sparse=True)
            self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.1)

        def train_step(self, batch: Any, state: TrainingState) -> Any:
            super().train_step(batch, state)
            found = self.table(batch[0]).sum()
            # The root of nothing has an infinite slope.
            return (found - found).sqrt() if state.global_iteration == bad else found

    setting = Setting(total_steps=3, unfreezes=False)
    parts = {"data": NanModule(setting, {}), "model": Sparse(setting)}
    if bad is None:
        assert _train(None, setting, NaNGuard(), **parts).has_ended
        return
    with pytest.raises(UsageError, match=r"not finite: the gradients of table\.weight, which come"):
        _train(None, setting, NaNGuard(), **parts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinities_are_found_too(value: float) -> None:
    setting = Setting(unfreezes=False)
    with pytest.raises(UsageError, match=rf"\b{BAD}\b"):
        _train(None, setting, NaNGuard(), data=NanModule(setting, {BAD: value}))


def test_samples_that_nobody_knows_are_said_to_be_unknown() -> None:
    setting = Setting(shuffle=False)
    data = NanModule(setting)
    data.options = {"sampler": Remembering(22)}
    data.bad = dict.fromkeys(range(22), math.nan)
    with pytest.raises(UsageError, match="samples unknown"):
        _train(None, setting, NaNGuard(), data=data)


def test_many_samples_are_not_all_listed() -> None:
    setting = Setting(batch_size=300)
    data = NanModule(setting)
    data.options = {"batch_sampler": [list(range(22)) * 13], "batch_size": 1, "shuffle": False}
    with pytest.raises(UsageError, match=r"samples 0, 1, 2, 3, 4 and 281 more\)?"):
        _train(None, setting, NaNGuard(), data=data)


# --- skip ----------------------------------------------------------------------------------------

_SKIPPING = [
    Setting(total_steps=16),
    Setting(total_steps=6, accumulation=3, valid_frequency=2),
    Setting(unit="epoch", total_steps=3, accumulation=3, valid_frequency=1, scheduler="epoch"),
    Setting(total_steps=12, num_workers=1, scheduler="plateau"),
]
_IDS = ["one", "window", "epoch", "workers"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", _SKIPPING, ids=_IDS)
def test_a_run_that_skips_resumes_exactly_everywhere(setting: Setting, tmp_path: Path) -> None:
    skipped: list[int] = []

    def make_run(folder: Path) -> Outcome:
        guard = NaNGuard("skip")
        # A checkpoint at every safe point: also right behind a step that was left out.
        outcome = _train(folder, setting, guard, Requester())
        skipped.append(guard.num_skipped if outcome.has_ended else skipped[0])
        return outcome

    whole = resume_everywhere(make_run, tmp_path)
    assert set(skipped) == {skipped[0]}
    assert skipped[0] >= 2
    assert len(whole.saves) >= len(whole.records) // setting.accumulation
    finite = whole.model["objects"]["net"]
    assert all(weight.isfinite().all() for weight in finite.values())


@pytest.mark.shows("R26")
@pytest.mark.parametrize(
    "setting",
    # Windows of 4 in epochs of 6: every second one reaches over the end of an epoch.
    [*_SKIPPING, Setting(total_steps=6, accumulation=4, validates=False, seed=3)],
    ids=[*_IDS, "across"],
)
def test_the_counters_of_a_skipped_step_are_those_of_no_step(setting: Setting) -> None:
    counting = Counting()
    bad = set(_bad_iterations(dataclasses.replace(setting, total_steps=setting.total_steps + 9)))
    outcome = _train(None, setting, NaNGuard("skip"), counting)
    is_by_epoch, size = setting.unit == "epoch", setting.accumulation
    length, steps, expected, first = 6, 0, [], 1
    for iteration in sorted(outcome.records):
        in_epoch = (iteration - 1) % length + 1
        ends = (
            (in_epoch % size == 0 or in_epoch == length) if is_by_epoch else iteration % size == 0
        )
        if not ends:
            continue
        committed = not bad & set(range(first, iteration + 1))
        now = iteration if is_by_epoch else steps + committed
        expected.append((iteration, now, steps, committed))
        steps, first = steps + committed, iteration + 1
    assert counting.seen == expected
    assert outcome.state[0] == (len(outcome.records) if is_by_epoch else setting.total_steps)


@pytest.mark.shows("H53")
@pytest.mark.parametrize("requests", [False, True], ids=["quiet", "with a save asked for"])
def test_what_was_due_is_not_done_again_after_a_skipped_step(
    tmp_path: Path, requests: bool
) -> None:
    # Due at step 2 and step 4; the windows behind them are left out, at the same count.
    setting = Setting(total_steps=6, valid_frequency=2, shuffle=False, validates=True)
    # In order, 4 samples a batch: batches 2 and 3 of each epoch (from 0) are bad.
    data = NanModule(setting, {8: math.nan, 12: math.nan})
    guard = NaNGuard("skip")
    heard: list[Any] = []

    class Listening(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_validation_end(self, validation_cycle: int) -> None:
            heard.append(("valid", self.context.state.global_iteration))

        def on_log(self, scalars: Any, state: TrainingState) -> None:
            heard.append(("log", state.global_iteration))

    # A skipped step at which nothing is asked for is passed without a look at what is due.
    plugins = [guard, Listening("listening"), *([Requester()] if requests else [])]
    outcome = _train(tmp_path, setting, *plugins, data=data, print_frequency=2)
    validations = [n for kind, n in heard if kind == "valid"]
    assert guard.num_skipped == 2
    assert validations == [2, 6, 8]
    assert outcome.state[0] == 6
    assert [event[0] for event in outcome.events].count("on_validation_end") == 3
    assert sorted(outcome.saves) == ([1, 2, 3, 4, 5, 6, 7, 8] if requests else [1, 2, 5, 6, 7, 8])


def test_the_schedule_does_not_move_at_a_skipped_step() -> None:
    setting = Setting(total_steps=5)
    model = SmallModel(setting)
    guard = NaNGuard("skip")
    outcome = _train(None, setting, guard, model=model)
    assert guard.num_skipped >= 1
    assert len(outcome.records) == 5 + guard.num_skipped
    assert model.scheduler.last_epoch == 5


def test_skipping_is_warned_of_each_time_and_names_the_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setting = Setting(total_steps=9)
    guard = NaNGuard("skip")
    _train(None, setting, guard)
    text = capsys.readouterr().err
    assert text.count("The update is skipped: window number 1 in a row") == guard.num_skipped
    assert f"update number {guard.num_skipped} in all" in text


def test_too_many_skips_in_a_row_are_an_error() -> None:
    setting = Setting(total_steps=9)
    data = NanModule(setting, dict.fromkeys(range(22), math.nan))
    with pytest.raises(UsageError, match=r"window number 4 in a row, and NaNGuard\(limit=3\)"):
        _train(None, setting, guard := NaNGuard("skip", limit=3), data=data)
    assert guard.num_skipped == 3


def test_the_count_of_skips_in_a_row_survives_a_resume(tmp_path: Path) -> None:
    setting = Setting(total_steps=9)
    data = NanModule(setting, dict.fromkeys(range(22), math.nan))
    for folder in ("whole", "resumed"):
        if folder == "resumed":
            (path,) = (tmp_path / "whole").glob("*/*_iter_2.pth")
            copy_checkpoint(path, tmp_path / folder)
        with pytest.raises(UsageError, match=r"iteration 4 .* window number 4 in a row"):
            _train(tmp_path / folder, setting, NaNGuard("skip", limit=3), Requester(), data=data)


def test_skips_that_are_not_in_a_row_may_be_many() -> None:
    setting = Setting(total_steps=20)
    guard = NaNGuard("skip", limit=1)
    _train(None, setting, guard)
    assert guard.num_skipped >= 3


def test_running_averages_of_the_skipped_window_are_left_out(tmp_path: Path) -> None:
    """A BatchNorm that has seen a NaN would keep it for ever."""
    setting = Setting(total_steps=12, accumulation=2, valid_frequency=1)
    model = SmallModel(setting)
    _train(tmp_path, setting, NaNGuard("skip"), model=model)
    assert all(part.isfinite().all() for part in model.net.buffers())
    assert math.isfinite(model.metrics["score"])


class TwoOptimizers(SmallModel):
    """Yields a loss for each of two optimizers; some of them are bad by iteration."""

    def __init__(self, setting: Setting, bad: dict[str, int]) -> None:
        super().__init__(setting)
        self.bad = bad

    unsaved = (*SmallModel.unsaved, "bad")

    def _make_scheduler(self) -> None:
        self.other = nn.Linear(1, 1)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        now = state.global_iteration
        yield super().train_step(batch, state) * (math.nan if now == self.bad["first"] else 1.0)
        yield self.other(torch.ones(1)).sum() * (math.nan if now == self.bad["second"] else 1.0)


@pytest.mark.parametrize(
    ("bad", "skipped"),
    [
        ({"first": 0, "second": 3}, [(3, "SGD")]),
        ({"first": 3, "second": 3}, [(3, "Adam"), (3, "SGD")]),
        # A loss that was bad leaves the whole window out, whoever made it.
        ({"first": 3, "second": 0}, [(3, "Adam"), (3, "SGD")]),
    ],
)
def test_the_updates_of_several_optimizers_are_left_out_one_by_one(
    bad: dict[str, int], skipped: list[tuple[int, str]]
) -> None:
    told: list[Any] = []

    class Telling(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
            if not committed:
                told.append((self.context.state.global_iteration, type(optimizer).__name__))

    def prepare(trainer: helios.Trainer) -> None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())

    setting = Setting(total_steps=6)
    model, data = TwoOptimizers(setting, bad), NanModule(setting, {})
    # In a row count windows: two updates of one window are one.
    guard = NaNGuard("skip", limit=1)
    _train(None, setting, guard, Telling("telling"), model=model, data=data, prepare=prepare)
    assert told == skipped
    assert guard.num_skipped == len(skipped)


# --- stop ----------------------------------------------------------------------------------------


def test_stopping_saves_a_clean_state_and_is_the_regular_end(tmp_path: Path) -> None:
    setting = Setting(total_steps=14)
    bad = _bad_iterations(setting)[0]
    guard = NaNGuard("stop")
    outcome = _train(tmp_path, setting, guard)
    assert outcome.has_ended
    assert max(outcome.records) == bad
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    content = helios.load_checkpoint(newest)
    assert content["training_state"].global_iteration == bad
    assert content["training_state"].current_iteration == bad - 1
    network = content["model"]["objects"]["net"]
    assert all(weight.isfinite().all() for weight in network.values())
    assert f"iteration {bad}" in content["cursor"]["stop_reason"]
    again = _train(tmp_path, setting, NaNGuard("stop"))
    assert not again.has_ended


# --- manual steps --------------------------------------------------------------------------------


def test_manual_steps_are_checked_after_the_update() -> None:
    setting = Setting(is_manual=True)
    order, bad = _order(setting), _bad_iterations(setting)[0]
    with pytest.raises(UsageError) as caught:
        _train(None, setting, NaNGuard())
    text = str(caught.value)
    assert "the losses loss of" in text
    assert f"samples {', '.join(map(str, order[bad]))}" in text
    assert "made its update itself" in text


def test_manual_steps_can_end_the_run(tmp_path: Path) -> None:
    setting = Setting(is_manual=True, valid_frequency=None)
    outcome = _train(tmp_path, setting, NaNGuard("stop"))
    assert outcome.has_ended
    assert max(outcome.records) == _bad_iterations(setting)[0]


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (NaNGuard("skip"), r'NaNGuard\(action="skip"\) must come with a train_step that returns'),
        (NaNGuard(checks="gradients"), r'NaNGuard\(checks="gradients"\) must come with'),
    ],
)
def test_what_manual_steps_cannot_do_is_an_error_in_the_first_one(
    guard: NaNGuard, words: str
) -> None:
    setting = Setting(is_manual=True)
    model = SmallModel(setting)
    with pytest.raises(UsageError, match=words):
        _train(None, setting, guard, model=model, data=NanModule(setting, {}))
    assert len(model.records) == 0


def test_manual_steps_say_what_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    class Secretive(SmallModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            super().train_step(batch, state)
            self.loss = self._loss_items.pop("loss")

        def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
            return

    setting = Setting(is_manual=True, total_steps=2)
    _train(None, setting, NaNGuard(), data=NanModule(setting, {}))
    text = capsys.readouterr().err
    assert text.count("checks the losses in loss_items only") == 1
    assert "has nothing to check" not in text
    _train(None, setting, NaNGuard(), data=NanModule(setting, {}), model=Secretive(setting))
    assert "has nothing to check" in capsys.readouterr().err


def test_numbers_among_manual_losses_are_checked() -> None:
    class Floats(SmallModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            super().train_step(batch, state)
            self._loss_items["part"] = math.inf if state.global_iteration == 2 else 1.0

    setting = Setting(is_manual=True)
    with pytest.raises(UsageError, match="iteration 2 not finite: the losses part of batch 1"):
        _train(None, setting, NaNGuard(), data=NanModule(setting, {}), model=Floats(setting))


# --- all is well ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["raise", "skip", "stop"])
@pytest.mark.parametrize("is_manual", [False, True])
def test_a_guard_that_finds_nothing_changes_no_bit(is_manual: bool, action: str) -> None:
    if is_manual and action == "skip":
        return
    setting = Setting(total_steps=8, is_manual=is_manual, accumulation=1 if is_manual else 2)
    found = [
        _train(None, setting, *guards, data=NanModule(setting, {}))
        for guards in ([], [NaNGuard(action)])
    ]
    assert found[0].records == found[1].records
    assert found[0].bits() == found[1].bits()


def test_nothing_is_held_after_the_run() -> None:
    guard = NaNGuard("skip")
    _train(None, Setting(total_steps=5, accumulation=2), guard)
    assert guard._window == []
    assert not guard._buffers._copies


# --- copies of buffers ---------------------------------------------------------------------------


def _networks(net: nn.Module) -> Any:
    return lambda: {"net": net}


def test_buffers_go_back_to_what_they_held_in_place() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    copies = BufferCopies()
    for _ in range(2):
        before = {name: part.clone() for name, part in net.named_buffers()}
        objects = dict(net.named_buffers())
        copies.keep(_networks(net))
        net(torch.randn(4, 2) * math.nan)
        net[1].running_var = torch.ones(2) * 7
        copies.put_back()
        assert all(part.equal(before[name]) for name, part in net.named_buffers())
        assert dict(net.named_buffers()) == objects
        net(torch.randn(4, 2))


def test_buffers_that_came_later_are_found_when_looked_for_again() -> None:
    net = nn.BatchNorm1d(2)
    copies = BufferCopies()
    copies.keep(_networks(net))
    net.register_buffer("late", torch.zeros(1))
    copies.look_again()
    net.running_mean.fill_(3)
    copies.put_back()
    assert net.running_mean.equal(torch.zeros(2))
    copies.keep(_networks(net))
    net.late.fill_(3)
    copies.put_back()
    assert net.late == 0


def test_buffers_that_went_are_no_error() -> None:
    net = nn.BatchNorm1d(2)
    copies = BufferCopies()
    copies.keep(_networks(net))
    del net.running_mean
    net.running_var = None
    copies.keep(_networks(net))
    net.num_batches_tracked += 1
    copies.put_back()
    assert net.num_batches_tracked == 0


def test_a_buffer_that_the_window_has_set_first_is_none_again() -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("last", None)
    copies = BufferCopies()
    copies.keep(_networks(net))
    net.last = torch.ones(1)
    copies.put_back()
    assert net.last is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_buffers_of_a_scripted_network_go_back() -> None:
    net = torch.jit.script(nn.BatchNorm1d(2))
    copies = BufferCopies()
    for _ in range(2):
        copies.keep(_networks(net))
        net(torch.randn(4, 2) + 3)
        copies.put_back()
        assert net.running_mean.equal(torch.zeros(2))
        assert net.num_batches_tracked == 0


def test_networks_without_buffers_cost_nothing() -> None:
    copies = BufferCopies()
    copies.keep(_networks(nn.Linear(1, 1)))
    copies.keep(_networks(nn.Linear(1, 1)))
    copies.put_back()
