"""Compares what ``Trainer(params=...)`` declares with what the checkpoint says.

The options of a checkpoint hold it as ``params``; a migrated one has none. Another value stops a
start. What nobody has declared is compared in ``changed_start``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.checkpoint.record import Record
from helios.core.stored_values import ABSENT, ValueChange, compare_values, show_value, stored_params
from helios.errors import RunMismatchError
from helios.schedule import find_limit
from helios.startup.run_identity import is_extended, is_shortened
from helios.startup.trainer_options import PARAMS, Options, allows
from helios.state import Cursor, TrainingState
from helios.text import tuple_text

_LOGGER = logging.getLogger(__name__)

_KEY = "params"
_MOST_LISTED = 3


@dataclass(frozen=True)
class DeclaredParams:
    """The parameters of a start, compared with those of its checkpoint.

    Attributes:
        options: what the next checkpoints hold of them.
        changes: other values that the user has allowed.
        one_sided: names that only the run or only this start has.
    """

    options: dict[str, Any]
    changes: tuple[ValueChange, ...] = ()
    one_sided: tuple[ValueChange, ...] = ()

    @property
    def named(self) -> tuple[ValueChange, ...]:
        """All changes that the log names."""
        return (*self.changes, *self.one_sided)

    def report(self) -> list[str]:
        """Log what differs; returns the allowed changes as text, to be recorded."""
        texts = [f"{PARAMS}{each.name}: {each.values}" for each in self.changes]
        for text in texts:
            _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
        if self.one_sided:
            _LOGGER.info("Trainer(params=...) %s.", _describe_one_sided(self.one_sided))
        return texts


def _describe_one_sided(changes: Sequence[ValueChange]) -> str:
    new = [f"{each.name}={show_value(each.after)}" for each in changes if each.before is ABSENT]
    gone = [f"{each.name}={show_value(each.before)}" for each in changes if each.after is ABSENT]
    parts = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("adds", new), ("no longer has", gone))
        if names
    ]
    return " and ".join(parts)


def begin_params(params: Mapping[str, Any]) -> DeclaredParams:
    """Return the parameters of a new run."""
    return DeclaredParams({_KEY: dict(params)})


def compare_params(
    params: Mapping[str, Any],
    record: Record,
    options: Options,
    *,
    name: str,
    path: Path,
    is_finished: bool,
) -> DeclaredParams:
    """Compare the parameters of a start with those of its checkpoint.

    Args:
        params: those of this start.
        record: the checkpoint.
        options: says how far this start trains, and which changes are allowed.
        name: the name of the run.
        path: the file of the checkpoint.
        is_finished: whether the run has ended there.

    Raises:
        RunMismatchError: for other values that are not allowed; if nothing is left to train, none
            are, because the run would be labelled with what it was not trained with. Only a start
            that the run has passed, as a script in stages has them, may differ where allowed.
    """
    stored = record.options
    if _KEY not in stored:
        return DeclaredParams({_KEY: dict(params)})
    found = compare_values(stored_params(stored), params)
    changes = tuple(each for each in found if each.is_contradiction)
    one_sided = tuple(each for each in found if not each.is_contradiction)
    refused = [
        each
        for each in changes
        if not any(allows(known, each.name) for known in options.allow_changes)
    ]
    if is_finished or has_ended(options, record):
        if refused or (changes and not is_shortened(options, stored)):
            raise _refuse_relabelling(changes, name, path)
        return DeclaredParams({_KEY: stored[_KEY]}, (), one_sided)
    if refused:
        names = [f"{PARAMS}{each.name}" for each in refused]
        if len(names) > _MOST_LISTED:
            names = [PARAMS.removesuffix(".")]
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{_named(refused)}. Undo the change, or allow it with "
            f"Trainer(allow_changes={tuple_text(names)}) for a run that goes on with it. For a run "
            "of its own, pass another save_name."
        )
    return DeclaredParams({_KEY: dict(params)}, changes, one_sided)


def _named(changes: Sequence[ValueChange]) -> str:
    return "; ".join(f"{PARAMS}{each.name}: {each.values}" for each in changes)


def _refuse_relabelling(changes: Sequence[ValueChange], name: str, path: Path) -> RunMismatchError:
    return RunMismatchError(
        f"Nothing is left to train for the run {name!r} in {path.parent}, and it was trained with "
        f"other parameters: {_named(changes)}. Its weights and scores belong to the old values "
        f"({path.name}). Give a run with new values its own save_name, pass resume='never' to "
        "start this one again, or undo the change."
    )


def has_ended(options: Options, record: Record) -> bool:
    """Whether nothing is left to train, also if a kill has prevented the mark that says so."""
    state, cursor = TrainingState(**record.training_state), Cursor(**record.cursor)
    is_stopped = cursor.stop_reason and not is_extended(options, record.options)
    return bool(is_stopped or find_limit(options.schedule, state, cursor))
