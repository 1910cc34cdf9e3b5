"""Sidecars: small JSON files with facts about a checkpoint, readable without opening it.

A sidecar holds the digest of the checkpoint's bytes, and a checksum of its own, so that changes of
either file are detected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from helios.best import BestSoFar, BestValidation
from helios.checkpoint.file_names import FIRST_SCHEMA, SCHEMA
from helios.checkpoint.record import Record
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.findings import FindingKind, Level
from helios.storage.files import FileFacts
from helios.text import json_value

_CHECK = "check"


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """The content of a sidecar.

    Attributes:
        run_name: name of the run that the checkpoint belongs to.
        num_replicas: number of replicas that define the run; 0 if unknown.
        epoch: ``global_epoch`` at the safe point.
        iteration: ``global_iteration`` at the safe point.
        metrics: validation scores, also those that are not finite.
        level: level of reproducibility that the run reaches.
        finished: why the run ended with this checkpoint; ``None`` if it did not.
        resumed_from: the path of ``Trainer(resume=<path>)`` from which the run was started.
        changes: what changed at a resume, as the user allowed or because a checkpoint was
            incomplete, as text.
        options: what defines the run, for readers; JSON values, infinities as text.
        digest: ``sha256:...`` of the checkpoint, of a sharded one that of the digests of its files;
            empty if none was computed.
        schema: version of the format.
        version: version of the package that wrote the file, for information.
        count: the completed units of the run: steps or epochs; ``None`` inside an epoch if epochs
            are counted, and if unknown.
        missing: what training has changed and the checkpoint lacks: path and reason.
        claims: components that the level takes at their word.
        ledger: length and hash of the run's ledger up to here; ``None`` without one.
        best: the best validation of the run so far; ``None`` if there is none.
        averages: ids of the plugins whose averages of the weights have the scores.
        step: optimizer steps at the safe point; ``None`` if unknown.
        migrated_from: the version of helios-ml that wrote the original; ``None`` if none did.
        files: size and digest of each file of a sharded checkpoint, by name.
        source_digest: that of the file from which it was migrated; empty for none.
    """

    run_name: str
    num_replicas: int
    epoch: int
    iteration: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    level: str = ""
    finished: str | None = None
    resumed_from: str | None = None
    changes: list[Any] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    digest: str = ""
    schema: int = SCHEMA
    version: str = ""
    count: int | None = None
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    claims: list[str] = dataclasses.field(default_factory=list)
    ledger: dict[str, Any] | None = None
    best: BestValidation | None = None
    averages: list[str] = dataclasses.field(default_factory=list)
    step: int | None = None
    migrated_from: str | None = None
    files: dict[str, FileFacts] = dataclasses.field(default_factory=dict)
    source_digest: str = ""

    @property
    def names_run(self) -> bool:
        """Whether it says which run wrote the checkpoint, unlike that of another program's file."""
        return self.num_replicas > 0

    @classmethod
    def of(
        cls,
        record: Record,
        *,
        run_name: str,
        level: Level,
        metrics: dict[str, float],
        averages: list[str],
        changes: list[Any],
        is_by_epoch: bool,
    ) -> Sidecar:
        """Return the sidecar of a record.

        Args:
            record: the record to write.
            run_name: the run that it belongs to.
            level: its level of reproducibility.
            metrics: scores of the validation that ended at its safe point.
            averages: ids of the plugins whose averages have these scores.
            changes: changes that the user allowed.
            is_by_epoch: whether the run counts epochs.
        """
        epoch, iteration = record.place
        stored = record.best_validations
        return cls(
            run_name=run_name,
            num_replicas=record.num_replicas,
            epoch=epoch,
            iteration=iteration,
            metrics=metrics,
            level=level.value,
            resumed_from=record.resumed_from,
            changes=changes,
            options=record.options,
            count=record.count_units(is_by_epoch=is_by_epoch),
            missing=record.findings.missing,
            claims=record.findings.names(FindingKind.CLAIM),
            ledger=record.ledger,
            best=None if stored is None else BestSoFar.from_plain(stored).best,
            averages=averages,
            step=record.counters[1],
        )

    def to_json(self) -> str:
        """Return the text of the file."""
        metrics = {name: float(value) for name, value in self.metrics.items()}
        best = None if self.best is None else vars(self.best)
        plain = json_value({**vars(self), "metrics": metrics, "best": best})
        return json.dumps(plain | {_CHECK: _checksum(plain)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str) -> Sidecar:
        """Read the text of a file.

        Args:
            text: what :meth:`to_json` returned, possibly in a later version.
            name: name of the file in messages.

        Raises:
            IncompatibleCheckpointError: if a later version wrote it in another format.
            DamagedCheckpointError: if it is damaged.
        """
        try:
            table = dict(json.loads(text))
            check = table.pop(_CHECK)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _unreadable(name, "it is not a sidecar in JSON") from None
        if check != _checksum(table):
            raise _unreadable(name, "its checksum does not match")
        check_schema(table.get("schema"), name=name)
        known = {
            each.name: table[each.name] for each in dataclasses.fields(cls) if each.name in table
        }
        try:
            known["metrics"] = {key: float(value) for key, value in known["metrics"].items()}
            known["files"] = {key: FileFacts(*facts) for key, facts in known["files"].items()}
            return cls(**known | {"best": BestValidation.from_plain(table.get("best"))})
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _unreadable(name, "it lacks entries of a sidecar") from None


def check_schema(schema: Any, *, name: str) -> None:
    """Refuse a format that this version does not read.

    Raises:
        IncompatibleCheckpointError: for one of a later version, and for one before the first
            release.
    """
    if type(schema) is not int or schema > SCHEMA:
        raise IncompatibleCheckpointError(
            f"{name} was written in format {schema!r}, and this version of Helios reads formats up "
            f"to {SCHEMA}. Install the version of Helios that wrote it, or a later one."
        )
    if schema < FIRST_SCHEMA:
        raise IncompatibleCheckpointError(
            f"{name} was written by a development version of Helios (format {schema}), which no "
            "release reads. Move the file to another folder, and train again."
        )


def _unreadable(name: str, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The sidecar {name} cannot be read: {reason}. Remove it to load its checkpoint unverified."
    )


def _checksum(table: Mapping[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
