"""Finds the checkpoint that a replay begins with, and the lines that it is compared with.

Nothing is written, renamed or locked: the run may be training in the same folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helios.checkpoint import file_names, loading
from helios.checkpoint.reproducibility import Level
from helios.errors import ArgumentError, CheckpointError, LedgerError, UsageError
from helios.ledger.book import FILE_NAME, parse_header, read_lines
from helios.ledger.line import step_of
from helios.start.checkpoint_search import open_folder
from helios.start.options import Options
from helios.text import with_step


@dataclass(frozen=True)
class ReplayOptions:
    """Which part of a run is repeated; see ``Trainer.replay`` for ``start`` and ``stop``.

    Attributes:
        start: the iteration at or before which the replay begins.
        stop: the last iteration to compare.
        nproc: takes the place of ``Trainer(nproc=...)``; ``None`` for the trainer's own.
        has_bars: whether to show bars on a terminal also where the trainer shows none.
    """

    start: int | None = None
    stop: int | None = None
    nproc: int | None = None
    has_bars: bool = False

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("stop", 1), ("nproc", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                rule = f"None or an int of at least {least}"
                raise replay_argument_error(name, rule, value, "Omit it for the default.")
        if self.start is not None and self.stop is not None and self.stop <= self.start:
            rule = f"above start={self.start}"
            raise replay_argument_error("stop", rule, self.stop, "Pass a later iteration.")


def replay_argument_error(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    """Return the error for an argument of a replay: name, rule, value and remedy."""
    return ArgumentError(f"Trainer.replay({name}=...) must be {rule}, got {value!r}. {remedy}")


@dataclass(frozen=True)
class ReplayRange:
    """The part of a run that a replay repeats.

    Attributes:
        ledger: the ledger of the run.
        checkpoint: the checkpoint that is loaded; ``None`` to begin with the run.
        after: the iteration of that checkpoint; 0 for the beginning.
        stop: the last iteration to compare.
        meets_end: whether the replay must end by itself where the run has ended.
        witness: a checkpoint that knows how the run began; ``None`` without one.
        level: the lowest level that a checkpoint of this part states; ``None`` if unknown.
    """

    ledger: Path
    checkpoint: Path | None
    after: int
    stop: int
    meets_end: bool
    witness: Path | None
    level: Level | None


@dataclass(frozen=True)
class _Extent:
    """The iterations that a ledger holds: those above ``after``, up to ``last`` with its step."""

    after: int
    last: int
    step: int | None
    has_ended: bool


def find_range(
    options: Options, save_name: str, asked: ReplayOptions, *, run_name: str
) -> ReplayRange:
    """Find out what a replay repeats.

    Args:
        options: where the run's folder is.
        save_name: name of that folder.
        asked: the iterations.
        run_name: name of the run, which its checkpoints have.

    Raises:
        UsageError: if the trainer has no folder, and if the run is below the level ``restart``.
        LedgerError: if the run has no ledger, or one without iterations.
        CheckpointError: if there is no checkpoint to begin with.
        ArgumentError: for iterations that the ledger does not hold.
    """
    folder = open_folder(options, save_name)
    if folder is None:
        raise UsageError(
            "Trainer.replay() compares a part of a run with the run's ledger, which is in "
            "chkpt_root, but this trainer has none. Pass the chkpt_root of the run."
        )
    ledger = folder.path / FILE_NAME
    if not ledger.is_file():
        raise LedgerError(
            f"The run {run_name!r} has no ledger to compare a replay with: there is no {ledger}. "
            'A run with checkpoints writes one, unless Trainer(ledger="off") is set. Pass the '
            "chkpt_root of the run, and the arguments that it was started with."
        )
    extent = _measure(ledger)
    stop = _check(asked, extent, ledger)
    present = [
        path
        for path in file_names.list_checkpoints(folder.path)
        if file_names.belongs_to(path, run_name)
    ]
    origin = options.resume_path
    number = file_names.iteration_of
    if origin is not None and number(origin) == extent.after and file_names.is_present(origin):
        # Where the ledger of a branch begins.
        present.append(origin)
    begins: list[tuple[int, Path | None]] = [(0, None)] if extent.after == 0 else []
    begins += sorted(
        (number(each), each) for each in present if extent.after <= number(each) < stop
    )
    after, checkpoint = _choose(begins, asked.start, folder.path)
    level = _require_level([path for place, path in begins if path is not None and place >= after])
    return ReplayRange(
        ledger=ledger,
        checkpoint=checkpoint,
        after=after,
        stop=stop,
        meets_end=asked.stop is None and extent.has_ended,
        witness=checkpoint or (present[0] if present else None),
        level=level,
    )


def _measure(path: Path) -> _Extent:
    lines = read_lines(path)
    header = parse_header(next(lines, b""), path)
    after: int = header["after"]
    last, step, has_ended = after, None, False
    for line in lines:
        # The last line may be incomplete while the run is training.
        is_end = b',"end":1' in line
        has_ended |= is_end
        if line.endswith(b"\n") and not is_end:
            last, step = last + 1, step_of(line)
    if last == after:
        raise LedgerError(f"The ledger {path} holds no iteration yet. Train first.")
    return _Extent(after, last, step, has_ended)


def _check(asked: ReplayOptions, extent: _Extent, path: Path) -> int:
    """Return the last iteration to compare."""
    rule = f"an iteration of the ledger {path}, which holds {extent.after + 1} to "
    rule += with_step(extent.last, extent.step)
    if asked.start is not None and asked.start >= extent.last:
        raise replay_argument_error(
            "start",
            f"below {with_step(extent.last, extent.step)}, the end of {path}",
            asked.start,
            "Lower it.",
        )
    if asked.stop is None:
        return extent.last
    if not extent.after < asked.stop <= extent.last:
        raise replay_argument_error("stop", rule, asked.stop, "Omit it to replay up to the end.")
    return asked.stop


def _choose(
    begins: Sequence[tuple[int, Path | None]], start: int | None, folder: Path
) -> tuple[int, Path | None]:
    """Return where a replay begins: by default, at the oldest checkpoint."""
    saved = [(number, path) for number, path in begins if path is not None]
    suitable: Sequence[tuple[int, Path | None]]
    if start is None:
        suitable = saved[:1] or begins[:1]
    else:
        suitable = [each for each in begins if each[0] <= start][-1:]
    if suitable:
        return suitable[0]
    found = "there is none"
    if saved:
        number, oldest = saved[0]
        found = f"the oldest one is of iteration {with_step(number, loading.read_step(oldest))}"
    raise CheckpointError(
        f"A replay must begin at a checkpoint that is older than the lines that it repeats, but "
        f"in {folder}, {found}"
        + ("" if start is None else f", and start is {start}")
        + ". Choose another part of the run, or put the checkpoint back."
    )


def _require_level(paths: Sequence[Path]) -> Level | None:
    """Return the lowest level of some checkpoints, from any of which the run may have resumed.

    Raises:
        UsageError: if it is too low.
    """
    found = [(level, path) for path in paths if (level := _read_level(path)) is not None]
    if not found:
        return None
    level, path = min(found, key=lambda each: each[0].height)
    require_restart(level, f"according to {path.name}")
    return level


def _read_level(path: Path) -> Level | None:
    try:
        sidecar = loading.read_sidecar(path)
    except (CheckpointError, OSError):
        # Loading the checkpoint reports it, if it is the one that is needed.
        return None
    known = {level.value: level for level in Level}
    return None if sidecar is None else known.get(sidecar.level)


def require_restart(level: Level, source: str) -> None:
    """Refuse a run whose bits are not exact.

    Args:
        level: the level of the run.
        source: where that is known from, or why it is so.

    Raises:
        UsageError: below the level ``restart``.
    """
    if level.height < Level.RESTART.height:
        raise UsageError(
            f"A replay needs the level 'restart' or 'elastic', but the run has the level "
            f"{level.value!r} ({source}): repeating it need not give the same bits, so a "
            "difference would prove nothing. docs/reproducibility.md says what each level needs."
        )
