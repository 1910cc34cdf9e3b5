"""The options of a trainer: their checks, what they need, and what follows from them.

``Options`` is the list of the arguments of ``Trainer``, whose signature and docstring mirror it; a
test compares them. Values are checked one by one, then with each other; options without an effect
cause a warning. For names that ``Trainer`` does not have, often those of other trainers, the error
suggests the right one.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from helios.best import BestRule, Mode
from helios.checkpoint.retention import CheckpointStore, KeepBest
from helios.core.plain_values import flatten_params
from helios.core.rng import get_default_seed
from helios.counters import Phase, TrainingUnit
from helios.engines.device import select_gpus
from helios.engines.engine import Engine
from helios.engines.numerics import require_deterministic_cublas
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.plugin import Plugin
from helios.schedule import Schedule
from helios.start.signals import Signals
from helios.storage.files import as_local_path

_LOGGER = logging.getLogger(__name__)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_AUTO_SECONDS, _AUTO_LOGS, _AUTO_KEPT = 600, 50, 3
_STEPS_OF_STREAMS = 1000
"""Steps between two validations if nobody knows how many an epoch has."""

NO_LENGTH = 0.0
"""The default of ``total_steps``, for which ``fit`` asks; a 0 that was passed is another object."""

PARAMS = "params."
"""What stands before the name of a parameter in ``allow_changes``."""


def allows(allowed: str, param: str) -> bool:
    """Return whether a name in ``allow_changes`` covers a parameter or its group."""
    return f"{param}.".startswith(f"{allowed}.")


def _refusal(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"Trainer({name}=...) must be {rule}, got {value!r}. {remedy}")


def read_seconds(value: object) -> int:
    """Return the seconds of a time such as ``"10min"``, ``"90s"`` or ``"2h"``; 0 for no time."""
    found = _TIMES.fullmatch(value) if isinstance(value, str) else None
    return 0 if found is None else int(found[1]) * _SECONDS[found[2]]


class Scope(Enum):
    """Where an option must have the same value."""

    NONE = "nowhere: processes and starts may differ"
    START = "in all processes of a start"
    RUN = "in all processes and at all starts; another value is refused, unless it is allowed"
    END = "in all processes of a start; another value at the next one moves the end of the run"


NONE, START, RUN, END = Scope
_SERIES: Any = list | tuple | set | frozenset | range

Check: TypeAlias = Callable[[str, Any], Any]
"""Takes the name and the value of an option; returns the value as a run has it, or raises."""


@dataclass(frozen=True)
class Row:
    """The rules of an option, besides its type and its default.

    Attributes:
        check: checks a value on its own.
        scope: where the value must be the same.
        excludes: options that must not be set at the same time.
        needs: the folder that this option needs.
        idle_without: the option without which it has no effect.
    """

    check: Check
    scope: Scope
    excludes: tuple[str, ...] = ()
    needs: str = ""
    idle_without: str = ""


def option(default: Any, check: Check, scope: Scope, **others: Any) -> Any:
    """Return a field of :class:`Options` with its :class:`Row`."""
    return field(default=default, metadata={"row": Row(check, scope, **others)})


def _must_be(
    rule: str,
    kind: Any,
    *,
    above: int | None = None,
    words: Collection[str] = (),
    suits: Callable[[Any], object] = lambda value: True,
    convert: Callable[[Any], Any] = lambda value: value,
    remedy: str = "Omit it for the default.",
) -> Check:
    """Return a check of a value on its own.

    Args:
        rule: what it must be.
        kind: its type, or several with ``|``.
        above: what finite numbers must be greater than; a bool is none.
        words: what it may be as a string.
        suits: whether a value of these types is a good one.
        convert: returns a good one as a run has it.
        remedy: what else to do.
    """

    def check(name: str, value: Any) -> Any:
        is_good = isinstance(value, kind)
        if words and isinstance(value, str):
            is_good = value in words
        elif is_good and above is not None and isinstance(value, int | float):
            is_good = not isinstance(value, bool) and above < value < math.inf
        if not is_good or not suits(value):
            raise _refusal(name, rule, value, remedy)
        return convert(value)

    return check


def _one_of(*words: str) -> Check:
    return _must_be(" or ".join(f'"{word}"' for word in words), str, words=words)


def _are_counts(values: Iterable[object]) -> bool:
    return all(type(value) is int and value > 0 for value in values)


_PHASES: Mapping[object, Phase] = {name: phase for phase in Phase for name in (phase, phase.value)}


_UNITS: Mapping[object, TrainingUnit] = {
    **{unit: unit for unit in TrainingUnit},
    "epoch": TrainingUnit.EPOCH,
    **dict.fromkeys(("iteration", "step"), TrainingUnit.ITERATION),
}
_PRECISIONS = {known.value: known for known in Precision.all()}
_FLAG = _must_be("True or False", bool)
_CHOICE = _must_be("True, False or None", bool | None)
_TEXT = _must_be("a string", str)
_FILE_NAME = _must_be(
    "a string without path separators (it names files)",
    str,
    suits=lambda value: not any(mark in value for mark in "/\\\0"),
    remedy="Pass folders as chkpt_root and so on.",
)
_UNIT = _must_be(
    '"epoch", "iteration", "step" or a TrainingUnit',
    TrainingUnit,
    words=("epoch", "iteration", "step"),
    convert=_UNITS.get,
)
_TOTAL = _must_be(
    "a non-negative int or inf",
    int | float,
    suits=lambda value: (
        value is NO_LENGTH or value == math.inf or (type(value) is int and value >= 0)
    ),
    remedy="Pass e.g. 10, or float('inf').",
)
_COUNT = _must_be("None or a positive int", int | None, above=0)
AUTO = "auto"
"""Leaves a frequency to its default: never beside ``total_steps``, else as docs/start.md says."""
_TIMES = re.compile(r"(\d+) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_FREQUENCY = _must_be(
    'a positive int, None for never, or "auto"', int | None, above=0, words=(AUTO,)
)
_SAVES = _must_be(
    'a positive int, a time in s, min or h such as "10min", None for never, or "auto"',
    int | str | None,
    above=0,
    suits=lambda value: not isinstance(value, str) or value == AUTO or read_seconds(value),
)
_PATIENCE = _must_be("None or a non-negative int", int | None, above=-1)
_NATURAL = _must_be("a non-negative int", int, above=-1)
_WINDOW = _must_be("a positive int", int, above=0)
_POSITIVE = _must_be("None or a positive number", int | float | None, above=0)
_SEED = _must_be(
    "None or an int of 64 bits",
    int | None,
    above=-1,
    suits=lambda value: value is None or value < 1 << 64,
)
_NUMBERS = _must_be(
    "a tuple of positive ints, such as (812, 813)",
    _SERIES,
    suits=_are_counts,
    convert=lambda value: tuple(sorted(set(value))),
)
_STORE = _must_be("None or a CheckpointStore", CheckpointStore | None)
_SIGNALS = _must_be(
    "None or Signals, such as Signals(grace=60.0), or Signals(()) for none",
    Signals | None,
    convert=lambda value: value or Signals(),
)
_ENGINE = _must_be("an Engine, such as Engine.auto(), or None", Engine | None)
_PRECISION = _must_be(
    f"None, a Precision or one of {', '.join(_PRECISIONS)}",
    Precision | None,
    words=_PRECISIONS,
    convert=lambda value: _PRECISIONS[value] if isinstance(value, str) else value,
)
_PLUGINS = _must_be(
    "a list of Plugin objects",
    list | tuple,
    suits=lambda value: all(isinstance(each, Plugin) for each in value),
    convert=tuple,
    remedy="Pass [plugin], with objects of classes that derive from helios.plugins.Plugin.",
)
_LIMITS = _must_be(
    "None, or phases with a positive int each, such as {Phase.TRAINING: 10}",
    Mapping | None,
    suits=lambda value: (
        not value or (all(phase in _PHASES for phase in value) and _are_counts(value.values()))
    ),
    convert=lambda value: {_PHASES[phase]: count for phase, count in (value or {}).items()},
)
_RESUME = _must_be(
    '"auto", "never" or a path',
    str | Path,
    convert=lambda value: (
        value if value in ("auto", "never") else as_local_path("Trainer(resume=...)", value)
    ),
)


def _folder(name: str, value: object) -> Path | None:
    """Return a folder's path, which need not exist, but must not be that of a file."""
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ArgumentTypeError(
            f"Trainer({name}=...) must be a path or None, got {value!r}. Pass a pathlib.Path."
        )
    path = as_local_path(f"Trainer({name}=...)", value)
    present = next((place for place in (path, *path.parents) if place.exists()), path)
    if present.exists() and not present.is_dir():
        raise _refusal(name, "a folder", str(path), f"The file {present} is in its place.")
    return path


