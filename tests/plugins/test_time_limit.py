"""The time limit, and with it every interruption: what is left off anywhere gives the same bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import Plugin
from helios.plugins.time_limit import TimeLimit, parse_duration
from helios.state import TrainingState
from tests.support.resume import resume_everywhere
from tests.support.runs import RETURNS, IndexModule, Outcome, Setting, SmallModel, train

_RESUME = ["on_checkpoint_loaded", "on_fit_start", "on_training_start", "on_training_resume"]
_WAY_OUT = ["on_fit_end", "teardown"]
_POLL = "should_training_stop"
_SETTINGS = {
    "steps": Setting(total_steps=14),
    "accumulated steps": Setting(total_steps=5, accumulation=4, valid_frequency=2),
    "manual steps": Setting(total_steps=5, accumulation=2, is_manual=True, scheduler="none"),
    "epochs": Setting(unit="epoch", total_steps=3, valid_frequency=1),
    "accumulated epochs": Setting(unit="epoch", total_steps=3, accumulation=4, valid_frequency=1),
    "manual epochs": Setting(unit="epoch", total_steps=2, is_manual=True, valid_frequency=2),
    "workers": Setting(total_steps=8, num_workers=2),
}
_NEVER = 10**9


class Ticker(Plugin):
    """A clock that goes on by a second in every event of a kind."""

    unsaved = ("now",)

    def __init__(self, event: str = "on_training_batch_start", now: float = 0.0) -> None:
        super().__init__("ticker")
        self.now = now
        setattr(self, event, self._tick)

    def setup(self) -> None:
        """Nothing to prepare."""

    def _tick(self, *args: Any) -> bool:
        self.now += 1.0
        return False

    def __call__(self) -> float:
        return self.now


class Asker(Plugin):
    """Asks for something at the n-th time that it hears an event."""

    unsaved = ("left",)

    def __init__(self, event: str, number: int, *verbs: str) -> None:
        super().__init__("asker")
        self.left = number
        self.verbs = verbs or ("interrupt",)
        setattr(self, event, self._act)

    def setup(self) -> None:
        """Nothing to prepare."""

    def _act(self, *args: Any) -> bool:
        self.left -= 1
        for verb in self.verbs if self.left == 0 else ():
            getattr(self.context, verb)("asked")
        return False


def _rarely(setting: Setting) -> Setting:
    """Return a setting in which only an interruption and the end write checkpoints."""
    return dataclasses.replace(setting, chkpt_frequency=_NEVER)


def _code(plugin: Plugin) -> int:
    assert plugin.trainer is not None
    return plugin.trainer.exit_code


@functools.cache
def _undisturbed(name: str) -> Outcome:
    """Train a setting without an interruption, once for all tests."""
    setting = dataclasses.replace(_SETTINGS[name], chkpt_frequency=1, requests=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(Path(folder), setting)
    assert outcome.has_ended
    return outcome


def _train_until_done(
    folder: Path, setting: Setting, make: Callable[[int], list[Plugin]]
) -> list[Outcome]:
    """Start the same command until it is finished; ``make`` returns the plugins of a start."""
    outcomes = []
    for number in range(30):
        plugins = make(number)
        outcomes.append(train(folder, _rarely(setting), *plugins))
        if outcomes[-1].has_ended:
            assert _code(plugins[0]) == 0
            return outcomes
        assert _code(plugins[0]) == 75
        assert not list(folder.rglob("*.tmp"))
    raise AssertionError("The run comes to no end.")


def _assert_same(outcomes: list[Outcome], whole: Outcome) -> None:
    """Assert that starts together are the whole run: no batch twice, every bit."""
    records: dict[int, Any] = {}
    for outcome in outcomes:
        assert not records.keys() & outcome.records.keys(), "a batch was repeated"
        records |= outcome.records
    assert records == whole.records
    assert outcomes[-1].bits() == whole.bits()
    assert outcomes[-1].cursor == whole.cursor


def _assert_joined(outcomes: list[Outcome], whole: Outcome) -> None:
    """Assert that starts together are the whole run: no batch twice, each event, every bit."""
    _assert_same(outcomes, whole)
    events: list[Any] = []
    for number, outcome in enumerate(outcomes):
        told = outcome.events
        if number:
            assert [event[0] for event in told[:4]] == _RESUME
            told = told[4:]
        if outcome is outcomes[-1]:
            events += told
            continue
        (since,) = outcome.saves.values()
        behind = [event[0] for event in outcome.events[since:]]
        assert behind in (_WAY_OUT, [_POLL, *_WAY_OUT])
        events += told[: since - (4 if number else 0)]
    pairs = itertools.zip_longest(events, whole.events)
    assert not [pair for pair in pairs if pair[0] != pair[1]][:3]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("00:01:30", 90.0),
        ("1:00:00", 3600.0),
        ("100:00:00", 360000.0),
        ("2-03:04:05", 183845.0),
        ("0-0:00:01", 1.0),
        (" 00:00:05 ", 5.0),
        (timedelta(days=1, milliseconds=500), 86400.5),
    ],
)
def test_a_duration_is_read_as_slurm_writes_it(value: Any, seconds: float) -> None:
    assert parse_duration("it", value) == seconds


@pytest.mark.parametrize(
    "value",
    ["90", "1:30", "1-12", "1-24:00:00", "00:60:00", "00:00:60", "-1:00:00", "1:00:00.5", "", "1h"],
)
def test_a_text_of_another_form_is_refused(value: str) -> None:
    """Of these, SLURM takes some as minutes: too easily read as something else."""
    with pytest.raises(ArgumentError, match=r"TimeLimit\(limit=...\) must be of the form"):
        TimeLimit(value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"limit": 0}, ArgumentError, "must be positive"),
        ({"limit": -1}, ArgumentError, "must be a finite duration"),
        ({"limit": float("inf")}, ArgumentError, "must be a finite duration"),
        ({"limit": float("nan")}, ArgumentError, "must be a finite duration"),
        ({"limit": timedelta(-1)}, ArgumentError, "must be a finite duration"),
        ({"limit": True}, ArgumentTypeError, "must be a duration"),
        ({"limit": None}, ArgumentTypeError, "must be a duration"),
        ({"limit": 5, "counts": "job"}, ArgumentError, '"launch" or "run", got \'job\''),
        ({"limit": 5, "margin": 5}, ArgumentError, "must be less than the limit of 5 s"),
        ({"limit": 5, "margin": -1}, ArgumentError, r"TimeLimit\(margin=...\)"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        TimeLimit(**arguments)


def test_a_margin_of_a_run_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    TimeLimit(5, "run", margin=1)
    assert "margin=...) has no effect" in caplog.text


@pytest.mark.shows("K42")
def test_the_same_command_goes_on_after_an_interruption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start() -> tuple[bool, int]:
        clock = Ticker()
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=5,
            chkpt_root=tmp_path,
            chkpt_frequency=_NEVER,
            use_cpu=True,
            print_banner=False,
            plugins=[clock, TimeLimit("00:00:03", clock=clock)],
            signals=RETURNS,
        )
        result = trainer.fit(SmallModel(Setting()), IndexModule(Setting()))
        return result, trainer.exit_code

    assert start() == (False, 75)
    said = capfd.readouterr().err
    assert "interrupted: the time limit of 0:00:03 is reached" in said
    assert "to resume from small_epoch_1_iter_3.pth" in said
    assert start() == (True, 0)
    assert start() == (True, 0)
    assert "Nothing to do" in capfd.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _SETTINGS)
def test_a_run_of_short_launches_is_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    """Every start makes one step: interrupted at each safe point, many times in a row."""
    setting = _SETTINGS[name]
    whole = _undisturbed(name)
    outcomes = _train_until_done(tmp_path / "cut", setting, lambda _: _launch(1))
    assert len(outcomes) >= len(whole.saves) - 1
    _assert_joined(outcomes, whole)


def _launch(limit: float, event: str = "on_training_batch_start") -> list[Plugin]:
    clock = Ticker(event, now=100.0)
    return [clock, TimeLimit(limit, clock=clock)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["steps", "accumulated steps", "epochs"])
@pytest.mark.parametrize("limit", [2, 5])
def test_a_run_of_longer_launches_is_the_undisturbed_one(
    name: str, limit: int, tmp_path: Path
) -> None:
    setting = _SETTINGS[name]
    whole = _undisturbed(name)
    outcomes = _train_until_done(tmp_path / "cut", setting, lambda _: _launch(limit))
    assert 2 < len(outcomes) <= len(whole.saves)
    _assert_joined(outcomes, whole)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_time_that_goes_by_in_a_validation_counts(name: str, tmp_path: Path) -> None:
    """The safe point behind a validation is the first one at which the run can be left."""
    setting = _SETTINGS[name]
    whole = _undisturbed(name)
    outcomes = _train_until_done(
        tmp_path / "cut", setting, lambda _: _launch(2, "on_validation_batch_start")
    )
    period = 3 if name == "steps" else 6
    assert [max(outcome.records) for outcome in outcomes[:-1]] == list(
        range(period, len(whole.records) - (name == "epochs"), period)
    )
    _assert_joined(outcomes, whole)


def test_a_margin_interrupts_earlier(tmp_path: Path) -> None:
    clock = Ticker()
    limit = TimeLimit(10, margin="00:00:06", clock=clock)
    outcome = train(tmp_path, _rarely(Setting()), clock, limit)
    assert max(outcome.records) == 4


def test_a_launch_is_counted_from_its_setup(tmp_path: Path) -> None:
    """Time before fit, and that of another fit in the process, does not count."""
    clock = Ticker(now=0.0)
    limit = TimeLimit(4, clock=clock)
    clock.now = 1000.0
    setting = _rarely(Setting(total_steps=12))
    lengths = [len(train(tmp_path, setting, clock, limit).records) for _ in range(3)]
    assert lengths == [4, 4, 4]


def test_a_step_is_made_in_every_launch(tmp_path: Path) -> None:
    """A start that takes longer than the limit comes on all the same."""
    setting = _rarely(Setting(total_steps=3))
    for number in range(1, 3):
        clock = Ticker("on_fit_start")
        outcome = train(tmp_path, setting, TimeLimit(1, clock=clock), clock)
        assert list(outcome.records) == [number]
        assert not outcome.has_ended


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["steps", "accumulated steps", "epochs", "manual epochs"])
def test_a_limit_of_the_run_ends_it_at_the_same_step(name: str, tmp_path: Path) -> None:
    """Restarted anywhere, with a clock that stands elsewhere."""
    setting = dataclasses.replace(_SETTINGS[name], total_steps=40, requests=True)
    starts = itertools.count()

    def run(folder: Path) -> Outcome:
        clock = Ticker(now=1000.25 * next(starts))
        return train(folder, setting, clock, TimeLimit(9, "run", clock=clock))

    whole = resume_everywhere(run, tmp_path)
    window = setting.accumulation if setting.unit == "iteration" else 1
    assert len(whole.records) == -(-9 // window) * window


def test_a_limit_of_the_run_ends_it_regularly(tmp_path: Path) -> None:
    clock = Ticker()
    limit = TimeLimit(5, "run", clock=clock)
    outcome = train(tmp_path, _rarely(Setting()), clock, limit)
    assert outcome.has_ended
    assert _code(limit) == 0
    clock.now += 100.0
    assert limit.elapsed == 5.0
    (path,) = tmp_path.glob("*/*.pth")
    assert '"finished": "0:00:05 of training are over"' in path.with_suffix(".json").read_text()
    assert not train(tmp_path, _rarely(Setting()), clock, limit).records


def test_a_limit_of_the_run_is_that_of_each_run(tmp_path: Path) -> None:
    clock = Ticker()
    limit = TimeLimit(5, "run", clock=clock)
    for name in "ab":
        assert len(train(tmp_path / name, _rarely(Setting()), clock, limit).records) == 5


def test_launches_do_not_count_for_the_run(tmp_path: Path) -> None:
    """Both together: launches end, and the run ends by the time that they have trained."""
    setting = _rarely(Setting(total_steps=40))
    lengths = []
    for _ in range(4):
        clock = Ticker(now=500.0)
        limits = (TimeLimit(4, clock=clock), TimeLimit(10, "run", clock=clock, plug_id="whole"))
        outcome = train(tmp_path, setting, clock, *limits)
        lengths.append(len(outcome.records))
    assert lengths == [4, 4, 2, 0]


def test_what_a_kill_has_cost_is_not_counted(tmp_path: Path) -> None:
    setting = Setting(total_steps=40, chkpt_frequency=4)

    class Stumble(Plugin):
        def setup(self) -> None: ...

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            if state.global_iteration == 7:
                raise RuntimeError("on purpose")

    clock = Ticker()
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path, setting, clock, TimeLimit(10, "run", clock=clock), Stumble("stumble"))
    clock = Ticker()
    outcome = train(tmp_path, setting, clock, TimeLimit(10, "run", clock=clock))
    assert list(outcome.records) == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(("counts", "steps"), [("launch", 1), ("run", 14)])
def test_a_trial_validation_counts_for_the_launch_only(
    counts: str, steps: int, tmp_path: Path
) -> None:
    now = [0.0]  # in a closure: the trial takes back what plugins hold

    class Careful(Plugin):
        def setup(self) -> None: ...

        def on_validation_batch_start(self, step: int) -> None:
            now[0] += 1.0

    limit = TimeLimit(2, counts, clock=lambda: now[0])
    setting = Setting(valid_frequency=None, options={"sanity_steps": 2})
    outcome = train(tmp_path, setting, Careful("careful"), limit)
    assert now == [2.0]
    assert len(outcome.records) == steps


def test_an_evaluation_is_not_limited(tmp_path: Path) -> None:
    clock = Ticker("on_validation_batch_start")
    limit = TimeLimit(1, clock=clock)
    train(tmp_path, Setting(valid_frequency=None), limit, clock)
    trainer = helios.Trainer(
        chkpt_root=tmp_path, use_cpu=True, print_banner=False, plugins=[limit, clock]
    )
    assert trainer.validate(SmallModel(Setting()), IndexModule(Setting()))
    assert clock.now == 2.0


# Every place where somebody may ask, and where the run is left then.
_INSIDE = [
    "on_training_step_start",
    "on_training_batch_start",
    "process_training_batch",
    "on_forward_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_training_batch_end",
    "on_training_step_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
]


class Owner(Asker):
    """Asks while it processes a batch."""

    def _act(self, *args: Any) -> Any:
        super()._act(*args)
        return args[0]


def _interrupt_once(
    folder: Path, setting: Setting, event: str, number: int
) -> tuple[list[Outcome], bool]:
    """Train with one interruption; returns the starts, and whether it was asked for at all."""
    kind = Owner if event.startswith("process") else Asker
    askers = [kind(event, number), Asker("on_training_end", _NEVER)]
    outcomes = _train_until_done(folder, setting, lambda start: [askers[start]])
    return outcomes, askers[0].left <= 0


def _assert_interruptible(
    folder: Path,
    name: str,
    event: str,
    numbers: range,
    check: Callable[[list[Outcome], Outcome], None] = _assert_joined,
) -> None:
    setting = _SETTINGS[name]
    whole = _undisturbed(name)
    interrupted = 0
    for number in numbers:
        outcomes, was_asked = _interrupt_once(folder / str(number), setting, event, number)
        if was_asked:
            assert len(outcomes) == 2 or max(outcomes[0].records) == len(whole.records)
            interrupted += len(outcomes) == 2
            check(outcomes, whole)
    assert interrupted


@pytest.mark.shows("K42")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("event", _INSIDE)
@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_a_run_may_be_interrupted_inside_of_an_epoch(name: str, event: str, tmp_path: Path) -> None:
    """The iteration before an epoch's end, its last one, and the first of the next among them."""
    numbers = range(1, 5) if "validation" in event else range(5, 8)
    _assert_interruptible(tmp_path, name, event, numbers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["epochs", "accumulated epochs", "manual epochs"])
