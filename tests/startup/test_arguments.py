"""The checks of a trainer's arguments: what is refused, in which words, and what is warned of."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import helios
from helios.checkpoint.store import CheckpointStore
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.schedule import Schedule
from helios.startup.signal_policy import Signals
from helios.startup.trainer_options import CHANGEABLE, ROWS, Options
from helios.startup.unknown_arguments import MEANT as MEANT_INSTEAD
from helios.state import Phase, TrainingUnit
from tests.support.quiet import Quiet

DEFAULTS: dict[str, Any] = {
    "run_name": "",
    "train_unit": TrainingUnit.EPOCH,
    "total_steps": 0,
    "valid_frequency": None,
    "chkpt_frequency": None,
    "print_frequency": None,
    "accumulation_steps": 1,
    "enable_cudnn_benchmark": False,
    "enable_deterministic": False,
    "early_stop_cycles": None,
    "use_cpu": None,
    "gpus": None,
    "random_seed": None,
    "enable_tensorboard": False,
    "enable_file_logging": False,
    "capture_warnings": False,
    "enable_progress_bar": False,
    "chkpt_root": None,
    "log_path": None,
    "run_path": None,
    "src_root": None,
    "import_prefix": "",
    "print_banner": True,
    "engine": None,
    "precision": None,
    "plugins": (),
    "store": None,
    "signals": None,
    "num_replicas": None,
    "nproc": None,
    "sharding": "none",
    "init": "setup",
    "clip_norm": None,
    "clip_value": None,
    "resume": "auto",
    "allow_changes": (),
    "on_incomplete": "warn",
    "ledger": "steps",
    "skip_batches": (),
    "sanity_steps": 0,
    "batch_limits": None,
    "params": None,
    "hang_warning": 60.0,
    "hang_timeout": None,
}
FLAGS = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]
CPU = torch.device("cpu")


def make(**options: Any) -> Options:
    return helios.Trainer(**{**DEFAULTS, **options})._options


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


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


def test_the_defaults_are_accepted_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """API section 12."""
    arguments = make()
    assert arguments.seed == 6691
    assert arguments.gpu_ids == []
    assert arguments.schedule == Schedule()
    assert not arguments.can_save
    assert caplog.records == []


@pytest.mark.shows("H66", "R35")
@pytest.mark.parametrize("value", [2.5, 10.0, -1, True, "10", None, math.nan, -math.inf, [3]])
def test_a_total_must_be_a_count_or_infinite(value: Any) -> None:
    """H66, API section 12."""
    check_refusal("total_steps", value, total_steps=value)


@pytest.mark.shows("R35")
@pytest.mark.parametrize("value", [0, 1, 10**12, math.inf, float("inf")])
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_any_count_is_a_total_and_so_is_infinity(value: float, unit: str) -> None:
    """H66, DESIGN section 6: total_steps=0 is legal."""
    assert make(total_steps=value, train_unit=unit).schedule.total_steps == value


@pytest.mark.shows("H29")
@pytest.mark.parametrize("name", ["valid_frequency", "chkpt_frequency", "print_frequency"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, False, "3"])
def test_a_frequency_must_be_a_positive_int_or_none(name: str, value: Any, tmp_path: Path) -> None:
    """H29, API section 12."""
    check_refusal(name, value, **{name: value}, chkpt_root=tmp_path)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "2"])
def test_an_accumulation_must_be_a_positive_int(value: Any) -> None:
    """DESIGN section 6: the arguments of a trainer."""
    check_refusal("accumulation_steps", value, accumulation_steps=value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_patience_must_be_a_count_or_none(value: Any) -> None:
    """API section 12."""
    check_refusal("early_stop_cycles", value, early_stop_cycles=value, valid_frequency=1)


@pytest.mark.shows("H66")
def test_no_end_and_no_patience_contradict_each_other() -> None:
    """H66."""
    check_refusal(
        "early_stop_cycles", 0, early_stop_cycles=0, total_steps=math.inf, valid_frequency=1
    )
    for options in ({"early_stop_cycles": 0, "total_steps": 9}, {"early_stop_cycles": 1}):
        make(**{"total_steps": math.inf, "valid_frequency": 1, **options})


@pytest.mark.parametrize("value", ["epochs", "EPOCH", "", "steps", None, 1, ["epoch"]])
def test_an_unknown_unit_is_refused(value: Any) -> None:
    """API section 12."""
    check_refusal("train_unit", value, train_unit=value)


@pytest.mark.shows("H66")
@pytest.mark.parametrize("unit", list(TrainingUnit))
def test_a_unit_may_be_given_by_its_word(unit: TrainingUnit) -> None:
    """H66."""
    assert make(train_unit=unit).schedule.unit is unit
    assert make(train_unit=unit.name.lower()).schedule.unit is unit


@pytest.mark.shows("P133")
def test_a_step_is_the_unit_iteration() -> None:
    assert make(train_unit="step").schedule.unit is TrainingUnit.ITERATION


@pytest.mark.parametrize("value", [-1, 1 << 64, 1.5, True, "7"])
def test_a_seed_must_have_64_bits(value: Any) -> None:
    check_refusal("random_seed", value, random_seed=value)


@pytest.mark.parametrize("value", [0, 1, (1 << 64) - 1])
def test_an_explicit_seed_wins_also_when_it_is_zero(value: int) -> None:
    """H1."""
    assert make(random_seed=value).seed == value


@pytest.mark.parametrize("value", ["key", None, True])
def test_a_model_is_initialized_by_setup_or_by_keys(value: Any) -> None:
    check_refusal("init", value, init=value)
    assert make(init="keyed").init == "keyed"


@pytest.mark.shows("P60")
@pytest.mark.parametrize("value", [3, (3, 0), (3, 4.0), "8"], ids=str)
def test_batches_to_skip_are_numbers_from_one(value: Any) -> None:
    check_refusal("skip_batches", value, skip_batches=value)


def test_skipped_batches_are_sorted_and_named_once() -> None:
    for given in ([9, 5, 5, 7], {5, 7, 9}, range(5, 10, 2)):
        assert make(skip_batches=given).skip_batches == (5, 7, 9)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_a_flag_must_be_a_bool(name: str, value: Any, tmp_path: Path) -> None:
    paths = {"log_path": tmp_path, "run_path": tmp_path}
    check_refusal(name, value, **{name: value}, **paths)


def test_there_are_seven_flags() -> None:
    """The list above is taken from the defaults."""
    assert len(FLAGS) == 7


@pytest.mark.shows("H49")
def test_determinism_and_benchmarking_contradict_each_other() -> None:
    """H49."""
    options = {"enable_deterministic": True, "enable_cudnn_benchmark": True}
    assert "enable_deterministic=True" in check_refusal("enable_cudnn_benchmark", True, **options)


@pytest.mark.parametrize("value", ["a/b", "a\\b", "a\0b", "/", None, 3])
def test_a_run_name_must_be_the_name_of_a_file(value: Any) -> None:
    """DESIGN section 6."""
    check_refusal("run_name", value, run_name=value)


@pytest.mark.parametrize("value", ["", "run", "run_epoch_1_iter_2", "läuft schon", "v1.2"])
def test_other_run_names_are_accepted(value: str) -> None:
    """C1: also one that contains the words of a checkpoint's name."""
    assert make(run_name=value).run_name == value


