"""The options of a trainer: a row for each says what it must be, and what follows from it.

An option is a parameter of ``Trainer``, which documents it and has its default, and a row here.
Values are checked one by one, then with each other; what has no effect is warned of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from helios.checkpoint.store import CheckpointStore
from helios.core.plain_values import flatten_params
from helios.core.rng import get_default_seed
from helios.counters import Phase, TrainingUnit
from helios.engines.device import select_gpus
from helios.engines.engine import Engine
from helios.engines.numerics import require_deterministic_cublas
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError
from helios.schedule import Schedule
from helios.start.signals import Signals
from helios.storage.local_paths import as_local_path

_LOGGER = logging.getLogger(__name__)

Change: TypeAlias = Literal[
    "dataset",
    "length",
    "batch_size",
    "shuffle",
    "drop_last",
    "seed",
    "sampler",
    "random_seed",
    "train_unit",
    "accumulation_steps",
    "accumulation_order",
    "norm",
    "init",
    "limit_batches",
    "skip_batches",
    "is_distributed",
    "mixture",
    "precision",
    "params",
    "optimizer",
]
CHANGEABLE: tuple[str, ...] = get_args(Change)
"""What ``allow_changes`` may name, besides single parameters."""

PARAMS = "params."
"""What stands before the name of a parameter in ``allow_changes``."""


def allows(allowed: str, param: str) -> bool:
    """Whether a name in ``allow_changes`` allows another value of a parameter, or of its group."""
    return f"{param}.".startswith(f"{allowed}.")


def refusal(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    """Return the error for an argument of the trainer: name, rule, value and remedy."""
    return ArgumentError(f"Trainer({name}=...) must be {rule}, got {value!r}. {remedy}")


Check: TypeAlias = Callable[[str, Any], Any]
"""Takes the name and the value of an option; returns the value as a run has it, or raises."""


def _must_be(rule: str, remedy: str, is_good: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> Any:
        if not is_good(value):
            raise refusal(name, rule, value, remedy)
        return value

    return check


def _one_of(*words: str, remedy: str = "Pass one of them.") -> Check:
    *others, last = (f'"{word}"' for word in words)
    return _must_be(f"{', '.join(others)} or {last}", remedy, lambda value: value in words)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


_FLAG = _must_be("True or False", "Pass a bool.", lambda value: isinstance(value, bool))
_COUNT = _must_be(
    "None or a positive int",
    "Pass None to disable it.",
    lambda value: value is None or _is_count(value),
)
_POSITIVE = _must_be(
    "None or a positive number",
    "Pass None to disable it.",
    lambda value: value is None or (_is_number(value) and 0 < float(value) < math.inf),
)
_PROCESSES = _must_be(
    "None or a positive int",
    "Omit it to have one per GPU, or one on the CPU.",
    lambda value: value is None or _is_count(value),
)


_TEXT = _must_be("a string", 'Pass e.g. "src".', lambda value: isinstance(value, str))
_FILE_NAME = _must_be(
    "a string without path separators (it names files)",
    "Pass folders as chkpt_root and so on.",
    lambda value: isinstance(value, str) and not any(mark in value for mark in "/\\\0"),
)
_SEED = _must_be(
    "None or an int of 64 bits",
    "Pass e.g. 42.",
    lambda value: value is None or _is_seed(value),
)
_TOTAL = _must_be(
    "a non-negative int or inf",
    "Pass e.g. 10, or float('inf').",
    lambda value: _is_count(value, 0) or value == math.inf,
)
_WINDOW = _must_be("a positive int", "Pass 1 for none.", _is_count)
_PATIENCE = _must_be(
    "None or a non-negative int",
    "Pass None to disable it.",
    lambda value: value is None or _is_count(value, 0),
)
_TRIAL = _must_be("a non-negative int", "Pass 0 for no check.", lambda value: _is_count(value, 0))
_CHOICE = _must_be(
    "True, False or None",
    "Pass a bool or None.",
    lambda value: value is None or isinstance(value, bool),
)
_STORE = _must_be(
    "a CheckpointStore",
    "Pass CheckpointStore(...).",
    lambda value: value is None or isinstance(value, CheckpointStore),
)


def _as_given(name: str, value: Any) -> Any:
    """Leave the check to what uses the value: GPUs are counted where they are chosen."""
    return value


def _params(name: str, value: Any) -> dict[str, Any]:
    return flatten_params(value)


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
        raise refusal(name, "a folder", str(path), f"The file {present} is in its place.")
    return path


def _existing_folder(name: str, value: object) -> Path | None:
    path = _folder(name, value)
    if path is not None and not path.is_dir():
        raise refusal(name, "an existing folder", str(path), "Correct the path.")
    return path


def _unit(name: str, value: object) -> TrainingUnit:
    if isinstance(value, TrainingUnit):
        return value
    if value == "step":
        return TrainingUnit.ITERATION
    if value in ("epoch", "iteration"):
        return TrainingUnit.from_str(str(value))
    rule = '"epoch", "iteration", "step" or a TrainingUnit'
    raise refusal(name, rule, value, "Correct the unit.")


def _precision(name: str, value: object) -> Precision | None:
    if isinstance(value, str):
        try:
            return Precision.from_str(value)
        except ArgumentError as error:
            rule = "None or the name of a precision"
            raise refusal(name, rule, value, str(error)) from error
    if value is not None and not isinstance(value, Precision):
        rule = "None, a Precision or the name of one"
        raise refusal(name, rule, value, 'Pass e.g. "bf16".')
    return value


def _engine(name: str, value: object) -> Engine | None:
    if value is not None and not isinstance(value, Engine):
        raise refusal(name, "an Engine", value, "Pass e.g. Engine.auto(precision='bf16').")
    return value


def _signals(name: str, value: object) -> Signals:
    if value is None:
        return Signals()
    if not isinstance(value, Signals):
        remedy = "Pass e.g. Signals(grace=60.0), or Signals(()) for none."
        raise refusal(name, "None or Signals", value, remedy)
    return value


def _resume(name: str, value: object) -> str | Path:
    if value in ("auto", "never"):
        return str(value)
    if not isinstance(value, str | Path):
        raise refusal(name, '"auto", "never" or a path', value, "Omit it to resume.")
    return as_local_path("Trainer(resume=...)", value)


def _batch_numbers(name: str, given: Any) -> tuple[int, ...]:
    is_series = isinstance(given, list | tuple | set | frozenset | range)
    if not is_series or not all(map(_is_count, given)):
        rule = "a tuple of positive ints"
        raise refusal(name, rule, given, "Pass numbers of batches, such as (812, 813).")
    return tuple(sorted(set(given)))


def _changes(name: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset):
        raise refusal(name, "a tuple of names", given, "Omit it for none.")
    unknown = [
        each
        for each in names
        if each not in CHANGEABLE and not (isinstance(each, str) and each.startswith(PARAMS))
    ]
    if unknown:
        rule = f"names among {', '.join(CHANGEABLE)}, or such as params.lr"
        raise refusal(name, rule, unknown, "Correct the names.")
    return tuple(names)


def _limits(name: str, given: Any) -> dict[Phase, int]:
    limits = {} if given is None else given
    is_table = isinstance(limits, Mapping) and all(isinstance(key, Phase) for key in limits)
    if not is_table or not all(map(_is_count, limits.values())):
        rule = "None, or phases with a positive int each"
        raise refusal(name, rule, given, "Pass e.g. {Phase.TRAINING: 10}.")
    return dict(limits)


def _refuse_endless_impatience(it: Options) -> None:
    if it.total_steps == math.inf and it.early_stop_cycles == 0:
        rule = "at least 1 with total_steps=inf"
        raise refusal("early_stop_cycles", rule, 0, "Pass a patience, or None for no limit.")


def _refuse_chance(it: Options) -> None:
    if it.enable_deterministic and it.enable_cudnn_benchmark:
        rule = "False with enable_deterministic=True"
        raise refusal("enable_cudnn_benchmark", rule, True, "Benchmarking chooses at random.")


def _require_log_path(it: Options) -> None:
    if it.enable_file_logging and it.log_path is None:
        rule = "a folder with enable_file_logging=True"
        raise refusal("log_path", rule, None, "Pass log_path=Path(...).")


def _require_run_path(it: Options) -> None:
    if it.enable_tensorboard and it.run_path is None:
        rule = "a folder with enable_tensorboard=True"
        raise refusal("run_path", rule, None, "Pass run_path=Path(...).")


def _require_chkpt_root(it: Options) -> None:
    if it.chkpt_root is not None:
        return
    if it.chkpt_frequency is not None:
        rule = "a folder with chkpt_frequency set"
        raise refusal("chkpt_root", rule, None, "Pass chkpt_root=Path(...).")
    if it.resume_path is not None:
        rule = "a folder with resume=<path>"
        raise refusal("chkpt_root", rule, None, "Pass the folder for new checkpoints.")


def _require_declared(it: Options) -> None:
    """Refuse to allow changes of parameters that are not declared."""
    for name in it.allow_changes:
        asked = name.removeprefix(PARAMS)
        if asked != name and not any(allows(asked, each) for each in it.params):
            known = ", ".join(f'"{PARAMS}{each}"' for each in it.params) or "none"
            rule = f"declared parameters ({known})"
            raise refusal("allow_changes", rule, name, "Correct the name.")


def _refuse_what_an_engine_has(it: Options) -> None:
    """Refuse options that an engine has itself."""
    if it.engine is None:
        return
    for name in ("use_cpu", "gpus", "clip_norm", "clip_value", "precision"):
        if getattr(it, name) is not None:
            rule = "None if engine is given"
            raise refusal(name, rule, getattr(it, name), "Configure the engine instead.")


def _refuse_two_clips(it: Options) -> None:
    if it.clip_norm is not None and it.clip_value is not None:
        rule = "None if clip_norm is set"
        raise refusal("clip_value", rule, it.clip_value, "Set only one of them.")


def _require_replicas(it: Options) -> None:
    count = it.nproc or 1
    if it.num_replicas is not None and count > it.num_replicas:
        rule = f"at most num_replicas={it.num_replicas}: a process runs at least one replica"
        raise refusal("nproc", rule, count, "Raise num_replicas, or start fewer processes.")


def _refuse_unsharded(it: Options) -> None:
    """Refuse options that do not work with sharded models."""
    if it.sharding != "full":
        return
    precision = it.precision or getattr(it.engine, "precision", None)
    if precision is Precision.FP16:
        remedy = 'Pass "bf16".'
        raise refusal("precision", 'not fp16 with sharding="full"', precision.value, remedy)


def _require_a_later_end(it: Options) -> None:
    if it.hang_warning is None or it.hang_timeout is None:
        return
    if it.hang_timeout <= it.hang_warning:
        rule = f"more than hang_warning={it.hang_warning:g}, whose line comes first"
        remedy = "Pass more seconds, or hang_warning=None for no line."
        raise refusal("hang_timeout", rule, it.hang_timeout, remedy)


@dataclass(frozen=True)
class Row:
    """What holds for one option.

    Attributes:
        check: checks a value on its own.
        needs: raises if other options do not allow the value.
        is_alike: whether all processes of a run must have the same value.
        defines_run: whether a resume with another value is refused, unless it is allowed.
        ends_run: whether it says where a run ends; another value is allowed.
        without: what the option has no effect without.
        is_idle: whether it has none.
    """

    check: Check
    needs: Callable[[Options], None] | None = None
    is_alike: bool = False
    defines_run: bool = False
    ends_run: bool = False
    without: str = ""
    is_idle: Callable[[Options], bool] = field(default=lambda options: False)


def _row(check: Check, **columns: Any) -> dict[str, Row]:
    return {"row": Row(check, **columns)}


_SAVES = "chkpt_root and chkpt_frequency"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a trainer, each with its row; see ``Trainer`` for what they mean.

    Attributes:
        gpu_ids: ids of the GPUs to use; empty on the CPU.
    """

    gpu_ids: list[int] = field(default_factory=list)
    run_name: str = field(metadata=_row(_FILE_NAME))
    random_seed: int | None = field(metadata=_row(_SEED, is_alike=True, defines_run=True))
    init: str = field(metadata=_row(_one_of("setup", "keyed"), is_alike=True, defines_run=True))
    params: dict[str, Any] = field(metadata=_row(_params))
    src_root: Path | None = field(metadata=_row(_existing_folder))
    import_prefix: str = field(
        metadata=_row(
            _TEXT,
            without="src_root",
            is_idle=lambda it: it.import_prefix != "" and it.src_root is None,
        )
    )
    train_unit: TrainingUnit = field(metadata=_row(_unit, is_alike=True, defines_run=True))
    total_steps: float = field(metadata=_row(_TOTAL, is_alike=True, ends_run=True))
    valid_frequency: int | None = field(metadata=_row(_COUNT, is_alike=True))
    chkpt_frequency: int | None = field(metadata=_row(_COUNT, is_alike=True))
    print_frequency: int | None = field(metadata=_row(_COUNT, is_alike=True))
    accumulation_steps: int = field(metadata=_row(_WINDOW, is_alike=True, defines_run=True))
    early_stop_cycles: int | None = field(
        metadata=_row(
            _PATIENCE,
            needs=_refuse_endless_impatience,
            is_alike=True,
            ends_run=True,
            without="valid_frequency",
            is_idle=lambda it: it.early_stop_cycles is not None and not it.valid_frequency,
        )
    )
    enable_deterministic: bool = field(metadata=_row(_FLAG, is_alike=True))
    enable_cudnn_benchmark: bool = field(
        metadata=_row(
            _FLAG,
            needs=_refuse_chance,
            without="a GPU",
            is_idle=lambda it: it.enable_cudnn_benchmark and not it.gpu_ids,
        )
    )
    enable_tensorboard: bool = field(metadata=_row(_FLAG))
    enable_file_logging: bool = field(metadata=_row(_FLAG))
    capture_warnings: bool = field(metadata=_row(_FLAG))
    enable_progress_bar: bool = field(metadata=_row(_FLAG))
    print_banner: bool = field(metadata=_row(_FLAG))
    log_path: Path | None = field(
        metadata=_row(
            _folder,
            needs=_require_log_path,
            without="enable_file_logging",
            is_idle=lambda it: it.log_path is not None and not it.enable_file_logging,
        )
    )
    run_path: Path | None = field(
        metadata=_row(
            _folder,
            needs=_require_run_path,
            without="enable_tensorboard",
            is_idle=lambda it: it.run_path is not None and not it.enable_tensorboard,
        )
    )
    chkpt_root: Path | None = field(metadata=_row(_folder, needs=_require_chkpt_root))
    store: CheckpointStore | None = field(
        metadata=_row(
            _STORE,
            without=_SAVES,
            is_idle=lambda it: it.store is not None and not it.uses_store,
        )
    )
    resume: str | Path = field(
        metadata=_row(
            _resume,
            is_alike=True,
            without="chkpt_root",
            is_idle=lambda it: it.resume == "never" and it.chkpt_root is None,
        )
    )
    allow_changes: tuple[str, ...] = field(
        metadata=_row(
            _changes,
            needs=_require_declared,
            without="chkpt_root",
            is_idle=lambda it: bool(it.allow_changes) and it.chkpt_root is None,
        )
    )
    on_incomplete: str = field(
        metadata=_row(
            _one_of("warn", "raise", remedy="Omit it for a warning."),
            is_alike=True,
            without=_SAVES,
            is_idle=lambda it: it.on_incomplete == "raise" and not it.can_save,
        )
    )
    ledger: str = field(
        metadata=_row(
            _one_of("steps", "off", remedy="Omit it for a line per iteration."),
        )
    )
    skip_batches: tuple[int, ...] = field(
        metadata=_row(_batch_numbers, is_alike=True, defines_run=True)
    )
    signals: Signals = field(metadata=_row(_signals))
    engine: Engine | None = field(
        metadata=_row(_engine, needs=_refuse_what_an_engine_has, is_alike=True)
    )
    use_cpu: bool | None = field(metadata=_row(_CHOICE))
    gpus: list[int] | None = field(metadata=_row(_as_given))
    precision: Precision | None = field(metadata=_row(_precision, is_alike=True, defines_run=True))
    clip_norm: float | None = field(metadata=_row(_POSITIVE, is_alike=True))
    clip_value: float | None = field(
        metadata=_row(_POSITIVE, needs=_refuse_two_clips, is_alike=True)
    )
    num_replicas: int | None = field(metadata=_row(_PROCESSES))
    nproc: int | None = field(metadata=_row(_PROCESSES, needs=_require_replicas))
    sharding: str = field(metadata=_row(_one_of("none", "full"), needs=_refuse_unsharded))
    sanity_steps: int = field(metadata=_row(_TRIAL, is_alike=True))
    batch_limits: dict[Phase, int] = field(metadata=_row(_limits, is_alike=True))
    max_restarts: int = field(
        metadata=_row(
            _TRIAL,
            without="nproc",
            is_idle=lambda it: it.max_restarts > 0 and it.nproc is None and len(it.gpu_ids) < 2,
        )
    )
    hang_warning: float | None = field(metadata=_row(_POSITIVE))
    hang_timeout: float | None = field(
        metadata=_row(_POSITIVE, needs=_require_a_later_end, is_alike=True)
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options of a trainer, and warn of those that have no effect.

        Args:
            given: its arguments, by name; others are left alone.

        Raises:
            ArgumentError: if a value is invalid.
            UsageError: if ``use_cpu=False`` finds no GPU.
        """
        options = cls(**{name: row.check(name, given[name]) for name, row in ROWS.items()})
        for row in ROWS.values():
            if row.needs is not None:
                row.needs(options)
        options = replace(options, gpu_ids=_find_gpus(options))
        if options.gpu_ids and options.enable_deterministic:
            require_deterministic_cublas()
        for name, row in ROWS.items():
            if row.is_idle(options):
                _LOGGER.warning("Trainer(%s=...) has no effect without %s.", name, row.without)
        return options

    def plain(self, name: str) -> Any:
        """Return an option as processes compare it, and as checkpoints hold it."""
        value = self.seed if name == "random_seed" else getattr(self, name)
        if isinstance(value, TrainingUnit):
            return value.name.lower()
        if isinstance(value, Precision):
            return value.value
        if isinstance(value, Engine):
            return type(value).__qualname__
        return str(value) if isinstance(value, Path) else value

    @property
    def schedule(self) -> Schedule:
        """The options that decide when something happens."""
        return Schedule(
            unit=self.train_unit,
            total_steps=self.total_steps,
            valid_frequency=self.valid_frequency,
            chkpt_frequency=self.chkpt_frequency,
            print_frequency=self.print_frequency,
            accumulation_steps=self.accumulation_steps,
            early_stop_cycles=self.early_stop_cycles,
        )

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return get_default_seed() if self.random_seed is None else self.random_seed

    def describe_seed(self) -> str:
        """Return the seed for the banner."""
        default = " (the default)" if self.random_seed is None else ""
        return f"{self.seed}{default}"

    def name_for(self, save_name: str) -> str:
        """Return the name of a run that trains a model of this ``save_name``."""
        return self.run_name or save_name

    @property
    def can_save(self) -> bool:
        """Whether checkpoints are written: both a folder and a frequency are set."""
        return self.chkpt_root is not None and self.chkpt_frequency is not None

    @property
    def resume_path(self) -> Path | None:
        """The file to continue from; ``None`` for the run's newest checkpoint."""
        return self.resume if isinstance(self.resume, Path) else None

    @property
    def writes_ledger(self) -> bool:
        """Whether checkpoints are written, and a ledger beside them."""
        return self.can_save and self.ledger != "off"

    @property
    def uses_store(self) -> bool:
        """Whether ``store`` has an effect: on saves, or on which checkpoint is the best one."""
        is_rule = self.store is not None and self.store.keep_best is not None
        return self.can_save or (self.chkpt_root is not None and is_rule)


ROWS: Mapping[str, Row] = {
    each.name: each.metadata["row"] for each in fields(Options) if each.metadata
}
"""The row of each option, by name."""


def _find_gpus(options: Options) -> list[int]:
    if options.engine is None:
        return select_gpus(options.use_cpu, options.gpus)
    device = options.engine.device
    return [device.index or 0] if device.type == "cuda" else []
