"""A replay: a part of a run is trained again, and its lines are compared with the run's ledger.

It is the training that a resume from the checkpoint would be, except that nothing is written: no
checkpoint, no log, no ledger. It ends like an interrupted training, or where the run has ended.
"""

from __future__ import annotations

from typing import Any, final

from helios.checkpoint import loading
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import level_of
from helios.errors import UsageError
from helios.ledger.compare import LedgerFollower, Replay
from helios.ledger.writer import LedgerWriter
from helios.listeners import Recorder
from helios.replicas.on_all_ranks import on_first
from helios.startup.checkpoint_search import GivenCheckpoint
from helios.startup.fit_run import Training
from helios.startup.recorders import hash_definition, make_writer
from helios.startup.replay_range import ReplayRange, require_restart
from helios.startup.reproducibility_level import Reproducibility
from helios.startup.resume_point import Start
from helios.startup.run_setup import Run
from helios.text import with_step

_ENOUGH = "the replay has compared what it was asked to"


def replay(run: Run) -> Replay:
    """Repeat a part of a run, and return how its lines compare."""
    run.prepare_data()
    assert run.call.replay is not None
    # If the run trains meanwhile, processes may have seen different checkpoints.
    part = on_first(run.replicas, lambda: run.call.replay)
    assert part is not None
    types = run.model.types_for_safe_load()
    start = _load_start(run, part, types)
    comparison = _Comparison(run, part, start)
    make = comparison.make_recorders
    training = Training(run, start, make_recorders=make, outside=comparison.ask)
    training.compare_params(is_finished=False)
    training.train(known=None if start.loaded else _load_witness(part, types))
    return on_first(run.replicas, comparison.conclude)


def _load_start(run: Run, part: ReplayRange, types: list[Any]) -> Start:
    path, loaded = part.checkpoint, None
    if path is not None:
        loaded, _ = GivenCheckpoint(path, types, run.replicas).run()
    return Start(loaded=loaded, is_branch=True)


def _load_witness(part: ReplayRange, types: list[Any]) -> Record | None:
    """Return a record of the run where the replay begins with it."""
    witness = part.witness
    return None if witness is None else loading.load(witness, types, maps=True).record


@final
class _Comparison:
    """Compares what a replay makes with what the run has written.

    Args:
        run: the replay.
        part: what it repeats.
        start: where it starts.
    """

    def __init__(self, run: Run, part: ReplayRange, start: Start) -> None:
        self._run = run
        self._range = part
        self._record = None if start.loaded is None else start.loaded.record
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
        record, count = self._record, self._run.replicas.num_processes
        if record is not None and record.by_rank and len(record.by_rank) != count:
            raise UsageError(
                f"A replay of this run needs {len(record.by_rank)} processes, as it had at "
                f"{self._range.checkpoint}, where each has a state of its own, but there are "
                f"{count}. Pass Trainer(nproc={len(record.by_rank)}). At the level 'elastic', any "
                "number would do."
            )

    def ask(self) -> str:
        """Return that enough was compared; empty if it was not."""
        session, part, follower = self._run.session, self._range, self._follower
        is_done = session is not None and session.state.global_iteration >= part.stop
        if is_done and not part.meets_end:
            return _ENOUGH
        self._compare(is_over=False)
        return _ENOUGH if follower is not None and follower.is_over else ""

    def _compare(self, *, is_over: bool) -> None:
        if self._writer is not None:
            self._writer.settle()
        if self._follower is not None:
            self._follower.compare_scores(is_over=is_over)

    def conclude(self) -> Replay:
        """Return the result, on rank 0.

        Raises:
            LedgerError: if the ledger cannot be used.
            UsageError: if something else has interrupted the replay.
        """
        follower, session = self._follower, self._run.session
        assert follower is not None
        assert session is not None
        self._compare(is_over=True)
        found = follower.found
        if follower.failure is not None:
            raise follower.failure
        if found.iteration is None and not follower.is_complete:
            place = with_step(found.num_equal, found.steps.get("num_equal"))
            raise UsageError(
                f"The replay was interrupted after iteration {place}, before iteration "
                f"{found.stop}: {session.agreement.asked.interruption}. Up to there, all lines are "
                "equal. Replay without what interrupts it, or pass an earlier stop."
            )
        return found