@pytest.mark.shows("H42")
@pytest.mark.parametrize(
    ("flag", "path"), [("enable_tensorboard", "run_path"), ("enable_file_logging", "log_path")]
)
def test_a_log_needs_its_folder(flag: str, path: str, tmp_path: Path) -> None:
    """H42."""
    assert f"{flag}=True" in check_refusal(path, None, **{flag: True})
    arguments = make(**{flag: True, path: tmp_path / "new"})
    assert getattr(arguments, path) == tmp_path / "new"
    assert not (tmp_path / "new").exists()


@pytest.mark.shows("H42")
@pytest.mark.parametrize("name", ["chkpt_root", "log_path", "run_path", "src_root"])
def test_a_folder_must_not_be_a_file(name: str, a_file: Path) -> None:
    """H42, API section 12: said without the flag as well."""
    check_refusal(name, str(a_file), **{name: a_file})


@pytest.mark.parametrize("name", ["chkpt_root", "log_path", "run_path", "src_root"])
@pytest.mark.parametrize("value", [3, b"folder", True])
def test_a_folder_must_be_a_path(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        make(**{name: value})
    check_refusal(name, value, **{name: value})


def test_folders_may_be_given_as_strings(tmp_path: Path) -> None:
    names = ("chkpt_root", "log_path", "run_path", "src_root")
    arguments = make(**dict.fromkeys(names, str(tmp_path)))
    assert [getattr(arguments, name) for name in names] == [tmp_path] * 4


def test_the_root_of_the_sources_must_exist(tmp_path: Path) -> None:
    """API section 12."""
    missing = tmp_path / "missing"
    check_refusal("src_root", str(missing), src_root=missing)
    assert make(src_root=tmp_path).src_root == tmp_path


def test_a_prefix_of_imports_must_be_a_string(tmp_path: Path) -> None:
    check_refusal("import_prefix", None, import_prefix=None, src_root=tmp_path)


@pytest.mark.shows("H19")
def test_a_save_needs_a_folder() -> None:
    """H19: both a folder and a frequency."""
    assert "chkpt_frequency" in check_refusal("chkpt_root", None, chkpt_frequency=1)


@pytest.mark.shows("H19")
@pytest.mark.parametrize(
    ("has_root", "frequency", "can_save"), [(True, 1, True), (True, None, False)]
)
def test_checkpoints_are_written_where_folder_and_frequency_are_set(
    has_root: bool, frequency: int | None, can_save: bool, tmp_path: Path
) -> None:
    """H19: a folder alone only loads."""
    root = tmp_path if has_root else None
    assert make(chkpt_root=root, chkpt_frequency=frequency).can_save is can_save


@pytest.mark.shows("R39")
@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", [1.0]])
def test_a_clip_must_be_a_positive_number(name: str, value: Any) -> None:
    """R39."""
    check_refusal(name, value, **{name: value})


@pytest.mark.shows("R39")
def test_gradients_are_clipped_in_one_way_only() -> None:
    """R39."""
    check_refusal("clip_value", 2.0, clip_norm=1.0, clip_value=2.0)
    assert make(clip_norm=1).clip_norm == 1
    assert make(clip_value=0.5).clip_value == 0.5


@pytest.mark.parametrize("value", [1, 0, "yes", []])
def test_the_choice_of_the_cpu_must_be_a_bool_or_none(value: Any) -> None:
    check_refusal("use_cpu", value, use_cpu=value)


@pytest.mark.shows("H46")
@pytest.mark.parametrize("gpus", [[0], []])
def test_the_cpu_and_gpus_contradict_each_other(gpus: list[int]) -> None:
    """H46."""
    assert "use_cpu=True" in check_refusal("gpus", gpus, gpus=gpus, use_cpu=True)


@pytest.mark.shows("H47")
@pytest.mark.parametrize("gpus", [[0], [], [-1], 0, (0,), ["0"], [0, 0]])
def test_gpus_without_cuda_are_refused(gpus: Any) -> None:
    """H47: never the CPU in silence."""
    check_refusal("gpus", gpus, gpus=gpus)


@pytest.mark.shows("H46")
def test_a_gpu_that_is_demanded_without_cuda_is_an_error() -> None:
    """H46: a RuntimeError."""
    with pytest.raises(UsageError, match=r"Trainer\(use_cpu=False\) must find a GPU.*Omit use_cpu"):
        make(use_cpu=False)


@pytest.mark.parametrize(("gpus", "ids"), [(None, [0, 1]), ([1], [1]), ([1, 0], [1, 0])])
def test_the_gpus_that_are_asked_for_or_all_are_used(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int] | None, ids: list[int]
) -> None:
    """H46, H48."""
    set_gpus(monkeypatch, 2)
    assert make(gpus=gpus).gpu_ids == ids
    assert make(use_cpu=True).gpu_ids == []


