"""The profiler: traces of the iterations that were asked for, and no trace in the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import Plugin
from helios.plugins.profiler import Profiler
from helios.state import TrainingState
from tests.support.resume import resume_everywhere
from tests.support.runs import Outcome, Setting, train

_CPU = {"activities": [ProfilerActivity.CPU]}


def _traces(folder: Path) -> list[set[str]]:
    """Return the names in each trace, in the order of their writing."""
    paths = sorted(folder.glob("*.pt.trace.json"), key=lambda path: path.name.split(".")[-4])
    return [{event["name"] for event in _events(path)} for path in paths]


def _events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def _steps(names: set[str]) -> list[int]:
    return sorted(int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#"))


class Stumble(Plugin):
    """Ends a training in the middle of an iteration."""

    unsaved = ("act",)

    def __init__(self, event: str, act: Callable[[Plugin], object], iteration: int = 4) -> None:
        super().__init__("stumble")
        self.act = act
        self.iteration = iteration
        setattr(self, event, self._hear)

    def setup(self) -> None:
        """Nothing to prepare."""

    def _hear(self, *args: Any) -> None:
        if self.context.state.global_iteration == self.iteration:
            self.act(self)


def _fail(_: Plugin) -> None:
    raise RuntimeError("on purpose")


def test_a_trace_is_written_for_each_cycle(tmp_path: Path) -> None:
    profiler = Profiler(
        tmp_path / "new" / "traces", skip_first=1, wait=1, warmup=1, active=2, repeat=2, **_CPU
    )
    train(tmp_path / "run", Setting(), profiler)
    traces = _traces(tmp_path / "new" / "traces")
    assert [_steps(names) for names in traces] == [[3, 4], [7, 8]]
    assert any("aten::addmm" in names or "aten::linear" in names for names in traces)


def test_without_a_number_of_cycles_they_go_on_to_the_end(tmp_path: Path) -> None:
    """The last one, which the end of the training cuts off, is written as well."""
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=3, repeat=0, **_CPU)
    train(tmp_path / "run", Setting(total_steps=11), profiler)
    found = [_steps(names) for names in _traces(tmp_path)]
    assert found == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]


@pytest.mark.shows("K40")
def test_ranges_mark_the_parts_of_an_iteration(tmp_path: Path) -> None:
    ranges = {"training forward", "validation forward", "backward", "optimizer step"}
    for has_ranges in (True, False):
        folder = tmp_path / str(has_ranges)
        profiler = Profiler(folder, wait=0, warmup=1, active=4, ranges=has_ranges, **_CPU)
        train(folder / "run", Setting(), profiler)
        (names,) = _traces(folder)
        assert names & ranges == (ranges if has_ranges else set())


@pytest.mark.shows("K40")
def test_ranges_lie_inside_of_their_iteration(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=2, **_CPU)
    train(tmp_path / "run", Setting(validates=False, valid_frequency=None), profiler)
    (path,) = tmp_path.glob("*.json")
    spans = {name: [] for name in ("training forward", "backward", "optimizer step")}
    steps = []
    for event in _events(path):
        span = (event.get("ts", 0), event.get("ts", 0) + event.get("dur", 0))
        if event["name"] in spans:
            spans[event["name"]].append(span)
        elif event["name"].startswith("ProfilerStep#"):
            steps.append(span)
    assert [len(found) for found in spans.values()] == [2, 2, 2]
    for step, *parts in zip(sorted(steps), *map(sorted, spans.values()), strict=True):
        ends = [step[0], *(edge for part in parts for edge in part), step[1]]
        assert ends == sorted(ends)


def test_options_go_to_torch(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, active=1, record_shapes=True, with_flops=True, **_CPU)
    train(tmp_path / "run", Setting(), profiler)
    (path,) = tmp_path.glob("*.json")
    assert any("Input Dims" in event.get("args", {}) for event in _events(path))


@pytest.mark.parametrize("changed", [{}, {"unit": "epoch", "total_steps": 2}, {"is_manual": True}])
def test_no_bit_of_the_training_changes(changed: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(**changed)
    profiler = Profiler(
        tmp_path, wait=1, warmup=1, active=3, record_shapes=True, profile_memory=True, **_CPU
    )
    plain, profiled = train(tmp_path / "a", setting), train(tmp_path / "b", setting, profiler)
    assert profiled.records == plain.records
    assert profiled.bits() == plain.bits()
    assert profiled.events == plain.events


def test_a_resumed_run_begins_the_schedule_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(total_steps=8)

    def run(folder: Path) -> Outcome:
        return train(folder, setting, Profiler(folder, wait=0, warmup=1, active=2, **_CPU))

    resume_everywhere(run, tmp_path, is_whole=True)
    assert [_steps(names) for names in _traces(tmp_path / "whole")] == [[1, 2]]
    for number in range(7):
        left = 7 - number
        expected = [[step for step in (1, 2) if step <= left]]
        found = [_steps(names) for names in _traces(tmp_path / f"resumed-{number}")]
        assert found == expected, number
    said = capfd.readouterr().err
    assert "has no state_dict" not in said


def test_a_schedule_that_is_longer_than_the_run_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", Setting(total_steps=4), Profiler(tmp_path / "t", skip_first=9, **_CPU))
    said = capfd.readouterr().err
    assert (
        "recorded nothing: this start made 4 iterations, and the schedule skips the first 11"
        in said
    )
    assert said.count("recorded nothing") == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "event",
    ["on_forward_end", "on_backward_start", "on_optimizer_step_start", "on_training_batch_end"],
)
def test_an_error_ends_the_recording_and_keeps_what_there_is(event: str, tmp_path: Path) -> None:
    """Another profiler can begin in the same process, so nothing was left open."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        plugins = [
            Profiler(folder, wait=0, warmup=1, active=9, **_CPU),
            Stumble(event, _fail),
        ]
        with pytest.raises(RuntimeError, match="on purpose"):
            train(folder / "run", Setting(), *plugins)
    open_range = {"on_backward_start": "backward", "on_optimizer_step_start": "optimizer step"}
    for folder in folders:
        (path,) = folder.glob("*.json")
        names = [found["name"] for found in _events(path)]
        # Two iterations are whole; the range that was open when the third one failed is closed.
        assert names.count(open_range.get(event, "training forward")) == 3
    with torch.profiler.profile(**_CPU) as after:
        torch.ones(2) + 1
    assert {event.key for event in after.key_averages()} >= {"aten::add"}


