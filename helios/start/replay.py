"""A replay: a part of a run is trained again, and its lines are compared with the run's ledger.

It is the training that a resume from the checkpoint would be, except that nothing is written,
renamed or locked, as the run may be training in the same folder. It ends like an interrupted
training, or where the run has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from helios.checkpoint import file_names, loading
from helios.checkpoint.record import Record
from helios.counters import Phase
from helios.errors import ArgumentError, CheckpointError, LedgerError, UsageError
from helios.findings import Level, level_of
from helios.ledger.book import FILE_NAME, parse_header, read_lines
from helios.ledger.compare import LedgerFollower, Replay
from helios.ledger.line import step_of
from helios.ledger.writer import LedgerWriter
from helios.listeners import Recorder
from helios.start.changes import Declared
from helios.start.fit import train
from helios.start.level import Reproducibility
from helios.start.origin import Origin, load_given, open_folder
from helios.start.run import Run
from helios.start.signals import Signals
from helios.start.training import set_up_training
from helios.start.writers import hash_definition, make_writer
from helios.text import with_step


@dataclass(frozen=True)
class ReplayOptions:
    """The part of a run to repeat; see ``Trainer.replay`` for ``start`` and ``stop``.

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
    """

    ledger: Path
    checkpoint: Path | None
    after: int
    stop: int
    meets_end: bool
    witness: Path | None


class _Extent(NamedTuple):
    """The iterations that a ledger holds: those above ``after``, up to ``last`` with its step."""

    after: int
    last: int
    step: int | None
    has_ended: bool


def find_range(run: Run, asked: ReplayOptions) -> ReplayRange:
    """Find out what a replay repeats.

    Args:
        run: the call.
        asked: the iterations.

    Raises:
        UsageError: if the trainer has no folder, and if the run is below the level ``restart``.
        LedgerError: if the run has no ledger, or one without iterations.
        CheckpointError: if there is no checkpoint to begin with.
        ArgumentError: for iterations that the ledger does not hold.
    """
    folder = open_folder(run.options, run.model.save_name)
    if folder is None:
        raise UsageError(
            "Trainer.replay() compares a part of a run with the run's ledger, which is in "
            "chkpt_root, but this trainer has none. Pass the chkpt_root of the run."
        )
    ledger = folder.path / FILE_NAME
    if not ledger.is_file():
        raise LedgerError(
            f"The run {run.name!r} has no ledger to compare a replay with: there is no {ledger}. "
            'A run with checkpoints writes one, unless Trainer(ledger="off") is set. Pass the '
            "chkpt_root of the run, and the arguments that it was started with."
        )
    extent = _measure(ledger)
    stop = _check(asked, extent, ledger)
    present = [
        path
        for path in file_names.list_checkpoints(folder.path)
        if file_names.belongs_to(path, run.name)
    ]
    origin = run.options.resume_path
    number = file_names.iteration_of
    if origin is not None and number(origin) == extent.after and file_names.is_present(origin):
        # Where the ledger of a branch begins.
        present.append(origin)
    begins: list[tuple[int, Path | None]] = [(0, None)] if extent.after == 0 else []
    begins += sorted(
        (number(each), each) for each in present if extent.after <= number(each) < stop
    )
    after, checkpoint = _choose(begins, asked.start, folder.path)
    # The run may have resumed from any of them.
    for place, path in begins:
        # Loading reports one that cannot be read, if it is the one that is needed.
        sidecar = None if path is None or place < after else loading.try_sidecar(path)
        if path is not None and sidecar is not None and sidecar.level:
            _require_restart(Level(sidecar.level), f"according to {path.name}")
    return ReplayRange(
        ledger=ledger,
        checkpoint=checkpoint,
        after=after,
        stop=stop,
        meets_end=asked.stop is None and extent.has_ended,
        witness=checkpoint or (present[0] if present else None),
    )


def _require_restart(level: Level, source: str) -> None:
    """Refuse a run whose bits are not exact, and say where that is known from."""
    if level.height < Level.RESTART.height:
        raise UsageError(
            "A replay needs the level 'restart' or 'elastic', but the run has the level "
            f"{level.value!r} ({source}): repeating it need not give the same bits, so a "
            "difference would prove nothing. docs/reproducibility.md says what each level needs."
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
        sidecar = loading.try_sidecar(oldest)
        step = None if sidecar is None else sidecar.step
        found = f"the oldest one is of iteration {with_step(number, step)}"
    raise CheckpointError(
        f"A replay must begin at a checkpoint that is older than the lines that it repeats, but "
        f"in {folder}, {found}"
        + ("" if start is None else f", and start is {start}")
        + ". Choose another part of the run, or put the checkpoint back."
    )


_ENOUGH = "the replay has compared what it was asked to"


def find_replay(run: Run, asked: ReplayOptions) -> None:
    """Find what a replay repeats, before anything is done: signals end it, and nothing is saved.

    Raises:
        HeliosError: if there is nothing to repeat, or to compare it with.
    """
    options = run.options
    run.replay = find_range(run, asked)
    run.options = dataclasses.replace(
        options,
        signals=Signals(()),
        nproc=options.nproc if asked.nproc is None else asked.nproc,
        enable_progress_bar=options.enable_progress_bar or asked.has_bars,
        resume="auto" if options.resume == "never" else options.resume,
    )


def replay(run: Run) -> Replay:
    """Repeat a part of a run, and return how its lines compare."""
    run.prepare_data()
    assert run.replay is not None
    # If the run trains meanwhile, processes may have seen different checkpoints.
    part = run.replicas.on_first(lambda: run.replay)
    assert part is not None
    types = run.model.types_for_safe_load()
    loaded, known = None, None
    if part.checkpoint is not None:
        loaded = load_given(part.checkpoint, types, run.replicas)
    elif part.witness is not None:
        # A record of the run, where the replay begins with it.
        known = loading.load(part.witness, types, maps=True).record
    origin = Origin(loaded=loaded, is_branch=True)
    declared = Declared.compare(run, origin, is_finished=False)
    comparison = _Comparison(run, part, origin.record)
    make, ask = comparison.make_recorders, comparison.ask
    train(set_up_training(run, origin, declared, make=make, ask=ask, known=known))
    return run.replicas.on_first(comparison.conclude)


@dataclass
class ReplayRequest:
    """A replay that waits for its call of fit: the first one, or that of a named run.

    Attributes:
        options: what is repeated.
        save_name: the ``save_name`` of the model; ``None`` for the first call of fit.
        skipped: the calls of the trainer that came before, which did nothing.
        result: the result; ``None`` until there is one.
        failure: why there is none, also if the script has caught the error.
        rank: the rank of this process in the replay.
        current: the request that waits in this process; ``None`` outside ``helios replay``.
    """

    options: ReplayOptions
    save_name: str | None = None
    skipped: list[str] = field(default_factory=list)
    result: Replay | None = None
    failure: Exception | None = None
    rank: int = 0
    current: ClassVar[ReplayRequest | None] = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the request wait for its call, for a block."""
        ReplayRequest.current = self
        try:
            yield
        finally:
            ReplayRequest.current = None

    def answer(self, run: Run, perform: Callable[[Run], Any]) -> Any:
        """Replay a call of the script if it is the one to replay; any other one does nothing.

        Args:
            run: the call.
            perform: runs it.

        Raises:
            SystemExit: after the call that is waited for: what follows in the script belongs to a
                training.
        """
        if self.result is not None or self.failure is not None:
            # The script has caught the end of the replay: end it again, and keep the answer.
            raise SystemExit(0)
        is_fit, name = run.phase is Phase.TRAINING, run.model.save_name
        if not is_fit or self.save_name not in (None, name):
            self.skipped.append(f"{'fit' if is_fit else run.phase.value} of {name!r}")
            return [] if run.phase is Phase.PREDICTION else True
        try:
            find_replay(run, self.options)
            self.result = perform(run)
            self.rank = run.info.rank
        except Exception as error:
            self.failure = error
            raise
        raise SystemExit(0)


