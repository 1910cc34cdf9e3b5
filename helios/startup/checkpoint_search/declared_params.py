"""Compares ``Trainer(params=...)`` with what the run was declared with, and keeps its history.

The options of a checkpoint hold ``params``, the values now, and ``params_history``, a section for
each time from which other values held. A checkpoint of an earlier release has neither.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.checkpoint.record import Record
from helios.core.stored_values import ABSENT, ValueChange, compare_values, show_value, stored_params
from helios.core.text import tuple_text
from helios.errors import RunMismatchError
from helios.schedule import Schedule, find_limit
from helios.startup.checkpoint_search.run_identity import is_extended, is_shortened
from helios.startup.options.checkpoint_options import PARAMS, allows
from helios.state import Cursor, TrainingState

_LOGGER = logging.getLogger(__name__)

_KEY, _HISTORY = "params", "params_history"
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
    return DeclaredParams({_KEY: dict(params), _HISTORY: [_section(params, None)]})


def compare_params(
    params: Mapping[str, Any],
    record: Record,
    schedule: Schedule,
    allowed: Sequence[str],
    *,
    name: str,
    path: Path,
    is_finished: bool,
) -> DeclaredParams:
    """Compare the parameters of a start with those of its checkpoint.

    Args:
        params: those of this start.
        record: the checkpoint.
        schedule: says how far this start trains.
        allowed: what ``allow_changes`` names.
        name: the name of the run.
        path: the file of the checkpoint.
        is_finished: whether the run has ended there.

    Raises:
        RunMismatchError: for other values that are not allowed; if nothing is left to train, none
            are, because the run would be labelled with what it was not trained with.
    """
    stored = record.options
    if _KEY not in stored:
        return DeclaredParams({_KEY: dict(params), _HISTORY: [_section(params, record)]})
    is_done = is_finished or has_ended(schedule, record)
    before = _params_at(schedule, stored) if is_done else stored_params(stored)
    found = compare_values(before, params)
    changes = tuple(each for each in found if each.is_contradiction)
    one_sided = tuple(each for each in found if not each.is_contradiction)
    if is_done:
        if changes:
            raise _refuse_relabelling(changes, name, path)
        return DeclaredParams({key: stored[key] for key in (_KEY, _HISTORY)}, (), one_sided)
    refused = [each for each in changes if not any(allows(known, each.name) for known in allowed)]
    if refused:
        names = [f"{PARAMS}{each.name}" for each in refused]
        if len(names) > _MOST_LISTED:
            names = [PARAMS.removesuffix(".")]
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{_list(refused)}. Undo the change, or allow it with "
            f"Trainer(allow_changes={tuple_text(names)}) for a run that goes on with it. For a run "
            "of its own, pass another save_name."
        )
    history = list(stored[_HISTORY])
    if found:
        history = [each for each in history if not _is_here(each, record)]
        history.append(_section(params, record))
    return DeclaredParams({_KEY: dict(params), _HISTORY: history}, changes, one_sided)


def _list(changes: Sequence[ValueChange]) -> str:
    return "; ".join(f"{PARAMS}{each.name}: {each.values}" for each in changes)


def _refuse_relabelling(changes: Sequence[ValueChange], name: str, path: Path) -> RunMismatchError:
    return RunMismatchError(
        f"Nothing is left to train for the run {name!r} in {path.parent}, and it was trained with "
        f"other parameters: {_list(changes)}. Its weights and scores belong to the old values "
        f"({path.name}). Give a run with new values its own save_name, pass resume='never' to "
        "start this one again, or undo the change."
    )


def has_ended(schedule: Schedule, record: Record) -> bool:
    """Whether nothing is left to train, also if a kill has prevented the mark that says so."""
    state, cursor = TrainingState(**record.training_state), Cursor(**record.cursor)
    is_stopped = cursor.stop_reason and not is_extended(schedule, record.options)
    return bool(is_stopped or find_limit(schedule, state, cursor))


def _params_at(schedule: Schedule, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with which the run has reached the end of this start."""
    if not is_shortened(schedule, stored):
        return stored_params(stored)
    unit = "epoch" if schedule.is_by_epoch else "step"
    first, *later = stored[_HISTORY]
    held = [first, *(each for each in later if each[unit] < schedule.total_steps)]
    return stored_params(held[-1])


def _section(params: Mapping[str, Any], record: Record | None) -> dict[str, Any]:
    if record is None:
        place = {"iteration": 0, "epoch": 0, "step": 0}
    else:
        place = {
            "iteration": record.place[1],
            "epoch": record.cursor["epoch"],
            "step": record.training_state["current_iteration"],
        }
    return {**place, _KEY: dict(params)}


def _is_here(section: Mapping[str, Any], record: Record) -> bool:
    """Whether nothing was trained with the values of a section."""
    return bool(section["iteration"] >= record.place[1])