@pytest.mark.parametrize("value", [(15,), False])
def test_signals_are_none_or_options(value: Any) -> None:
    """DESIGN section 6: the arguments of a trainer."""
    assert make().signals == Signals()
    assert make(signals=Signals(())).signals.numbers == ()
    assert "Pass e.g. Signals(" in check_refusal("signals", value, signals=value)


@pytest.mark.parametrize("value", [0, -1.0, True, "60", float("inf"), float("nan")])
def test_a_warning_of_hangs_comes_after_some_seconds_or_never(value: Any) -> None:
    assert make(hang_warning=None).hang_warning is None
    check_refusal("hang_warning", value, hang_warning=value)


@pytest.mark.parametrize("value", [0, -1.0, True, "60", float("inf"), float("nan"), 60.0, 59])
def test_an_end_of_hangs_comes_after_the_warning_or_never(value: Any) -> None:
    assert make(hang_timeout=60.5).hang_timeout == 60.5
    assert make(hang_timeout=1, hang_warning=None).hang_timeout == 1
    assert make(hang_timeout=None).hang_timeout is None
    check_refusal("hang_timeout", value, hang_timeout=value)


@pytest.mark.parametrize("value", ["fp8", "", torch.float32, 16])
def test_a_precision_is_one_or_the_name_of_one(value: Any) -> None:
    """E22, E23."""
    assert make(precision="fp16").precision == Precision.FP16
    assert make(precision=Precision.BF16).precision == Precision.BF16
    check_refusal("precision", value, precision=value)


