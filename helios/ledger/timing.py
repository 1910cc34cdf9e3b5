"""When and how fast a run trained, and the scores of its validations: what a report needs.

Times differ between equal runs, so the file is never compared, and is not part of the ledger.

===================  =======================================================================
line                 content
===================  =======================================================================
of a start           ``time``, ``iteration`` that it continues from, ``host``, ``processes``, and
                     hash of the ``run``'s definition
of a stretch         ``time``, last ``iteration``, ``iterations`` and ``seconds`` since the line
                     before; how many of the seconds no iteration has used (``paused``: the start
                     and validations); ``vm_hwm`` and ``gpu_memory`` in bytes: the most that this
                     process, and PyTorch on its GPU, has used so far; ``memory`` in place of the
                     former where only ``ru_maxrss`` is known, as in earlier versions
of rates             ``time``, ``iteration``, and the learning ``rates`` that it has used, by
                     optimizer and group, if the ledger does not say so: a list; ``"before"`` if
                     from it on those that an iteration has used are in the line before its own, as
                     with a scheduler that steps after each update; ``"own"`` if they are in its
                     own again; ``"unknown"`` after too many changes
of a validation      ``time``, ``iteration``, ``scores``, ``improved`` if they have, the ``best``
                     validation so far; null if there is none; ``unscored``: names of scores that
                     comparisons of runs leave out, if there are any; ``step``: the optimizer steps
                     made by then
===================  =======================================================================

A stretch takes at least a second and a 100th of the time since the start, so the file stays
small. Iterations that are repeated after a kill occur twice; readers take the last.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from helios.best import BestValidation
from helios.ledger.run_file import AppendOnlyLog, host, now, read_event_file
from helios.protocols import Clock

FILE_NAME = "timing.jsonl"
_SECONDS, _SHARE = 1.0, 100
OWN, BEFORE, UNKNOWN = "own", "before", "unknown"
_MOST_CHANGES = 1_000


@final
class Timing:
    """Writes the times of one start; closed until :meth:`begin` is called.

    A failure is logged once, and stops nothing.

    Args:
        folder: the run's folder.
        processes: the number of processes.
        run: hash of the run's definition.
        unscored: names of scores that comparisons of runs leave out.
        clock: returns seconds.
        find_memory: returns the most memory in bytes that was used so far, by the names above.
    """

    def __init__(
        self,
        folder: Path,
        *,
        processes: int,
        run: str,
        unscored: Collection[str] = (),
        clock: Clock = time.perf_counter,
        find_memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._file = AppendOnlyLog(folder / FILE_NAME)
        self._processes = processes
        self._run = run
        self._unscored = unscored
        self._clock = clock
        self._find_memory = find_memory
        self._is_open = False
        self._begin = 0.0
        # Iteration and time of the last line, and of the last iteration that is known.
        self._written = self._newest = (0, 0.0)
        self._due = 0.0
        self._paused = 0.0
        # Where the rates are that an iteration has used; None for a list of its own.
        self._source: str | None = OWN
        self._num_changes = 0

    def begin(self, iteration: int) -> None:
        """Write the line of a start.

        Args:
            iteration: the last one before it.
        """
        self._is_open = True
        self._begin = self._clock()
        self._written = self._newest = (iteration, self._begin)
        self._due = self._begin + _SECONDS
        self._paused = 0.0
        self._source, self._num_changes = OWN, 0
        start = {"host": host(), "processes": self._processes, "run": self._run}
        self._file.append({"time": now(), "iteration": iteration, **start})

    def note(self, iteration: int) -> None:
        """Note that an iteration has ended; writes a line if enough time has passed."""
        if not self._is_open:
            return
        moment = self._clock()
        self._newest = (iteration, moment)
        if moment >= self._due:
            self._write()

    def trace_rates(
        self,
        iteration: int,
        used: Sequence[Any] | None,
        ends: Sequence[Any],
        *,
        before: Sequence[Any] | None,
    ) -> bool:
        """Note the learning rates of an iteration; writes a line where their source changes.

        Args:
            iteration: its number.
            used: those that its updates have used; ``None`` if they cannot be read in time.
            ends: those at its end, as the ledger has them.
            before: those at the end of the iteration before; ``None`` if this start had none.

        Returns:
            Whether the source is the iteration's own line, so that iterations whose rates are those
            at their end need not be noted.
        """
        source = self._source
        is_known = (source == OWN and used == ends) or (source == BEFORE and used == before)
        if not is_known and source != UNKNOWN and self._is_open:
            self._num_changes += 1
            if used is None or self._num_changes > _MOST_CHANGES:
                self._source = UNKNOWN
            else:
                self._source = OWN if used == ends else BEFORE if used == before else None
            rates = used if self._source is None else self._source
            self._file.append({"time": now(), "iteration": iteration, "rates": rates})
        return self._source == OWN

    def end_pause(self) -> None:
        """Note that no iteration has used the time since the last one: it was paused."""
        iteration, before = self._newest
        self._newest = (iteration, self._clock())
        self._paused += self._newest[1] - before

    def add_scores(
        self,
        iteration: int,
        scores: Mapping[str, float],
        *,
        step: int,
        has_improved: bool,
        best: BestValidation | None,
        by_hand: Mapping[str, int],
    ) -> None:
        """Write the scores of a validation; without any nothing is written."""
        if not self._is_open or not scores:
            return
        # JSON has neither infinities nor NaN.
        plain = {name: x if math.isfinite(x) else repr(x) for name, x in scores.items()}
        line: dict[str, Any] = {"time": now(), "iteration": iteration, "step": step}
        line |= {"scores": plain}
        line |= {"improved": True} if has_improved else {}
        unscored = [name for name in scores if name in self._unscored]
        line |= {"unscored": unscored} if unscored else {}
        line |= {"by_hand": dict(by_hand)} if by_hand else {}
        self._file.append(line | {"best": None if best is None else best.as_plain()})

    def close(self) -> None:
        """Write the line of the last stretch, or of a validation after it."""
        if self._is_open and self._newest != self._written:
            self._write()
        self._is_open = False

    def _write(self) -> None:
        iteration, moment = self._newest
        line = {
            "time": now(),
            "iteration": iteration,
            "iterations": iteration - self._written[0],
            "seconds": round(moment - self._written[1], 3),
        }
        if self._paused:
            line["paused"] = round(self._paused, 3)
        self._written, self._paused = self._newest, 0.0
        self._due = moment + max(_SECONDS, (moment - self._begin) / _SHARE)
        self._file.append({**line, **self._find_memory()})


@dataclass
class Stretches:
    """The times and scores of a run.

    Attributes:
        starts: the line of each start of the run, also of those that were killed before their first
            checkpoint.
        lines: the stretches, each iteration once, in the order of iterations.
        scores: the lines of the validations, likewise.
        rates: the lines of learning rates, likewise; those of a start begin with ``"own"``.
        seconds: the time of all stretches of these starts, also of those that were repeated.
    """

    starts: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def read_timing(folder: Path) -> Stretches:
    """Return the times and scores of a run; empty if it has no such file.

    Raises:
        LedgerError: if the file cannot be read.
    """
    found = Stretches()
    for line in read_event_file(folder / FILE_NAME, "time", "iteration"):
        # A line that somebody has edited is left out.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            _add(found, line)
    return found


def _add(found: Stretches, line: dict[str, Any]) -> None:
    if "processes" in line:
        _begin(found, line)
    elif "scores" in line:
        numbers = {name: float(score) for name, score in line["scores"].items()}
        found.scores.append(line | {"scores": numbers})
    elif "rates" in line:
        found.rates.append(line)
    else:
        found.seconds += line["seconds"]
        found.lines.append(line)


def _begin(found: Stretches, start: dict[str, Any]) -> None:
    iteration, run = start["iteration"], start.get("run")
    known = [each["run"] for each in found.starts if "run" in each]
    if iteration == 0 and run is not None and known and known[-1] != run:
        # Another run in the same folder.
        found.starts.clear()
        found.seconds = 0.0
    found.starts.append(start)
    found.rates = [each for each in found.rates if each["iteration"] <= iteration]
    found.rates.append({"iteration": iteration + 1, "rates": OWN if run is not None else UNKNOWN})
    found.scores = [each for each in found.scores if each["iteration"] <= iteration]
    found.lines = [each for each in found.lines if each["iteration"] <= iteration]