@final
class _Comparison:
    """Compares what a replay makes with what the run has written.

    Args:
        run: the replay.
        part: what it repeats.
        record: the checkpoint that it begins with; ``None`` for the beginning.
    """

    def __init__(self, run: Run, part: ReplayRange, record: Record | None) -> None:
        self._run = run
        self._range = part
        # How many processes had a state of their own.
        self._num_parts = 0 if record is None else len(record.by_rank)
        self._follower: LedgerFollower | None = None
        self._writer: LedgerWriter | None = None

    def make_recorders(
        self, identity: dict[str, Any], reproducibility: Reproducibility
    ) -> list[Recorder]:
        """Return what follows the ledger instead of writing one."""
        part, replicas, model = self._range, self._run.replicas, self._run.model
        level = level_of(reproducibility.findings, reproducibility.level)
        _require_restart(level, str(reproducibility))
        if self._num_parts not in (0, replicas.num_processes):
            raise UsageError(
                f"A replay of this run needs {self._num_parts} processes, as it had at "
                f"{part.checkpoint}, where each has its own state, but there are "
                f"{replicas.num_processes}. Pass Trainer(nproc={self._num_parts}). At the level "
                "'elastic', any number would do."
            )
        run = hash_definition(identity, replicas)
        if replicas.rank == 0:
            found = Replay(part.ledger, part.checkpoint, part.stop)
            found.begins_after = found.num_equal = part.after
            self._follower = LedgerFollower(found, meets_end=part.meets_end, run=run)
        every = None if self._follower is None else self._follower.every
        every, *_ = replicas.gather_objects(every)
        writer = make_writer(self._follower, model, replicas, every=every)
        self._writer = writer
        return [writer]

    def ask(self) -> str:
        """Return that enough was compared; empty if it was not."""
        parts, part, follower = self._run.parts, self._range, self._follower
        is_done = parts is not None and parts.run.state.global_iteration >= part.stop
        if is_done and not part.meets_end:
            return _ENOUGH
        self._settle()
        return _ENOUGH if follower is not None and follower.is_over else ""

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.settle()

    def conclude(self) -> Replay:
        """Return the result, on rank 0.

        Raises:
            LedgerError: if the ledger cannot be used.
            UsageError: if something else has interrupted the replay.
        """
        follower, parts = self._follower, self._run.parts
        assert follower is not None
        assert parts is not None
        self._settle()
        follower.compare_scores()
        found = follower.found
        if follower.failure is not None:
            raise follower.failure
        if found.iteration is None and not follower.is_complete:
            raise UsageError(
                f"The replay was interrupted after iteration {found.num_equal}, before iteration "
                f"{found.stop}: {parts.run.asked.interruption}. Up to there, all lines are equal. "
                "Replay without the interruption, or pass an earlier stop."
            )
        return found
