"""A replay: a part of a run is trained again, and its lines are compared with the run's ledger.

It is the training that a resume from the checkpoint would be, except that nothing is written: no
checkpoint, no log, no ledger. It ends like an interrupted training, or where the run has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from helios.checkpoint import loading
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import level_of
from helios.counters import Phase
from helios.errors import UsageError
from helios.ledger.compare import LedgerFollower, Replay
from helios.ledger.writer import LedgerWriter
from helios.listeners import Recorder
from helios.replicas.on_all_ranks import on_first
from helios.start.changes import Declared
from helios.start.checkpoint_search import GivenCheckpoint
from helios.start.fit import train
from helios.start.level import Reproducibility
from helios.start.origin import Origin
from helios.start.recorders import hash_definition, make_writer
from helios.start.replay_range import ReplayOptions, ReplayRange, find_range, require_restart
from helios.start.run import Run
from helios.start.signals import Signals
from helios.start.training import set_up_training

_ENOUGH = "the replay has compared what it was asked to"


def find_replay(run: Run, asked: ReplayOptions) -> None:
    """Find what a replay repeats, before anything is done: signals end it, and nothing is saved.

    Raises:
        HeliosError: if there is nothing to repeat, or to compare it with.
    """
    options = run.options
    run.replay = find_range(options, run.model.save_name, asked, run_name=run.name)
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
    part = on_first(run.replicas, lambda: run.replay)
    assert part is not None
    types = run.model.types_for_safe_load()
    loaded, known = None, None
    if part.checkpoint is not None:
        loaded, _ = GivenCheckpoint(part.checkpoint, types, run.replicas).run()
    elif part.witness is not None:
        # A record of the run, where the replay begins with it.
        known = loading.load(part.witness, types, maps=True).record
    origin = Origin(loaded=loaded, is_branch=True)
    declared = Declared.compare(run, origin, is_finished=False)
    comparison = _Comparison(run, part, origin.record)
    make, ask = comparison.make_recorders, comparison.ask
    train(set_up_training(run, origin, declared, make=make, ask=ask, known=known))
    return on_first(run.replicas, comparison.conclude)


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
        self._require_level(reproducibility)
        part, replicas, model = self._range, self._run.replicas, self._run.model
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

    def _require_level(self, reproducibility: Reproducibility) -> None:
        level = level_of(reproducibility.findings, reproducibility.level)
        require_restart(level, str(reproducibility))
        parts, count = self._num_parts, self._run.replicas.num_processes
        if parts not in (0, count):
            raise UsageError(
                f"A replay of this run needs {parts} processes, as it had at "
                f"{self._range.checkpoint}, where each has a state of its own, but there are "
                f"{count}. Pass Trainer(nproc={parts}). At the level 'elastic', any "
                "number would do."
            )

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
                f"{found.stop}: {parts.run.asked.interruption}. Up to there, all lines are "
                "equal. Replay without what interrupts it, or pass an earlier stop."
            )
        return found