@pytest.mark.parametrize("event", ["on_training_epoch_start", "on_training_epoch_end"])
def test_a_run_may_be_interrupted_between_epochs(name: str, event: str, tmp_path: Path) -> None:
    _assert_interruptible(tmp_path, name, event, range(1, 3))


@pytest.mark.parametrize("name", ["steps", "accumulated steps", "manual steps"])
def test_an_interruption_between_epochs_waits_for_a_safe_point(name: str, tmp_path: Path) -> None:
    """By steps the end of an epoch is no safe point."""
    _assert_interruptible(tmp_path, name, "on_training_epoch_end", range(1, 2))


def test_an_interruption_waits_for_the_end_of_a_window_across_epochs(tmp_path: Path) -> None:
    """Batches 5 and 6 end the epoch, and begin a window of four."""
    _assert_interruptible(tmp_path, "accumulated steps", "on_training_batch_end", range(5, 8))


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_a_poll_behind_a_safe_point_may_interrupt(name: str, tmp_path: Path) -> None:
    """A resume asks that poll again, so its event is told twice."""
    numbers = range(3, 6) if name == "steps" else range(6, 9)
    _assert_interruptible(tmp_path, name, _POLL, numbers, _assert_same)


@pytest.mark.parametrize(
    ("name", "event", "number"),
    [
        ("steps", "on_training_epoch_end", 1),
        ("accumulated steps", "on_training_epoch_end", 1),
        ("accumulated steps", "on_training_batch_end", 5),
    ],
)
def test_a_stop_asked_for_between_safe_points_keeps_what_was_trained(
    name: str, event: str, number: int, tmp_path: Path
) -> None:
    """DESIGN section 6, "The end of a run": a regular end has a checkpoint of its own."""
    asker = Asker(event, number, "request_stop")
    outcome = train(tmp_path, _rarely(_SETTINGS[name]), asker)
    assert outcome.has_ended
    (path,) = tmp_path.glob("*/*.pth")
    assert path.stem.endswith(f"iter_{max(outcome.records)}")