@pytest.mark.parametrize("name", ["num_replicas", "nproc"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_replicas_and_processes_are_positive_numbers(name: str, value: Any) -> None:
    """DESIGN section 6, "Processes"."""
    assert getattr(make(**{name: 3}), name) == 3
    check_refusal(name, value, **{name: value})


def test_a_process_carries_one_replica_at_least() -> None:
    """DESIGN section 6, "Processes": an explicit P > V is an error."""
    assert make(num_replicas=2, nproc=2).nproc == 2
    assert "num_replicas=2" in check_refusal("nproc", 3, num_replicas=2, nproc=3)


@pytest.mark.shows("H49")
@pytest.mark.parametrize("present", [None, ":16:8"])
def test_determinism_on_a_gpu_sets_the_variable_of_cublas_in_time(
    monkeypatch: pytest.MonkeyPatch, present: str | None
) -> None:
    """H49: CUDA reads it once, when it starts."""
    set_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: present is not None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if present is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", present)
    make(enable_deterministic=True)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == (present or ":4096:8")


@pytest.mark.shows("H49")
@pytest.mark.parametrize(("present", "reason"), [(None, "too late"), (":0:0", "it is ':0:0'")])
def test_determinism_on_a_gpu_is_refused_where_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch, present: str | None, reason: str
) -> None:
    """H49."""
    set_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if present is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", present)
    with pytest.raises(UsageError, match=f"CUBLAS_WORKSPACE_CONFIG .*{reason}"):
        make(enable_deterministic=True)
    make(enable_deterministic=True, use_cpu=True)


@pytest.mark.parametrize("value", ["auto", "never"])
def test_resuming_is_automatic_or_never(value: str) -> None:
    """DESIGN section 6."""
    assert make(resume=value, chkpt_root=Path()).resume == value


@pytest.mark.parametrize("value", [None, True, 3, b"path"])
def test_another_way_to_resume_is_refused(value: Any, tmp_path: Path) -> None:
    """DESIGN section 6: unknown values are errors."""
    check_refusal("resume", value, resume=value, chkpt_root=tmp_path)


@pytest.mark.parametrize("kind", [str, Path])
def test_resuming_from_a_path_needs_a_folder_for_new_checkpoints(
    kind: type, tmp_path: Path
) -> None:
    """DESIGN section 6."""
    path = tmp_path / "run_epoch_1_iter_2.pth"
    assert "resume=" in check_refusal("chkpt_root", None, resume=kind(path))
    assert make(resume=kind(path), chkpt_root=tmp_path).resume == path


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_change_is_allowed_by_its_name(name: str, tmp_path: Path) -> None:
    """DESIGN section 6; a single name need not stand in a tuple."""
    assert make(allow_changes=[name], chkpt_root=tmp_path).allow_changes == (name,)
    assert make(allow_changes=name, chkpt_root=tmp_path).allow_changes == (name,)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "2"])
