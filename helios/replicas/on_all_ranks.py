"""Work that all processes do together, and that fails in all of them.

An error that only one process can detect, such as a damaged checkpoint, would leave the others
waiting in a collective: it is raised in all of them, with the same type and message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from helios.distributed.pickling import pack_error
from helios.errors import RankError
from helios.replicas.replicas import Replicas

Result = TypeVar("Result")


def on_each(team: Replicas, function: Callable[[], Result]) -> list[Result]:
    """Run a function in every process; returns the results by rank, which must be small.

    Args:
        team: the processes; all of them call this at the same place.
        function: the function.

    Raises:
        Exception: what the function raises; if another process fails, its error, whose cause is a
            ``RankError`` that names the process.
    """
    if team.has_single_process:
        return [function()]
    value: Result | None = None
    own: Exception | None = None
    try:
        value = function()
    except Exception as error:
        own = error
    lost: Exception | None = None
    reports: list[Any] = []
    try:
        reports = team.gather_objects((value, None if own is None else pack_error(own)))
    except Exception as error:
        lost = error
    # Outside the exception handlers, so that no error appears as the context of another.
    if own is not None:
        raise own
    if lost is not None:
        raise lost
    for rank, (_, packed) in enumerate(reports):
        if packed is not None:
            cause = RankError(f"Rank {rank} of {team.num_processes} has raised it first.")
            raise pickle.loads(packed) from cause
    return [result for result, _ in reports]


def on_first(team: Replicas, function: Callable[[], Result]) -> Result:
    """Run a function on rank 0; all processes get its result, or its error.

    Args:
        team: the processes; all of them call this at the same place.
        function: the function; its result must be small.

    Raises:
        Exception: what the function raises, in all processes.
    """
    results = on_each(team, lambda: function() if team.rank == 0 else None)
    return results[0]  # type: ignore[return-value]