@pytest.mark.parametrize("name", ["steps", "epochs"])
@pytest.mark.parametrize("verbs", [("interrupt", "request_stop"), ("request_stop", "interrupt")])
def test_a_regular_end_at_the_same_boundary_wins(
    name: str, verbs: tuple[str, str], tmp_path: Path
) -> None:
    asker = Asker("on_training_batch_end", 5, *verbs)
    outcome = train(tmp_path, _rarely(_SETTINGS[name]), asker)
    assert outcome.has_ended
    assert _code(asker) == 0
    assert len(outcome.records) == 5
    assert not train(tmp_path, _rarely(_SETTINGS[name]), Asker("on_fit_start", _NEVER)).records


@pytest.mark.parametrize("name", ["steps", "accumulated steps", "epochs", "manual epochs"])
def test_an_interruption_at_the_last_boundary_changes_nothing(name: str, tmp_path: Path) -> None:
    setting = _SETTINGS[name]
    whole = _undisturbed(name)
    asker = Asker("on_training_batch_end", len(whole.records))
    outcome = train(tmp_path / "cut", _rarely(setting), asker)
    assert _code(asker) == 0
    assert outcome.bits() == whole.bits()
    assert outcome.events == whole.events


def test_early_stopping_at_the_same_boundary_wins(tmp_path: Path) -> None:
    setting = Setting(total_steps=30, early_stop_cycles=1, valid_frequency=1)
    whole = train(tmp_path / "whole", dataclasses.replace(setting, chkpt_frequency=1))
    assert 1 < len(whole.records) < 30
    asker = Asker("on_validation_end", len(whole.records))
    outcome = train(tmp_path / "cut", _rarely(setting), asker)
    assert _code(asker) == 0
    assert outcome.bits() == whole.bits()