def test_a_trial_validation_takes_a_count_of_batches(value: Any) -> None:
    assert make(sanity_steps=2).sanity_steps == 2
    check_refusal("sanity_steps", value, sanity_steps=value)


@pytest.mark.parametrize("value", [3, {"train": 1}, {Phase.TRAINING: 0}, {Phase.TESTING: True}])
def test_limits_of_batches_are_positive_numbers_by_phase(value: Any) -> None:
    limits = MappingProxyType({Phase.TRAINING: 1, Phase.TESTING: 3})
    assert make(batch_limits=limits).batch_limits == dict(limits)
    check_refusal("batch_limits", value, batch_limits=value)


@pytest.mark.parametrize("names", [("num_replicas",), ("batch_size", "lr"), "all", (1,)])
def test_a_change_that_is_unknown_or_never_allowed_is_refused(names: Any, tmp_path: Path) -> None:
    """DESIGN section 6: num_replicas never; the rule lists what may be allowed."""
    unknown = [names] if isinstance(names, str) else list(names[-1:])
    message = check_refusal("allow_changes", unknown, allow_changes=names, chkpt_root=tmp_path)
    assert all(name in message for name in CHANGEABLE)


@pytest.mark.parametrize("value", [None, 3, True])
def test_the_allowed_changes_must_be_names(value: Any, tmp_path: Path) -> None:
    check_refusal("allow_changes", value, allow_changes=value, chkpt_root=tmp_path)


def test_plugins_must_be_a_list_of_plugins() -> None:
    """DESIGN section 9."""
    plugin, stranger = Quiet("quiet"), object()
    assert list(helios.Trainer(plugins=[plugin]).plugins.values()) == [plugin]
    check_refusal("plugins", stranger, plugins=[plugin, stranger])
    check_refusal("plugins", Quiet, plugins=[Quiet])


@pytest.mark.parametrize("value", [None, Quiet("alone"), 3], ids=["None", "a plugin", "a number"])
def test_plugins_that_are_no_list_are_refused_by_their_name(value: Any) -> None:
    check_refusal("plugins", value, plugins=value)


def test_a_store_must_be_a_store(tmp_path: Path) -> None:
    """DESIGN section 6."""
    store = CheckpointStore()
    assert make(store=store, chkpt_root=tmp_path, chkpt_frequency=1).store is store
    check_refusal("store", "folder", store="folder", chkpt_root=tmp_path)


def test_an_engine_must_be_an_engine() -> None:
    """E40."""
    assert make(engine=Engine(CPU)).gpu_ids == []
    check_refusal("engine", CPU, engine=CPU)
    check_refusal("engine", Engine, engine=Engine)


