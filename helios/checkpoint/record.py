"""The content of a checkpoint: all keys, and their defaults in files that lack them.

A record holds plain dictionaries, as the file does. :mod:`helios.checkpoint.capture` fills it and
restores a run from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from helios.checkpoint import file_names
from helios.errors import StateError
from helios.findings import FindingKind, Findings
from helios.version import __version__

# Fields that are filled in when the record is written: hooks do not see them.
_STAMP = {"is_stamp": True}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of a checkpoint.

    Attributes:
        schema: version of the format.
        version: version of the package that wrote it.
        training_state: the counters.
        cursor: the position in the data.
        model: what the model's ``state_dict`` returned.
        by_rank: state that differs between processes, by rank: parts of the ``model``, ``owners``,
            ``states`` of user code, and that of its ``data``; empty if nothing differs.
        tables: the model's tables of losses and scores.
        is_manual: whether the model steps its optimizers itself; ``None`` before the first step.
        plugins: states by id.
        loops: states by role path.
        data: ``description`` of the training data, and the ``state`` of its loader.
        engine: micro-batches of the open window; the scaler.
        rng: the generators, which are the same in all processes.
        num_threads: intra-op threads of the run; ``None`` if unknown.
        num_replicas: replicas of the run; 0 if unknown.
        findings: what limits the reproducibility of the run, under a key for each kind.
        owners: plain attributes of plugins, data module, loops and engine, by owner.
        options: what defines the run and what ends it.
        machine: versions, devices and settings that bits of arithmetic depend on.
        resumed_from: the path of ``resume=<path>`` from which the run was started.
        log_path: the log file.
        run_path: the folder of the event files.
        events: lengths of the event files; ``None`` if they are never truncated.
        ledger: length and hash of the ledger up to here; ``None`` without one.
        best_validations: the best validations so far, and the rule that decides; ``None`` without
            a rule.
        loss_means: sums of losses since their means were logged last; ``None`` if none are logged.
        migrated_from: the version of helios-ml that wrote the original; ``None`` if none did.
        extra: what hooks have added.
    """

    schema: int = field(default=file_names.SCHEMA, metadata=_STAMP)
    version: str = field(default=__version__, metadata=_STAMP)
    training_state: dict[str, Any]
    cursor: dict[str, Any]
    model: dict[str, Any]
    by_rank: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_manual: bool | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
    loops: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any]
    num_threads: int | None = None
    num_replicas: int
    findings: Findings = field(default_factory=Findings)
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict, metadata=_STAMP)
    machine: dict[str, str] = field(default_factory=dict, metadata=_STAMP)
    resumed_from: str | None = field(default=None, metadata=_STAMP)
    log_path: str | None = field(default=None, metadata=_STAMP)
    run_path: str | None = field(default=None, metadata=_STAMP)
    events: dict[str, Any] | None = field(default_factory=dict, metadata=_STAMP)
    ledger: dict[str, Any] | None = field(default=None, metadata=_STAMP)
    best_validations: dict[str, Any] | None = None
    loss_means: dict[str, Any] | None = None
    migrated_from: str | None = field(default=None, metadata=_STAMP)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Record:
        """Return the record of a dictionary; no part of it is copied.

        Raises:
            StateError: if it lacks what every checkpoint has.
        """
        lacking = [key for key in REQUIRED if key not in payload]
        if lacking:
            raise StateError(
                "A checkpoint must hold the complete state, but this one lacks "
                f"{', '.join(map(repr, lacking))}. Do not remove keys in on_save_checkpoint or "
                "on_load_checkpoint."
            )
        known = {name: payload[name] for name in _NAMES if name in payload}
        extra = {key: value for key, value in payload.items() if key not in KEYS}
        return cls(**known, findings=Findings.from_keys(payload), extra=extra)

    def to_payload(self) -> dict[str, Any]:
        """Return the dictionary to write, without empty optional keys."""
        found = self._by_key()
        absent = [key for key, value in _LEFT_OUT.items() if found[key] == value]
        return {key: found[key] for key in KEYS if key not in absent} | self.extra

    def snapshot(self) -> dict[str, Any]:
        """Return the content that hooks see, and may extend, before it is written."""
        found = self._by_key()
        return {key: found[key] for key in KEYS if key not in _STAMPED} | self.extra

    def _by_key(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NAMES} | self.findings.by_key()

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, iteration) of its safe point."""
        state = self.training_state
        return state["global_epoch"], state["global_iteration"]

    @property
    def counters(self) -> tuple[int, int | None]:
        """(iteration, optimizer steps) of its safe point; ``None`` for unknown ones."""
        state = self.training_state
        return state["global_iteration"], state.get("global_step")

    @property
    def has_validated(self) -> bool:
        """Whether a validation has ended at its safe point, so that scores match the weights."""
        state = self.training_state
        return bool(state["validation_cycles"] > 0 and state["running_iter"] == 0)

    def count_units(self, *, is_by_epoch: bool) -> int | None:
        """Return how many epochs or steps are complete; ``None`` inside an epoch."""
        if not is_by_epoch:
            steps: int = self.training_state["current_iteration"]
            return steps
        epochs: int = self.cursor["epoch"]
        return None if self.cursor["batch"] else epochs


_FIELDS = [each for each in fields(Record) if each.name != "extra"]
_NAMES = [each.name for each in _FIELDS if each.name != "findings"]
_STAMPED = {each.name for each in _FIELDS if each.metadata.get("is_stamp")}
# If a key is missing, nothing was logged there, or nothing was migrated.
_LEFT_OUT: dict[str, Any] = {"log_path": None, "run_path": None, "events": {}} | {
    "ledger": None,
    "best_validations": None,
    "loss_means": None,
    "migrated_from": None,
}
KEYS = tuple(
    key
    for each in _FIELDS
    for key in ([kind.value for kind in FindingKind] if each.name == "findings" else [each.name])
)
"""The keys of a checkpoint."""
REQUIRED = tuple(
    each.name for each in _FIELDS if each.default is MISSING and each.default_factory is MISSING
)
"""The keys of the state that a file of every schema has."""