def _existing_folder(name: str, value: object) -> Path | None:
    path = _folder(name, value)
    if path is not None and not path.is_dir():
        raise _refusal(name, "an existing folder", str(path), "Fix the path.")
    return path


def _changes(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, _SERIES) or not all(isinstance(each, str) for each in names):
        raise _refusal(name, "a tuple of names", value, "Omit it for none.")
    known = find_changeable()
    unknown = [each for each in names if each not in known and not each.startswith(PARAMS)]
    if unknown:
        rule = f"names among {', '.join(known)}, or names such as params.lr"
        raise _refusal(name, rule, unknown, "Pass some of these names.")
    return tuple(names)


@dataclass(frozen=True)
class Options:
    """The arguments of a trainer, as a run has them; ``Trainer`` documents them."""

    run_name: str = option("", _FILE_NAME, NONE)
    train_unit: TrainingUnit = option(TrainingUnit.EPOCH, _UNIT, RUN)
    total_steps: float = option(NO_LENGTH, _TOTAL, END)
    valid_frequency: int | str | None = option(AUTO, _FREQUENCY, START)
    chkpt_frequency: int | str | None = option(AUTO, _SAVES, START, needs="chkpt_root")
    print_frequency: int | str | None = option(AUTO, _FREQUENCY, START)
    accumulation_steps: int = option(1, _WINDOW, RUN)
    enable_cudnn_benchmark: bool = option(
        False, _FLAG, NONE, excludes=("enable_deterministic",), idle_without="gpu_ids"
    )
    enable_deterministic: bool = option(False, _FLAG, START)
    early_stop_cycles: int | None = option(None, _PATIENCE, END, idle_without="valid_frequency")
    use_cpu: bool | None = option(None, _CHOICE, NONE, excludes=("engine",))
    # GPUs are counted, and checked, where they are chosen.
    gpus: list[int] | None = option(None, lambda name, value: value, NONE, excludes=("engine",))
    random_seed: int | None = option(None, _SEED, RUN)
    enable_tensorboard: bool = option(False, _FLAG, NONE, needs="run_path")
    enable_file_logging: bool = option(False, _FLAG, NONE, needs="log_path")
    capture_warnings: bool = option(False, _FLAG, NONE)
    enable_progress_bar: bool = option(False, _FLAG, NONE)
    chkpt_root: Path | None = option(None, _folder, NONE)
    log_path: Path | None = option(None, _folder, NONE, idle_without="enable_file_logging")
    run_path: Path | None = option(None, _folder, NONE, idle_without="enable_tensorboard")
    src_root: Path | None = option(None, _existing_folder, NONE)
    import_prefix: str = option("", _TEXT, NONE, idle_without="src_root")
    print_banner: bool = option(True, _FLAG, NONE)
    _: KW_ONLY
    max_epochs: int | None = option(None, _COUNT, START, excludes=("total_steps", "train_unit"))
    max_steps: int | None = option(None, _COUNT, END, excludes=("total_steps", "train_unit"))
    engine: Engine | None = option(None, _ENGINE, START)
    precision: Precision | None = option(None, _PRECISION, RUN, excludes=("engine",))
    plugins: tuple[Plugin, ...] = option((), _PLUGINS, NONE)
    store: CheckpointStore | None = option(None, _STORE, NONE, idle_without="uses_store")
    signals: Signals = option(None, _SIGNALS, NONE)
    num_replicas: int | None = option(None, _COUNT, NONE)
    nproc: int | None = option(None, _COUNT, NONE)
    sharding: str = option("none", _one_of("none", "full"), NONE)
    init: str = option("setup", _one_of("setup", "keyed"), RUN)
    clip_norm: float | None = option(None, _POSITIVE, START, excludes=("engine",))
    clip_value: float | None = option(None, _POSITIVE, START, excludes=("engine", "clip_norm"))
    resume: str | Path = option("auto", _RESUME, START, idle_without="chkpt_root")
    allow_changes: tuple[str, ...] = option((), _changes, NONE, idle_without="chkpt_root")
    on_incomplete: str = option("warn", _one_of("warn", "raise"), START, idle_without="can_save")
    ledger: str = option("steps", _one_of("steps", "off"), NONE)
    skip_batches: tuple[int, ...] = option((), _NUMBERS, RUN)
    sanity_steps: int = option(0, _NATURAL, START)
    batch_limits: dict[Phase, int] = option(None, _LIMITS, START)
    params: dict[str, Any] = option(None, lambda name, value: flatten_params(value), NONE)
    max_restarts: int = option(0, _NATURAL, NONE, idle_without="starts_processes")
    hang_timeout: float | None = option(None, _POSITIVE, START)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options of a trainer, and warn of those that have no effect.

        Args:
            given: its arguments, by name; others are left alone.

        Raises:
            ArgumentError: if a value is invalid.
            UsageError: if ``use_cpu=False`` finds no GPU.
        """
        values = {name: row.check(name, given[name]) for name, row in ROWS.items()}
        it = cls(**values)
        it._check_relations()
        it = cls(**{**values, **it._find_length()})
        it._check_combinations()
        if it.gpu_ids and it.enable_deterministic:
            require_deterministic_cublas()
        for name, row in ROWS.items():
            if row.idle_without and it._differs(name) and not getattr(it, row.idle_without):
                lacking = _IN_WORDS.get(row.idle_without, row.idle_without)
                _LOGGER.warning("Trainer(%s=...) has no effect without %s.", name, lacking)
        return it

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(Options, name))

    def _check_relations(self) -> None:
        for name, row in ROWS.items():
            for other in row.excludes:
                if self._differs(name) and self._differs(other):
                    rule = f"{getattr(Options, name)} with {other} set"
                    raise _refusal(name, rule, getattr(self, name), "Omit one of them.")
            is_set = self._differs(name) and getattr(self, name) is not None
            if row.needs and is_set and getattr(self, row.needs) is None:
                rule, remedy = f"a folder, which {name} needs", f"Pass {row.needs}=Path(...)."
                raise _refusal(row.needs, rule, None, remedy)

    def _find_length(self) -> dict[str, Any]:
        """Return unit and length, as they follow from the new names, or the old frequencies."""
        if self.has_new_length:
            unit = TrainingUnit.EPOCH if self.max_epochs is not None else TrainingUnit.ITERATION
            total = self.max_steps if self.max_epochs is None else self.max_epochs
            return {"train_unit": unit, "total_steps": total}
        names = ("valid_frequency", "chkpt_frequency", "print_frequency")
        return {name: None for name in names if getattr(self, name) == AUTO}

    @property
    def has_new_length(self) -> bool:
        """Whether the length is set by ``max_epochs`` or ``max_steps``."""
        return self.max_epochs is not None or self.max_steps is not None

    @property
    def limit(self) -> str:
        """The argument that sets the length of the run."""
        if self.max_epochs is not None:
            return "max_epochs"
        return "total_steps" if self.max_steps is None else "max_steps"

    def require_length(self) -> None:
        """Refuse a run whose length is not set.

        Raises:
            ArgumentError: if no length is set.
        """
        if self.total_steps is NO_LENGTH:
            raise ArgumentError(
                "Trainer(...) must say how long a run is, got neither max_epochs nor max_steps. "
                "Pass e.g. max_epochs=10."
            )

    def _check_combinations(self) -> None:
        if self.total_steps == math.inf and self.early_stop_cycles == 0:
            rule = "at least 1 with total_steps=inf"
            raise _refusal("early_stop_cycles", rule, 0, "Pass None for no patience.")
        if self.resume_path is not None and self.chkpt_root is None:
            rule, remedy = "a folder with resume=<path>", "Pass the folder for new checkpoints."
            raise _refusal("chkpt_root", rule, None, remedy)
        if self.num_replicas is not None and (self.nproc or 1) > self.num_replicas:
            rule = f"at most num_replicas, {self.num_replicas}, since each process runs a replica"
            raise _refusal("nproc", rule, self.nproc, "Raise num_replicas, or lower nproc.")
        precision = self.precision if self.engine is None else self.engine.precision
        if self.sharding == "full" and precision is Precision.FP16:
            raise _refusal("precision", 'not fp16 with sharding="full"', "fp16", 'Pass "bf16".')
        if self.sharding == "full" and self.store is not None and self.store.frozen != "save":
            rule = 'one with frozen="save" with sharding="full"'
            raise _refusal("store", rule, self.store, "Omit frozen.")
        for name in self.allow_changes:
            asked = name.removeprefix(PARAMS)
            if asked != name and not any(allows(asked, each) for each in self.params):
                known = ", ".join(f'"{PARAMS}{each}"' for each in self.params) or "none"
                rule = f"declared parameters ({known})"
                raise _refusal("allow_changes", rule, name, "Pass one of these.")

    def plain(self, name: str) -> Any:
        """Return an option as processes compare it, and as checkpoints hold it."""
        value = self.seed if name == "random_seed" else getattr(self, name)
        if name == "max_steps" and self.max_epochs is None:
            # It is total_steps then.
            return None
        if isinstance(value, TrainingUnit):
            return value.name.lower()
        if isinstance(value, Precision):
            return value.value
        if isinstance(value, Engine):
            return type(value).__qualname__
        return str(value) if isinstance(value, Path) else value

    @functools.cached_property
    def gpu_ids(self) -> list[int]:
        """Ids of the GPUs to use; empty on the CPU."""
        if self.engine is None:
            return select_gpus(self.use_cpu, self.gpus)
        device = self.engine.device
        return [device.index or 0] if device.type == "cuda" else []

    @property
    def starts_processes(self) -> bool:
        """Whether the trainer may start the ranks itself."""
        return self.nproc is not None or len(self.gpu_ids) > 1

    @property
    def limits(self) -> Schedule:
        """What ends the run; :meth:`plan` knows the frequencies, too."""
        return self.plan(None, has_validation=False)

    def plan(self, num_batches: int | None, *, has_validation: bool) -> Schedule:
        """Return the options that decide when something happens.

        Args:
            num_batches: the batches of an epoch; ``None`` if unknown.
            has_validation: whether there is validation data.
        """
        is_by_epoch = self.train_unit is TrainingUnit.EPOCH
        every = 1 if is_by_epoch else None
        if not is_by_epoch and num_batches is not None:
            every = max(1, num_batches // self.accumulation_steps)
        valid, chkpt, shown = self.valid_frequency, self.chkpt_frequency, self.print_frequency
        if valid == AUTO:
            valid = (every or _STEPS_OF_STREAMS) if has_validation else None
        return Schedule(
            unit=self.train_unit,
            total_steps=self.total_steps,
            limit=self.limit,
            max_steps=None if self.max_epochs is None else self.max_steps,
            valid_frequency=valid if isinstance(valid, int) else None,
            validates_last=self.valid_frequency == AUTO and has_validation and not is_by_epoch,
            chkpt_frequency=every if chkpt == AUTO else chkpt if isinstance(chkpt, int) else None,
            save_seconds=_AUTO_SECONDS if chkpt == AUTO else read_seconds(chkpt) or None,
            saves_validated=chkpt == AUTO,
            print_frequency=shown if isinstance(shown, int) else _AUTO_LOGS if shown else None,
            shows_by_time=shown == AUTO,
            accumulation_steps=self.accumulation_steps,
            early_stop_cycles=self.early_stop_cycles,
        )

    def store_for(self, plugins: Iterable[Plugin]) -> CheckpointStore:
        """Return how checkpoints are kept: beside ``max_epochs`` or ``max_steps``, not all of them.

        Args:
            plugins: those of the run, of which one ``EarlyStopping`` says which score is best.
        """
        if self.store is not None:
            return self.store
        if not self.has_new_length:
            return CheckpointStore()
        watched = _find_watched(plugins)
        best = None if watched is None else KeepBest(1, *watched)
        return CheckpointStore(keep_last=_AUTO_KEPT, keep_best=best)

    def find_rule(self, plugins: Iterable[Plugin]) -> BestRule | None:
        """Return what decides by a score: ``KeepBest``, or else ``EarlyStopping``."""
        if self.store is not None and self.store.keep_best is not None:
            return self.store.keep_best.rule
        watched = _find_watched(plugins)
        return None if watched is None else BestRule(*watched)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return get_default_seed() if self.random_seed is None else self.random_seed

    @property
    def can_save(self) -> bool:
        """Whether checkpoints are written: both a folder and a frequency are set."""
        return self.chkpt_root is not None and self.chkpt_frequency is not None

    @property
    def resume_path(self) -> Path | None:
        """The file to continue from; ``None`` for the run's newest checkpoint."""
        return self.resume if isinstance(self.resume, Path) else None

    @property
    def uses_store(self) -> bool:
        """Whether ``store`` has an effect: on saves, or on which checkpoint is the best one."""
        is_rule = self.store is not None and self.store.keep_best is not None
        return self.can_save or (self.chkpt_root is not None and is_rule)


