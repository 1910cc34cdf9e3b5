"""What an error of a step shows: one frame of Helios, and the user's own frame last."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios import data, loops, plugins
from helios.core.tracebacks import fold_traceback, with_short_traceback
from helios.errors import HeliosError, UsageError
from tests.typed.user_script import Line, Numbers


class Failing(Line):
    """A model whose second step raises an error."""

    def __init__(self, error: BaseException, cause: BaseException | None = None) -> None:
        super().__init__("line")
        self.error, self.cause = error, cause

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        if state.global_iteration < 2:
            return super().train_step(batch, state)
        if self.cause is not None:
            raise self.error from self.cause
        raise self.error


class Refused(Line):
    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        self.trainer.plugins["late"] = None  # type: ignore[assignment]


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fit(model: helios.Model, **options: Any) -> BaseException:
    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, **options)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any error
        trainer.fit(model, Numbers())
    return caught.value


@pytest.mark.shows("U29")
def test_one_frame_of_helios_is_shown_and_the_users_comes_last() -> None:
    error = fit(Failing(ValueError("bad batch")))
    assert frames_of(error) == ["fit", "run", "train_step"]
    assert "HELIOS_FULL_TRACEBACK=1" in "".join(traceback.format_exception(error))
    assert fit(Failing(KeyboardInterrupt())).__class__ is KeyboardInterrupt


@pytest.mark.shows("U29")
def test_an_error_of_helios_ends_at_the_users_call() -> None:
    assert isinstance(error := fit(Refused("line")), UsageError)
    assert frames_of(error) == ["fit", "run", "train_step"]
    without = fit(helios.Model.__new__(Line))
    assert isinstance(without, UsageError)
    assert frames_of(without) == ["fit", "run"]


@pytest.mark.shows("U29")
def test_another_error_inside_of_helios_shows_where_it_was_raised() -> None:
    inside: dict[str, Any] = {"__name__": "helios.somewhere"}
    exec("def inner():\n    raise KeyError('x')\ndef outer():\n    inner()\n", inside)

    @with_short_traceback
    def call() -> None:
        inside["outer"]()

    with pytest.raises(KeyError) as caught:
        call()
    assert frames_of(caught.value)[1:] == ["run", "call", "inner"]


@pytest.mark.shows("U29")
def test_types_causes_and_contexts_stay() -> None:
    cause = KeyError("first")
    error = fit(Failing(LookupError("second"), cause))
    assert type(error) is LookupError
    assert error.__cause__ is cause
    assert error.__suppress_context__

    @with_short_traceback
    def fail() -> None:
        try:
            raise cause
        except KeyError:
            raise ValueError("third")  # noqa: B904 - a context, no cause

    with pytest.raises(ValueError, match="third") as caught:
        fail()
    assert caught.value.__context__ is cause
    assert caught.value.__cause__ is None


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    fold_traceback(first)


@pytest.mark.shows("U29")
def test_a_variable_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOS_FULL_TRACEBACK", "1")
    names = frames_of(fit(Failing(ValueError("bad batch"))))
    assert {"_carry_out", "execute", "take_step"} <= set(names)
    monkeypatch.setenv("HELIOS_FULL_TRACEBACK", "0")
    assert len(frames_of(fit(Failing(ValueError("bad batch"))))) == 3


@pytest.mark.shows("U29")
def test_the_screen_shows_an_error_once_and_the_log_file_all_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.core.test_tracebacks import *\n"
        "helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, enable_file_logging=True,"
        " log_path='logs').fit(Failing(ValueError('bad batch')), Numbers())\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ran.stderr
    assert ran.returncode == 1
    assert shown.count("Traceback") == shown.count("ValueError: bad batch") == 1
    assert "ERROR - Training ended with an error (ValueError). No checkpoint was saved.\n" in shown
    assert shown.splitlines()[-1] == "ValueError: bad batch"
    assert len(shown.splitlines()) < 15, shown
    (log,) = (tmp_path / "logs").iterdir()
    written = log.read_text()
    assert written.count("Traceback") == 1
    assert ", in take_step\n" in written


def test_a_handler_of_ones_own_gets_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    error = fit(Failing(ValueError("bad batch")))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


REFUSED: dict[str, Callable[[], Any]] = {
    "Trainer": lambda: helios.Trainer(total_steps=-1),
    "unknown name": lambda: helios.Trainer(max_epochs=1),  # type: ignore[call-arg]
    "missing": lambda: helios.KeepBest(),  # type: ignore[call-arg]
    "Audit": lambda: helios.Audit(0),
    "CheckpointStore": lambda: helios.CheckpointStore(keep_last=-1),
    "Engine": lambda: helios.Engine("nowhere"),
    "KeepBest": lambda: helios.KeepBest(3, "accuracy"),
    "Model": lambda: Line(1),  # type: ignore[arg-type]
    "Signals": lambda: helios.Signals(grace=-1),
    "CSVLogger": lambda: plugins.CSVLogger(3),  # type: ignore[arg-type]
    "EMA": lambda: plugins.EMA(decay=2),
    "EarlyStopping": lambda: plugins.EarlyStopping("accuracy", patience=2),
    "MLflow": lambda: plugins.MLflow(""),
    "NaNGuard": lambda: plugins.NaNGuard("nothing"),  # type: ignore[arg-type]
    "Profiler": lambda: plugins.Profiler("traces", active=0),
    "SWA": lambda: plugins.SWA(start=-1),
    "TimeLimit": lambda: plugins.TimeLimit(-1),
    "Tracker": lambda: plugins.Tracker(3, plugins.WandB("project")),  # type: ignore[arg-type]
    "WandB": lambda: plugins.WandB(""),
    "Mixture": lambda: data.Mixture({}),
    "Packed": lambda: data.Packed([3], 0),
    "Steps": lambda: data.Steps(0),
    "Stream": lambda: data.Stream(3),
    "YieldLoop": lambda: loops.YieldLoop("a"),
}


@pytest.mark.shows("U29")
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_a_constructor_ends_at_the_users_call(name: str) -> None:
    with pytest.raises((HeliosError, TypeError)) as caught:
        REFUSED[name]()
    assert isinstance(caught.value, HeliosError) == (name != "missing")
    assert frames_of(caught.value)[1:] == ["<lambda>", "run"]
