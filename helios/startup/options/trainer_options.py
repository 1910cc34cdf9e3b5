"""All options of a trainer, in groups; each consumer gets the group that it needs.

Each group checks itself when it is created; what concerns several groups is checked here. Options
without effect are reported as warnings.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from helios.core.declared_values import flatten_params
from helios.core.rng import get_default_seed
from helios.engines.precision import Precision
from helios.launch.launcher import require_deterministic_cublas
from helios.schedule import Schedule
from helios.startup.options.audit_options import Audit
from helios.startup.options.checkpoint_options import PARAMS, CheckpointOptions, allows
from helios.startup.options.engine_options import EngineOptions, NumericsOptions, ProcessOptions
from helios.startup.options.logging_options import LoggingOptions
from helios.startup.options.replay_options import ReplayOptions
from helios.startup.options.trial_options import TrialOptions
from helios.startup.options.validators import as_folder, check_positive, refusal
from helios.startup.runs.signal_policy import Signals

_LOGGER = logging.getLogger(__name__)
_CYCLES, _SAVES = "valid_frequency", "chkpt_root and chkpt_frequency"
_TENSORBOARD, _LOG_FILE = "enable_tensorboard", "enable_file_logging"

SeedSource: TypeAlias = Literal["init", "order", "augmentation", "training"]
_SOURCES: tuple[str, ...] = get_args(SeedSource)


@dataclass(frozen=True)
class RunOptions:
    """The name, seeds and initialization of a run; see ``Trainer`` for the meaning of each field.

    Attributes:
        seeds: a ``dict`` once checked; empty without ``Trainer(seeds=...)``.
        params: a flat ``dict`` of plain values once checked.
    """

    run_name: str
    random_seed: int | None
    seeds: Any = None
    init: str = "setup"
    params: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.run_name, str) or any(mark in self.run_name for mark in "/\\\0"):
            rule = "a string without path separators (it names files)"
            raise refusal("run_name", rule, self.run_name, "Pass folders as chkpt_root and so on.")
        seed = self.random_seed
        if seed is not None and not _is_seed(seed):
            raise refusal("random_seed", "None or an int of 64 bits", seed, "Pass e.g. 42.")
        object.__setattr__(self, "seeds", _as_seeds(self.seeds))
        object.__setattr__(self, "params", flatten_params(self.params))
        if self.init not in ("setup", "keyed"):
            raise refusal("init", '"setup" or "keyed"', self.init, "Pass one of them.")

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return get_default_seed() if self.random_seed is None else self.random_seed

    def describe_seed(self) -> str:
        """Return the seeds for the banner."""
        default = " (the default)" if self.random_seed is None else ""
        others = "".join(f", {source} {seed}" for source, seed in self.seeds.items())
        return f"{self.seed}{default}{others}"

    def seed_of(self, source: SeedSource) -> int:
        """Return the seed of a source of random numbers: that of the run if it has none."""
        found: int = self.seeds.get(source, self.seed)
        return found

    def name_for(self, save_name: str) -> str:
        """Return the name of a run that trains a model of this ``save_name``."""
        return self.run_name or save_name


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _as_seeds(given: Any) -> dict[str, int]:
    """Return the seeds by source, in a fixed order."""
    if given is None:
        return {}
    known = ", ".join(_SOURCES)
    if not isinstance(given, Mapping):
        rule = f"None or a mapping of names among {known} to seeds"
        raise refusal("seeds", rule, given, 'Pass e.g. {"order": 1}.')
    if any(name not in _SOURCES for name in given):
        raise refusal("seeds", f"a mapping with names among {known}", given, "Correct the names.")
    if not all(map(_is_seed, given.values())):
        remedy = "Leave out what has the seed of the run."
        raise refusal("seeds", "a mapping to ints of 64 bits", given, remedy)
    return {name: given[name] for name in _SOURCES if name in given}


@dataclass(frozen=True)
class RegistryOptions:
    """The package that fills the registries; see ``Trainer`` for the meaning of each field.

    Attributes:
        src_root: a ``Path`` once checked, if any.
    """

    src_root: Any
    import_prefix: str

    def __post_init__(self) -> None:
        if not isinstance(self.import_prefix, str):
            raise refusal("import_prefix", "a string", self.import_prefix, 'Pass e.g. "src".')
        root = as_folder("src_root", self.src_root)
        object.__setattr__(self, "src_root", root)
        if root is not None and not root.is_dir():
            raise refusal("src_root", "an existing folder", str(root), "Correct the path.")


@dataclass(frozen=True)
class WaitingOptions:
    """How long a process may stand still; see ``Trainer`` for the meaning of each field."""

    hang_warning: float | None = 60.0
    hang_timeout: float | None = None

    def __post_init__(self) -> None:
        check_positive("hang_warning", self.hang_warning)
        check_positive("hang_timeout", self.hang_timeout)
        if self.hang_warning is None or self.hang_timeout is None:
            return
        if self.hang_timeout <= self.hang_warning:
            rule = f"more than hang_warning={self.hang_warning:g}, whose line comes first"
            remedy = "Pass more seconds, or hang_warning=None for no line."
            raise refusal("hang_timeout", rule, self.hang_timeout, remedy)


def as_signals(value: Signals | None) -> Signals:
    """Return the signals on which fit saves and ends: the default ones for ``None``.

    Raises:
        ArgumentError: for something that is not a ``Signals``.
    """
    if value is None:
        return Signals()
    if not isinstance(value, Signals):
        remedy = "Pass e.g. Signals(grace=60.0), or Signals(()) for none."
        raise refusal("signals", "None or Signals", value, remedy)
    return value


@dataclass(frozen=True)
class TrainerOptions:
    """The options of a trainer.

    Attributes:
        run: its name and seeds.
        registry: the package that fills the registries.
        schedule: when something happens.
        numerics: how exact the arithmetic is.
        logging: logs, progress bar and banner.
        checkpoints: where they are, and which one is resumed.
        signals: signals on which fit saves and ends.
        engine: device, precision and clipping.
        processes: how many processes and replicas.
        trial: how much of the data is used.
        waiting: how long a process may stand still.
        audit: which gradients are computed a second time; ``None`` for none.
    """

    run: RunOptions
    registry: RegistryOptions
    schedule: Schedule
    numerics: NumericsOptions
    logging: LoggingOptions
    checkpoints: CheckpointOptions
    signals: Signals
    engine: EngineOptions
    processes: ProcessOptions
    trial: TrialOptions
    waiting: WaitingOptions
    audit: Audit | None = None

    def __post_init__(self) -> None:
        if self.processes.sharding == "full":
            self._refuse_unsharded()
        if self.engine.gpu_ids and self.numerics.enable_deterministic:
            require_deterministic_cublas()
        self._check_allowed_params()
        for name, (is_useless, cause) in self._list_useless().items():
            if is_useless:
                _LOGGER.warning("Trainer(%s=...) has no effect without %s.", name, cause)

    def _check_allowed_params(self) -> None:
        """Refuse to allow changes of parameters that are not declared."""
        for name in self.checkpoints.allow_changes:
            asked = name.removeprefix(PARAMS)
            if asked != name and not any(allows(name, each) for each in self.run.params):
                known = ", ".join(f'"{PARAMS}{each}"' for each in self.run.params) or "none"
                rule = f"declared parameters ({known})"
                raise refusal("allow_changes", rule, name, "Correct the name.")

    def _refuse_unsharded(self) -> None:
        """Refuse options that do not work with sharded models."""
        precision = self.engine.precision or getattr(self.engine.engine, "precision", None)
        if precision is Precision.FP16:
            remedy = 'Pass "bf16".'
            raise refusal("precision", 'not fp16 with sharding="full"', precision.value, remedy)
        if self.audit is not None:
            remedy = "Omit it: a process cannot compute the gradient of another one alone."
            raise refusal("audit", 'None with sharding="full"', self.audit, remedy)

    def for_replay(self, asked: ReplayOptions) -> TrainerOptions:
        """Return the options of a replay: signals end it, and nothing is saved or audited.

        Args:
            asked: what is to be repeated, and how.
        """
        processes, checkpoints, logging = self.processes, self.checkpoints, self.logging
        if asked.nproc is not None:
            processes = replace(processes, nproc=asked.nproc)
        if asked.has_bars:
            logging = replace(logging, enable_progress_bar=True)
        if checkpoints.resume == "never":
            checkpoints = replace(checkpoints, resume="auto")
        # What has no effect was reported when the trainer was created.
        found = copy.copy(self)
        changed = {"signals": Signals(()), "audit": None}
        vars(found).update(changed, processes=processes, checkpoints=checkpoints, logging=logging)
        return found

    def _list_useless(self) -> dict[str, tuple[bool, str]]:
        """Return by name whether an option has no effect, and which other one it needs."""
        schedule, logs, checkpoints = self.schedule, self.logging, self.checkpoints
        has_root = checkpoints.chkpt_root is not None
        has_patience = schedule.early_stop_cycles is not None
        benchmarks = self.numerics.enable_cudnn_benchmark
        prefix, has_sources = self.registry.import_prefix, self.registry.src_root is not None
        is_strict, is_full = checkpoints.reproducibility == "strict", checkpoints.ledger == "full"
        needs_all = checkpoints.on_incomplete == "raise"
        return {
            "early_stop_cycles": (has_patience and not schedule.valid_frequency, _CYCLES),
            "run_path": (logs.run_path is not None and not logs.enable_tensorboard, _TENSORBOARD),
            "log_path": (logs.log_path is not None and not logs.enable_file_logging, _LOG_FILE),
            "enable_cudnn_benchmark": (benchmarks and not self.engine.gpu_ids, "a GPU"),
            "store": (checkpoints.store is not None and not checkpoints.uses_store, _SAVES),
            "import_prefix": (prefix != "" and not has_sources, "src_root"),
            "resume": (checkpoints.resume == "never" and not has_root, "chkpt_root"),
            "on_incomplete": (needs_all and not checkpoints.can_save, _SAVES),
            "allow_changes": (bool(checkpoints.allow_changes) and not has_root, "chkpt_root"),
            "ledger": (is_full and not checkpoints.can_save, _SAVES),
            "reproducibility": (is_strict and not has_root, "chkpt_root"),
        }