def _find_watched(plugins: Iterable[Plugin]) -> tuple[str, Mode] | None:
    """Return the score that ``EarlyStopping`` watches, and its mode; ``None`` if not just one."""
    found = {each.monitored for each in plugins if isinstance(each, EarlyStopping)}
    return found.pop() if len(found) == 1 else None


ROWS: Mapping[str, Row] = {each.name: each.metadata["row"] for each in fields(Options)}
"""The row of each option, by name."""

_IN_WORDS = {
    **dict.fromkeys(("can_save", "uses_store"), "chkpt_root and chkpt_frequency"),
    "gpu_ids": "a GPU",
    "starts_processes": "nproc",
}

OF_DATA = (
    *("dataset", "length", "batch_size", "shuffle", "drop_last", "seed", "sampler"),
    *("limit_batches", "is_distributed"),
)
"""What the data adds to the options that define a run."""


def find_changeable() -> list[str]:
    """Return what ``allow_changes`` may name, besides single parameters."""
    others = ("mixture", "accumulation_order", "norm", "params", "optimizer")
    return [*OF_DATA, *others, *(name for name, row in ROWS.items() if row.scope is RUN)]


_OF_OTHER_TRAINERS = """
epochs num_epochs n_epochs num_train_epochs: max_epochs
num_steps num_iterations max_iters steps: max_steps
max_time: plugins=[TimeLimit(...)]
accelerator device devices num_gpus use_gpu: use_cpu, gpus or, for several processes, nproc
strategy num_nodes world_size num_processes ddp: nproc, num_replicas, sharding; or torchrun
fsdp: sharding="full"
callbacks callback hooks: plugins
logger loggers report_to: plugins=[CSVLogger(...), WandbLogger(...)], or enable_tensorboard
logging_dir: run_path for TensorBoard, log_path for log files
default_root_dir output_dir save_dir checkpoint_dir: chkpt_root
accumulate_grad_batches gradient_accumulation_steps: accumulation_steps
gradient_clip_val max_grad_norm grad_clip: clip_norm
gradient_clip_algorithm: clip_norm or clip_value
check_val_every_n_epoch val_check_interval eval_steps eval_frequency val_frequency: valid_frequency
save_steps save_frequency save_every: chkpt_frequency
enable_checkpointing: chkpt_root
save_total_limit: store=CheckpointStore(keep_last=...)
save_top_k monitor load_best_model_at_end keep_best: store=CheckpointStore(keep_best=KeepBest(...))
log_every_n_steps logging_steps log_frequency: print_frequency
limit_train_batches limit_val_batches overfit_batches: batch_limits={Phase.TRAINING: 10, ...}
limit_test_batches limit_predict_batches: batch_limits={Phase.TRAINING: 10, ...}
fast_dev_run: batch_limits={Phase.TRAINING: 10, ...} and max_epochs=1
num_sanity_val_steps: sanity_steps
deterministic: enable_deterministic
benchmark: enable_cudnn_benchmark
seed: random_seed
patience early_stopping: early_stop_cycles, or plugins=[EarlyStopping(...)]
profiler: plugins=[Profiler(...)]
detect_anomaly: plugins=[NaNGuard()]
fp16 bf16 amp mixed_precision: precision="bf16" or "fp16"
resume_from_checkpoint ckpt_path checkpoint: resume=<path>; without it, a run continues by itself
enable_model_summary: print_banner
name: run_name
config hparams args: params
compile torch_compile: setup() of the model, with torch.compile
compute_metrics: plugins=[Metrics(...)], or self.log(name, value) in valid_step
model datamodule train_dataset train_dataloaders: trainer.fit(model, datamodule)
batch_size num_workers data_collator: DataLoaderParams(...) in setup() of the data module
weight_decay warmup_steps: setup() of the model, where its optimizers are made
optimizer optimizers lr learning_rate: setup() of the model, where its optimizers are made
"""

MEANT = {
    **{each.name: f"store=CheckpointStore({each.name}=...)" for each in fields(CheckpointStore)},
    **{
        name: meant
        for names, meant in (line.split(": ", 1) for line in _OF_OTHER_TRAINERS.split("\n")[1:-1])
        for name in names.split()
    },
}
"""What is meant by names that ``Trainer`` does not have."""


def with_known_arguments(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a constructor of the trainer that says which argument an unknown one may mean."""

    @functools.wraps(call)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        check_names(options)
        return call(*args, **options)

    return run


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are no arguments of the trainer.

    Raises:
        ArgumentTypeError: for these.
    """
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise ArgumentTypeError("\n".join(map(_refuse_unknown, unknown)))


def _refuse_unknown(name: str) -> str:
    names = MEANT | {known: known for known in ROWS}
    (meant, *_) = [names[each] for each in difflib.get_close_matches(name, names, n=1)] or [""]
    hint = f"Did you mean {meant}?" if meant else "help(helios.Trainer) lists the arguments."
    return f"Trainer() has no argument {name!r}. {hint}"