@pytest.mark.parametrize("event", ["on_training_epoch_start", "on_fit_start"])
def test_an_error_before_the_first_iteration_ends_it_too(event: str, tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=2, **_CPU)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path / "run", Setting(), profiler, Stumble(event, _fail, iteration=0))
    train(tmp_path / "other", Setting(), profiler)
    assert [_steps(names) for names in _traces(tmp_path)] == [[1, 2]]


def test_what_comes_after_the_training_is_not_in_the_trace(tmp_path: Path) -> None:
    class Late(Plugin):
        def setup(self) -> None: ...

        def on_fit_end(self) -> None:
            torch.special.i0(torch.ones(1))

    profiler = Profiler(tmp_path, wait=0, warmup=1, active=99, **_CPU)
    train(tmp_path / "run", Setting(), Late("late"), profiler)
    (names,) = _traces(tmp_path)
    assert not [name for name in names if "i0" in name]


def test_after_the_last_cycle_there_is_nothing_to_pay_for(tmp_path: Path) -> None:
    profiler, is_on = Profiler(tmp_path, wait=0, warmup=1, active=2, **_CPU), []

    class Look(Plugin):
        def setup(self) -> None: ...

        def on_training_batch_start(self, state: TrainingState) -> None:
            is_on.append(profiler._profile is not None)

    train(tmp_path / "run", Setting(total_steps=6), profiler, Look("look"))
    assert is_on == [True, True, True, False, False, False]


def test_an_interruption_ends_the_recording(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=9, **_CPU)
    ask = Stumble("on_training_batch_end", lambda plugin: plugin.context.interrupt("asked"))
    outcome = train(tmp_path / "run", Setting(), profiler, ask)
    assert not outcome.has_ended
    assert _steps(*_traces(tmp_path))[:3] == [1, 2, 3]


def test_a_trace_that_cannot_be_written_is_said_and_the_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    profiler = Profiler(folder, wait=0, warmup=1, active=2, repeat=2, **_CPU)
    folder.write_text("in the way")
    profiled = train(tmp_path / "run", Setting(), profiler)
    assert profiled.bits() == train(tmp_path / "plain", Setting()).bits()
    assert capfd.readouterr().err.count("could not write a trace into") == 2


def test_an_error_of_the_recorder_itself_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended once more after it, torch's recorder crashes the process."""
    prepare, calls = torch.profiler.profile.prepare_trace, []

    def fail_later(recorder: Any) -> None:
        calls.append(recorder)
        if len(calls) == 2:
            raise RuntimeError("on purpose")
        prepare(recorder)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", fail_later)
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=2, repeat=2, **_CPU)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path / "run", Setting(), profiler)
    train(tmp_path / "other", Setting(), profiler)
    assert [_steps(names) for names in _traces(tmp_path)] == [[1, 2], [1, 2], [4, 5]]


def test_a_profiler_serves_several_fits(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=2, **_CPU)
    for name in "ab":
        train(tmp_path / name, Setting(), profiler)
    assert [_steps(names) for names in _traces(tmp_path)] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"wait": -1}, ArgumentError, r"Profiler\(wait=...\) must be an int of at least 0, got -1"),
        ({"active": 0}, ArgumentError, "at least 1, got 0"),
        ({"warmup": 1.5}, ArgumentError, "warmup"),
        ({"repeat": True}, ArgumentError, "repeat"),
        ({"skip_first": None}, ArgumentError, "skip_first"),
        ({"shapes": True}, ArgumentTypeError, "got \\['shapes'\\].*record_shapes"),
        ({"schedule": None}, ArgumentTypeError, "got \\['schedule'\\]"),
        ({"folder": 3}, ArgumentTypeError, "must be a path"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        Profiler(**{"folder": tmp_path, **arguments})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="must be a folder"):
        Profiler(tmp_path / "file")


def test_iterations_are_counted_not_steps(tmp_path: Path) -> None:
    class Count(Plugin):
        unsaved = ("batches",)
        batches = 0

        def setup(self) -> None: ...

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            self.batches += 1

    count = Count("count")
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=9, repeat=0, **_CPU)
    train(tmp_path / "run", Setting(accumulation=3, total_steps=3), profiler, count)
    assert count.batches == 9
    assert _steps(*_traces(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
