"""The arguments of a trainer, checked: every bad value is an error before anything starts.

A message names the argument, the rule, the value and a remedy. An option without effect is warned
about, never ignored in silence.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helios.checkpoint.store import CheckpointStore
from helios.core.rng import get_default_seed
from helios.engines.device import select_gpus
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.engines.reference_names import explain
from helios.errors import ArgumentError, ArgumentTypeError
from helios.launch.launcher import require_deterministic_cublas
from helios.plugins.plugin import Plugin
from helios.schedule import Schedule
from helios.startup.changes import CHANGEABLE
from helios.startup.signals import Signals
from helios.state import TrainingUnit

_LOGGER = logging.getLogger(__name__)


def _fail(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"Trainer({name}=...) must be {rule}, got {value!r}. {remedy}")


def _check_count(name: str, value: object, *, least: int = 1) -> None:
    if value is not None and (type(value) is not int or value < least):
        rule = "None or a positive int" if least else "None or a non-negative int"
        raise _fail(name, rule, value, "Pass None to switch it off.")


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < float(value) < math.inf):  # type: ignore[arg-type]
        raise _fail(name, "None or a positive number", value, "Pass None to switch it off.")


def _as_folder(name: str, value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ArgumentTypeError(
            f"Trainer({name}=...) must be a path or None, got {value!r}. Pass a pathlib.Path."
        )
    path = Path(value)
    present = next((place for place in (path, *path.parents) if place.exists()), path)
    if present.exists() and not present.is_dir():
        raise _fail(name, "a folder", str(path), f"The file {present} is in the way.")
    return path


def _as_unit(value: object) -> TrainingUnit:
    if isinstance(value, TrainingUnit):
        return value
    if value in ("epoch", "iteration"):
        return TrainingUnit.from_str(str(value))
    rule = '"epoch", "iteration" or a TrainingUnit'
    raise _fail("train_unit", rule, value, "Correct the unit.")


def _check_total(value: object) -> None:
    is_count = type(value) is int and value >= 0
    if not is_count and value != math.inf:
        raise _fail(
            "total_steps", "a non-negative int or inf", value, "Pass e.g. 10, or float('inf')."
        )


@dataclasses.dataclass
class Arguments:
    """What a trainer was asked for; see ``Trainer`` for the meaning of each field."""

    run_name: str
    train_unit: Any
    total_steps: float
    valid_frequency: int | None
    chkpt_frequency: int | None
    print_frequency: int | None
    accumulation_steps: int
    enable_cudnn_benchmark: bool
    enable_deterministic: bool
    early_stop_cycles: int | None
    use_cpu: bool | None
    gpus: list[int] | None
    random_seed: int | None
    enable_tensorboard: bool
    enable_file_logging: bool
    capture_warnings: bool
    enable_progress_bar: bool
    chkpt_root: Any
    log_path: Any
    run_path: Any
    src_root: Any
    import_prefix: str
    print_banner: bool
    engine: Engine | None
    precision: Any
    plugins: Sequence[Plugin]
    store: CheckpointStore | None
    signals: Any
    num_replicas: int | None
    nproc: int | None
    clip_norm: float | None
    clip_value: float | None
    resume: Any
    allow_changes: Sequence[str]
    on_incomplete: str

    def __post_init__(self) -> None:
        self._check_names()
        self._check_counts()
        self._check_flags()
        self._check_paths()
        self._check_resume()
        self._check_precision()
        self._check_objects()
        self.gpu_ids = self._select_device()
        self._check_processes()
        self._warn()

    def _check_names(self) -> None:
        if not isinstance(self.run_name, str) or any(mark in self.run_name for mark in "/\\\0"):
            rule = "a string without path separators (it names files)"
            raise _fail("run_name", rule, self.run_name, "Pass folders as chkpt_root and so on.")
        if not isinstance(self.import_prefix, str):
            raise _fail("import_prefix", "a string", self.import_prefix, 'Pass e.g. "src".')

    def _check_counts(self) -> None:
        self.unit = _as_unit(self.train_unit)
        _check_total(self.total_steps)
        for name in ("valid_frequency", "chkpt_frequency", "print_frequency"):
            _check_count(name, getattr(self, name))
        if type(self.accumulation_steps) is not int or self.accumulation_steps < 1:
            raise _fail(
                "accumulation_steps", "a positive int", self.accumulation_steps, "Pass 1 for none."
            )
        _check_count("early_stop_cycles", self.early_stop_cycles, least=0)
        if self.total_steps == math.inf and self.early_stop_cycles == 0:
            rule = "at least 1 with total_steps=inf"
            raise _fail("early_stop_cycles", rule, 0, "Pass a patience, or None for no end.")
        seed = self.random_seed
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise _fail("random_seed", "None or an int of 64 bits", seed, "Pass e.g. 42.")
        self.seed = get_default_seed() if seed is None else seed
        _check_positive("clip_norm", self.clip_norm)
        _check_positive("clip_value", self.clip_value)
        if self.clip_norm is not None and self.clip_value is not None:
            rule = "None where clip_norm is set"
            raise _fail("clip_value", rule, self.clip_value, "Clip by one of both.")

    def _check_flags(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise _fail(field.name, "True or False", value, "Pass a bool.")
        if self.use_cpu is not None and not isinstance(self.use_cpu, bool):
            raise _fail("use_cpu", "True, False or None", self.use_cpu, "Pass a bool or None.")
        if self.enable_deterministic and self.enable_cudnn_benchmark:
            rule = "False with enable_deterministic=True"
            raise _fail("enable_cudnn_benchmark", rule, True, "Benchmarking chooses at random.")

    def _check_paths(self) -> None:
        for name in ("chkpt_root", "log_path", "run_path"):
            setattr(self, name, _as_folder(name, getattr(self, name)))
        pairs = (("enable_tensorboard", "run_path"), ("enable_file_logging", "log_path"))
        for flag, path in pairs:
            if getattr(self, flag) and getattr(self, path) is None:
                raise _fail(path, f"a folder with {flag}=True", None, f"Pass {path}=Path(...).")
        if self.chkpt_frequency is not None and self.chkpt_root is None:
            rule = "a folder with chkpt_frequency set"
            raise _fail("chkpt_root", rule, None, "Pass chkpt_root=Path(...).")
        self.src_root = _as_folder("src_root", self.src_root)
        if self.src_root is not None and not self.src_root.is_dir():
            raise _fail("src_root", "an existing folder", str(self.src_root), "Correct the path.")

    def _check_resume(self) -> None:
        if self.resume not in ("auto", "never"):
            if not isinstance(self.resume, str | Path):
                rule = '"auto", "never" or a path'
                raise _fail("resume", rule, self.resume, "Leave it out to resume.")
            self.resume = Path(self.resume)
            if self.chkpt_root is None:
                rule = "a folder with resume=<path>"
                raise _fail("chkpt_root", rule, None, "Pass where new checkpoints go.")
        if self.on_incomplete not in ("warn", "raise"):
            rule = '"warn" or "raise"'
            raise _fail("on_incomplete", rule, self.on_incomplete, "Leave it out for a warning.")
        names = (self.allow_changes,) if isinstance(self.allow_changes, str) else self.allow_changes
        if not isinstance(names, list | tuple | set | frozenset):
            rule = "a tuple of names"
            raise _fail("allow_changes", rule, self.allow_changes, "Leave it out for none.")
        unknown = [name for name in names if name not in CHANGEABLE]
        if unknown:
            rule = f"names among {', '.join(CHANGEABLE)}"
            raise _fail("allow_changes", rule, unknown, "Correct the names.")
        self.allow_changes = tuple(names)

    def _check_precision(self) -> None:
        if isinstance(self.precision, str):
            try:
                self.precision = Precision.from_str(self.precision)
            except ArgumentError as error:
                rule = "None or the name of a precision"
                raise _fail("precision", rule, self.precision, str(error)) from error
        if self.precision is not None and not isinstance(self.precision, Precision):
            rule = "None, a Precision or the name of one"
            raise _fail("precision", rule, self.precision, 'Pass e.g. "bf16".')

    def _check_objects(self) -> None:
        if self.signals is None:
            self.signals = Signals()
        if not isinstance(self.signals, Signals):
            remedy = "Pass e.g. Signals(grace=60.0), or Signals(()) for none."
            raise _fail("signals", "None or Signals", self.signals, remedy)
        if not isinstance(self.plugins, list | tuple):
            raise _fail("plugins", "a list of Plugin objects", self.plugins, "Pass [plugin].")
        for plugin in self.plugins:
            if not isinstance(plugin, Plugin):
                rule = "a list of Plugin objects"
                raise _fail("plugins", rule, plugin, "Derive it from helios.plugins.Plugin.")
        if self.store is not None and not isinstance(self.store, CheckpointStore):
            raise _fail("store", "a CheckpointStore", self.store, "Pass CheckpointStore(...).")

    def _select_device(self) -> list[int]:
        if self.engine is None:
            return select_gpus(self.use_cpu, self.gpus)
        if not isinstance(self.engine, Engine):
            remedy = "Derive it from helios' Engine."
            if isinstance(self.engine, str):
                remedy = explain(self.engine)
            raise _fail("engine", "an Engine", self.engine, remedy)
        for name in ("use_cpu", "gpus", "clip_norm", "clip_value", "precision"):
            if getattr(self, name) is not None:
                rule = "None where engine is given"
                raise _fail(name, rule, getattr(self, name), "Configure the engine instead.")
        device = self.engine.device
        return [device.index or 0] if device.type == "cuda" else []

    def _check_processes(self) -> None:
        for name in ("num_replicas", "nproc"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                remedy = "Leave it out to have one for each GPU, or one on the CPU."
                raise _fail(name, "None or a positive int", value, remedy)
        count = self.nproc or 1
        if self.num_replicas is not None and count > self.num_replicas:
            rule = (
                f"at most num_replicas={self.num_replicas}: a process carries one replica or more"
            )
            raise _fail("nproc", rule, count, "Raise num_replicas, or start fewer processes.")
        if self.gpu_ids and self.enable_deterministic:
            require_deterministic_cublas()

    def _warn(self) -> None:
        useless = {
            "early_stop_cycles": self.early_stop_cycles is not None and not self.valid_frequency,
            "run_path": self.run_path is not None and not self.enable_tensorboard,
            "log_path": self.log_path is not None and not self.enable_file_logging,
            "enable_cudnn_benchmark": self.enable_cudnn_benchmark and not self.gpu_ids,
            "store": self.store is not None and not self.can_save,
            "import_prefix": self.import_prefix != "" and self.src_root is None,
            "resume": self.resume == "never" and self.chkpt_root is None,
            "on_incomplete": self.on_incomplete == "raise" and not self.can_save,
            "allow_changes": bool(self.allow_changes) and self.chkpt_root is None,
        }
        for name, is_useless in useless.items():
            if is_useless:
                _LOGGER.warning("Trainer(%s=...) has no effect with the other arguments.", name)

    @property
    def schedule(self) -> Schedule:
        """The options that decide when something happens."""
        fields = dataclasses.fields(Schedule)
        names = [field.name for field in fields if field.init and field.name != "unit"]
        return Schedule(unit=self.unit, **{name: getattr(self, name) for name in names})

    @property
    def can_save(self) -> bool:
        """Whether checkpoints are written: both a folder and a frequency are set (H19)."""
        return self.chkpt_root is not None and self.chkpt_frequency is not None
