"""The checks of a trainer's arguments: what is refused, in which words, and what is warned of."""

from __future__ import annotations

import inspect
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.schedule import Schedule
from helios.start.options import MEANT as MEANT_INSTEAD
from helios.start.options import Options
from helios.state import Phase, TrainingUnit

CPU = torch.device("cpu")


def make(**options: Any) -> Options:
    """Return the options of a trainer with these arguments."""
    given = inspect.signature(helios.Trainer).bind(**options)
    given.apply_defaults()
    return Options.of(given.arguments)


def check_refusal(name: str, value: Any, **options: Any) -> str:
    """Make arguments that must be refused for one of them; return the message.

    It names the argument, the rule, the value and a remedy (STYLE section 2).
    """
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        make(**options)
    message = str(caught.value)
    form = rf"Trainer\({name}=\.\.\.\) must .+, got {re.escape(repr(value))}\. \w.{{4,}}\."
    assert re.fullmatch(form, message, re.DOTALL), message
    return message


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, 0)


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.shows("H46")
def test_a_gpu_that_is_demanded_without_cuda_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"Trainer\(use_cpu=False\) must find a GPU.*Omit use_cpu"):
        make(use_cpu=False)


@pytest.mark.shows("H49")
@pytest.mark.parametrize(
    ("present", "is_started", "found"),
    [
        (None, False, ":4096:8"),
        (":16:8", True, ":16:8"),
        (None, True, "too late"),
        (":0:0", True, "it is ':0:0'"),
    ],
)
def test_determinism_on_a_gpu_sets_the_variable_of_cublas_or_is_refused_where_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch, present: str | None, is_started: bool, found: str
) -> None:
    set_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_started)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if present is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", present)
    make(enable_deterministic=True, use_cpu=True)
    if " " in found:
        with pytest.raises(UsageError, match=f"CUBLAS_WORKSPACE_CONFIG .*{found}"):
            make(enable_deterministic=True)
    else:
        make(enable_deterministic=True)
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == found


MEANT = {
    "keep_best": "store=CheckpointStore(keep_best=",
    "num_train_epochs": "max_epochs",
    "max_time": "plugins=[TimeLimit(",
    "learning_rate": "setup() of the model",
    "total_step": "total_steps?",
}


@pytest.mark.shows("U32")
@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_argument_names_the_one_that_is_meant(name: str) -> None:
    beginning = re.escape(f"Trainer() has no argument {name!r}. Did you mean {MEANT[name]}")
    with pytest.raises(ArgumentTypeError, match=f"^{beginning}"):
        helios.Trainer(**{name: 3})


@pytest.mark.shows("U32")
def test_what_is_named_instead_of_an_unknown_argument_exists() -> None:
    own = inspect.signature(helios.Trainer).parameters
    assert not MEANT_INSTEAD.keys() & own.keys()
    elsewhere = "trainer.fit|DataLoaderParams|setup\\(\\)"
    for meant in MEANT_INSTEAD.values():
        assert re.match(elsewhere, meant) or re.match(r"\w+", meant)[0] in own, meant


_INF = math.inf
_SAVING: dict[str, Any] = {"chkpt_root": ".", "chkpt_frequency": 1}

# Bad values alone are those of test_options.py, one for each option.
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("total_steps", True, {}),
    ("total_steps", math.nan, {}),
    ("early_stop_cycles", 0, {"total_steps": _INF, "valid_frequency": 1}),
    ("random_seed", 1 << 64, {}),
    ("skip_batches", (3, 0), {}),
    ("enable_cudnn_benchmark", True, {"enable_deterministic": True}),
    ("run_path", None, {"enable_tensorboard": True}),
    ("log_path", None, {"enable_file_logging": True}),
    ("log_path", __file__, {}),
    ("src_root", "nowhere", {}),
    ("chkpt_root", None, {"chkpt_frequency": 1}),
    ("chkpt_root", None, {"resume": "run_epoch_1_iter_2.pth"}),
    ("clip_norm", math.nan, {}),
    ("clip_value", 2.0, {"clip_norm": 1.0}),
    ("gpus", [0], {"use_cpu": True}),
    ("gpus", [0], {}),
    ("gpus", [], {}),
    ("hang_timeout", _INF, {}),
    ("nproc", 3, {"num_replicas": 2}),
    ("batch_limits", {"train": 1}, {}),
    ("allow_changes", ["num_replicas"], _SAVING),
    ("engine", Engine, {}),
    ("use_cpu", True, {"engine": Engine(CPU)}),
    ("clip_norm", 1.0, {"engine": Engine(CPU)}),
]


@pytest.mark.shows("E2", "H19", "H29", "H42", "H46", "H47", "H49", "H66", "P60", "R35", "R39")
@pytest.mark.parametrize(("name", "value", "others"), REFUSED)
def test_what_breaks_a_rule_or_contradicts_another_option_is_refused(
    name: str, value: Any, others: dict[str, Any]
) -> None:
    check_refusal(name, value, **{**others, name: value})


ACCEPTED: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "limits", Schedule()),
    ({}, "seed", 6691),
    ({"total_steps": 0}, "total_steps", 0),
    ({"total_steps": _INF}, "total_steps", _INF),
    ({"train_unit": "step"}, "train_unit", TrainingUnit.ITERATION),
    ({"skip_batches": [9, 5, 5, 7]}, "skip_batches", (5, 7, 9)),
    ({"chkpt_root": "."}, "can_save", False),
    (_SAVING, "can_save", True),
    ({"log_path": "new", "enable_file_logging": True}, "log_path", Path("new")),
    ({"precision": "fp16"}, "precision", Precision.FP16),
    ({"resume": "a.pth", "chkpt_root": "."}, "resume", Path("a.pth")),
    ({"allow_changes": "seed", "chkpt_root": "."}, "allow_changes", ("seed",)),
    (
        {"batch_limits": {"training": 3, Phase.TESTING: 2}},
        "batch_limits",
        {Phase.TRAINING: 3, Phase.TESTING: 2},
    ),
]


@pytest.mark.shows("H19", "H66", "P133")
@pytest.mark.parametrize(("options", "name", "value"), ACCEPTED)
def test_an_option_may_be_written_in_the_ways_that_the_page_lists(
    options: dict[str, Any], name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(make(**options), name) == value
    assert caplog.records == []


@pytest.mark.parametrize(("gpus", "ids"), [(None, [0, 1]), ([1], [1]), ([1, 0], [1, 0])])
def test_the_gpus_that_are_asked_for_or_all_are_used(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int] | None, ids: list[int]
) -> None:
    """H46, H48."""
    set_gpus(monkeypatch, 2)
    assert make(gpus=gpus).gpu_ids == ids
    assert make(use_cpu=True).gpu_ids == []