def test_an_interruption_does_not_outlive_its_start(tmp_path: Path) -> None:
    """The same trainer may be asked to go on."""
    setting = Setting(total_steps=6)
    asker = Asker("on_training_batch_end", 2)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=6,
        chkpt_root=tmp_path,
        chkpt_frequency=_NEVER,
        use_cpu=True,
        print_banner=False,
        plugins=[asker],
        signals=RETURNS,
    )
    assert not trainer.fit(SmallModel(setting), IndexModule(setting))
    assert trainer.exit_code == 75
    assert trainer.fit(SmallModel(setting), IndexModule(setting))
    assert trainer.exit_code == 0


@pytest.mark.parametrize(("counts", "warns"), [("launch", True), ("run", False)])
def test_a_limit_of_a_launch_without_checkpoints_is_warned_of(
    counts: str, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=2,
        use_cpu=True,
        print_banner=False,
        plugins=[TimeLimit(60, counts)],
    )
    assert trainer.fit(SmallModel(Setting()), IndexModule(Setting()))
    assert ("this run writes no checkpoints" in capfd.readouterr().err) is warns


def test_an_interruption_without_checkpoints_says_that_nothing_was_saved(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asker = Asker("on_training_batch_end", 2)
    trainer = helios.Trainer(
        train_unit="iteration", total_steps=6, use_cpu=True, print_banner=False, plugins=[asker]
    )
    with pytest.raises(helios.Interrupted):
        trainer.fit(SmallModel(Setting()), IndexModule(Setting()))
    assert "No checkpoint was saved" in capfd.readouterr().err


def test_the_ways_out_are_told_and_the_ends_are_not(tmp_path: Path) -> None:
    """DESIGN section 7: neither on_training_epoch_end nor on_training_end."""
    outcome = train(tmp_path, _rarely(Setting()), Asker("on_training_batch_end", 3))
    names = [event[0] for event in outcome.events]
    assert names[-2:] == _WAY_OUT
    assert not {"on_training_epoch_end", "on_training_end"} & set(names)
    assert names.count("teardown") == names.count("on_fit_end") == 1