@pytest.mark.shows("E2")
@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cpu", True), ("use_cpu", False), ("gpus", [0]), ("clip_norm", 1.0), ("clip_value", 1.0)],
)
def test_an_engine_brings_its_own_device_and_clipping(name: str, value: Any) -> None:
    """E40: two places for one option would leave one of them without effect."""
    check_refusal(name, value, engine=Engine(CPU), **{name: value})


@pytest.mark.parametrize(
    ("device", "ids"),
    [("cpu", []), ("cpu:0", []), ("cuda:3", [3]), ("cuda:0", [0]), ("cuda", [0]), ("meta", [])],
)
def test_the_gpus_of_an_engine_are_those_of_its_device(device: str, ids: list[int]) -> None:
    """API section 12: gpu_ids is empty on the CPU, which has an index too."""
    assert make(engine=Engine(torch.device(device))).gpu_ids == ids


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"early_stop_cycles": 2}, "early_stop_cycles"),
        ({"run_path": "folder"}, "run_path"),
        ({"log_path": "folder"}, "log_path"),
        ({"enable_cudnn_benchmark": True}, "enable_cudnn_benchmark"),
        ({"store": CheckpointStore()}, "store"),
        ({"store": CheckpointStore(keep_last=2), "chkpt_root": "folder"}, "store"),
        ({"import_prefix": "src"}, "import_prefix"),
        ({"resume": "never"}, "resume"),
        ({"allow_changes": ("seed",)}, "allow_changes"),
        ({"on_incomplete": "raise"}, "on_incomplete"),
    ],
)
def test_an_option_without_effect_is_warned_of_by_its_name(
    options: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """STYLE section 2: warn when an option has no effect."""
    monkeypatch.chdir(tmp_path)
    make(**options)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"Trainer({name}=...)" in record.getMessage()
    assert "no effect without" in record.getMessage()


@pytest.mark.parametrize(
    "options",
    [
        {"early_stop_cycles": 2, "valid_frequency": 1},
        {"run_path": "folder", "enable_tensorboard": True},
        {"log_path": "folder", "enable_file_logging": True},
        {"store": CheckpointStore(), "chkpt_root": "folder", "chkpt_frequency": 1},
        {"chkpt_root": "folder", "resume": "never"},
        {"chkpt_root": "folder", "allow_changes": ("seed",)},
        {"chkpt_root": "folder"},
        {"src_root": ".", "import_prefix": "src"},
        {"engine": Engine(torch.device("cuda:0")), "enable_cudnn_benchmark": True},
        {"engine": Engine(torch.device("cuda")), "enable_cudnn_benchmark": True},
    ],
)
def test_an_option_that_has_an_effect_is_not_warned_of(
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(**options)
    assert caplog.records == []


def test_the_schedule_takes_every_option_that_decides_when(tmp_path: Path) -> None:
    arguments = make(
        train_unit="iteration",
        total_steps=9,
        valid_frequency=2,
        chkpt_frequency=3,
        print_frequency=4,
        accumulation_steps=5,
        early_stop_cycles=6,
        chkpt_root=tmp_path,
    )
    assert arguments.schedule == Schedule(
        unit=TrainingUnit.ITERATION,
        total_steps=9,
        valid_frequency=2,
        chkpt_frequency=3,
        print_frequency=4,
        accumulation_steps=5,
        early_stop_cycles=6,
    )


def test_every_option_has_its_own_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "run_name": "name",
        "total_steps": 9,
        "valid_frequency": 2,
        "chkpt_frequency": 3,
        "print_frequency": 4,
        "accumulation_steps": 5,
        "enable_cudnn_benchmark": False,
        "enable_deterministic": True,
        "early_stop_cycles": 6,
        "use_cpu": True,
        "gpus": None,
        "random_seed": 7,
        "enable_tensorboard": True,
        "enable_file_logging": True,
        "capture_warnings": False,
        "enable_progress_bar": True,
        "chkpt_root": tmp_path / "chkpt",
        "log_path": tmp_path / "log",
        "run_path": tmp_path / "run",
        "src_root": tmp_path,
        "import_prefix": "prefix",
        "print_banner": False,
        "engine": None,
        "precision": Precision.BF16,
        "store": CheckpointStore(keep_last=2),
        "num_replicas": 8,
        "nproc": 4,
        "sharding": "none",
        "init": "keyed",
        "clip_norm": None,
        "clip_value": 0.5,
        "resume": "never",
        "allow_changes": ("seed",),
        "on_incomplete": "raise",
        "ledger": "off",
        "skip_batches": (),
        "sanity_steps": 1,
        "batch_limits": {Phase.TRAINING: 10},
        "params": {"lr": 0.1},
        "hang_warning": 3.5,
        "hang_timeout": 9.5,
    }
    apart: dict[str, Any] = {"train_unit": TrainingUnit.ITERATION, "plugins": ()}
    apart["signals"] = Signals(())
    parameters = inspect.signature(helios.Trainer).parameters
    assert list(DEFAULTS) == list(parameters)
    assert {name: each.default for name, each in parameters.items()} == DEFAULTS
    assert set(given) | set(apart) == set(parameters)
    options = make(**given, **apart)
    assert set(ROWS) | {"plugins"} == set(parameters)
    assert {name: getattr(options, name) for name in given} == given
    assert (options.train_unit, options.signals) == (TrainingUnit.ITERATION, Signals(()))


MEANT = {
    "keep_best": "store=CheckpointStore(keep_best=",
    "keep_last": "store=CheckpointStore(keep_last=...)",
    "max_epochs": "total_steps, which counts epochs",
    "max_steps": 'total_steps with train_unit="iteration"',
    "accelerator": "use_cpu and gpus",
    "devices": "use_cpu and gpus",
    "strategy": "nproc",
    "callbacks": "plugins",
    "logger": "plugins=[CSVLogger(...)",
    "default_root_dir": "chkpt_root",
    "gradient_clip_val": "clip_norm",
    "gradient_accumulation_steps": "accumulation_steps",
    "check_val_every_n_epoch": "valid_frequency",
    "max_time": "plugins=[TimeLimit(",
    "learning_rate": "setup() of the model",
    "total_step": "total_steps?",
    "chkpt_frequencies": "chkpt_frequency?",
    "batch_limit": "batch_limits?",
}


@pytest.mark.shows("U32")
@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_argument_names_the_one_that_is_meant(name: str) -> None:
    beginning = re.escape(f"Trainer() has no argument {name!r}. Did you mean {MEANT[name]}")
    with pytest.raises(ArgumentTypeError, match=f"^{beginning}"):
        helios.Trainer(**{name: 3})


@pytest.mark.shows("U32")
def test_all_unknown_names_are_in_one_error() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        helios.Trainer(max_epochs=3, total_steps=1, callbacks=[], xyzzy=1)  # type: ignore[call-arg]
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for line, texts in zip(
        lines,
        (("'max_epochs'", "total_steps"), ("'callbacks'", "plugins"), ("'xyzzy'", "help(")),
        strict=True,
    ):
        assert all(text in line for text in texts)


@pytest.mark.shows("U32")
def test_a_name_like_no_other_refers_to_the_help() -> None:
    with pytest.raises(TypeError, match=r"'xyzzy'\. help\(helios.Trainer\) lists the arguments\."):
        helios.Trainer(total_steps=1, xyzzy=3)  # type: ignore[call-arg]


@pytest.mark.shows("U32")
def test_what_is_named_instead_of_an_unknown_argument_exists() -> None:
    own = inspect.signature(helios.Trainer).parameters
    assert not MEANT_INSTEAD.keys() & own.keys()
    elsewhere = "trainer.fit|DataLoaderParams|setup\\(\\)"
    for meant in MEANT_INSTEAD.values():
        assert re.match(elsewhere, meant) or re.match(r"\w+", meant)[0] in own, meant
