"""A replay: a part of a run is trained again, and its lines are compared with the run's ledger.

It is the training that a resume from the checkpoint would be, except that nothing is written: no
checkpoint, no log, no ledger. It ends like an interrupted training, or where the run has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from helios.checkpoint import loading
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import Level
from helios.core.text import with_step
from helios.data.source import Source
from helios.errors import UsageError
from helios.ledger.differences import LedgerFollower, Replay
from helios.session import Session
from helios.startup.fit_run import FitRun
from helios.startup.processes import Plan, on_each, on_first
from helios.startup.replay_start import Stretch, require_restart
from helios.startup.reproducibility_level import Reproducibility
from helios.startup.resume_point import Start
from helios.startup.rewinding import join_rewinds
from helios.startup.run_evidence import RunEvidence, RunLedger, hash_definition, make_writer
from helios.startup.trainer_call import Call

_PROCESSES = "another number of processes than the run had, which the level 'restart' forbids"
_ENOUGH = "the replay has compared what it was asked to"


class ReplayRun(FitRun):
    """One replay; see ``Run`` for the arguments."""

    verb = "Replay"

    def __init__(self, call: Call, plan: Plan, device: torch.device) -> None:
        super().__init__(call, plan, device)
        assert call.replay is not None
        self._stretch: Stretch = call.replay
        self._follower: LedgerFollower | None = None
        self._is_elastic = False

    def _run(self, stack: ExitStack) -> Replay:
        self._prepare_data()
        # If the run trains meanwhile, processes may have seen different checkpoints.
        self._stretch = on_first(self.replicas, lambda: self._stretch)
        on_each(self.replicas, self._load_start)
        self._params = self._compare_params(is_finished=False)
        self._train(stack)
        return on_first(self.replicas, self._conclude)

    def _load_start(self) -> None:
        path = self._stretch.checkpoint
        loaded = None if path is None else loading.load(path, self._safe_types(), maps=True)
        # A branch that has saved nothing yet has the rewinds of its origin.
        stored = [] if loaded is None else loaded.record.rewinds
        rewinds = join_rewinds(stored, self._stretch.rewinds)
        self._start = Start(loaded=loaded, is_branch=True, rewinds=rewinds)

    def _safe_types(self) -> list[Any]:
        return self.model.types_for_safe_load()

    def _open_logs(self, record: Record | None) -> None:
        """Open none: those of the run must stay as they are."""

    def _find_known(self, record: Record | None) -> Record | None:
        """Return a record of the run, also where the replay begins with it."""
        witness = self._stretch.witness
        if record is not None or witness is None:
            return record
        return loading.load(witness, self._safe_types(), maps=True).record

    def _make_evidence(
        self, source: Source, identity: dict[str, Any], reproducibility: Reproducibility
    ) -> RunEvidence | None:
        self._require_level(reproducibility)
        stretch = self._stretch
        run = hash_definition(identity, self.replicas)
        if self.replicas.rank == 0:
            found = Replay(stretch.ledger, stretch.checkpoint, stretch.stop)
            found.begins_after = found.num_equal = stretch.after
            self._follower = LedgerFollower(
                found, meets_end=stretch.meets_end, run=run, unscored=self.model.unscored
            )
        every = None if self._follower is None else self._follower.every
        every, *_ = self.replicas.gather_objects(every)
        writer = make_writer(self._follower, self.model, self.replicas, stretch.kind, every=every)
        ledger = RunLedger(run, writer, None, None, after=stretch.after)
        count = self.replicas.num_processes
        return RunEvidence(ledger, follower=self._follower, processes=count)

    def _require_level(self, reproducibility: Reproducibility) -> None:
        level = reproducibility.level
        if reproducibility.missing:
            level = level.at_most(Level.INCOMPLETE)
        require_restart(level, str(reproducibility))
        self._is_elastic = {level, self._stretch.level} <= {Level.ELASTIC, None}
        record, count = self._record, self.replicas.num_processes
        if record is not None and record.by_rank and len(record.by_rank) != count:
            raise UsageError(
                f"A replay of this run needs {len(record.by_rank)} processes, as it had at "
                f"{self._stretch.checkpoint}, where each has a state of its own, but there are "
                f"{count}. Pass Trainer(nproc={len(record.by_rank)}). At the level 'elastic', any "
                "number would do."
            )

    def _build(self) -> Session:
        session = super()._build()
        session.moment.is_replay = True
        return session

    def _make_outside(self) -> Callable[[], str]:
        return self._ask_outside

    def _ask_outside(self) -> str:
        session, stretch, follower = self.session, self._stretch, self._follower
        is_done = session is not None and session.state.global_iteration >= stretch.stop
        if is_done and not stretch.meets_end:
            return _ENOUGH
        self._compare(is_over=False)
        return _ENOUGH if follower is not None and follower.is_over else ""

    def _compare(self, *, is_over: bool) -> None:
        if self._evidence is not None:
            self._evidence.ledger.settle()
        if self._follower is not None:
            self._follower.compare_scores(is_over=is_over)

    def _conclude(self) -> Replay:
        """Return the result, on rank 0.

        Raises:
            LedgerError: if the ledger cannot be used.
            UsageError: if something else has interrupted the replay.
        """
        follower = self._follower
        assert follower is not None
        assert self.session is not None
        self._compare(is_over=True)
        found = follower.found
        if follower.failure is not None:
            raise follower.failure
        if found.iteration is None and not follower.is_complete:
            place = with_step(found.num_equal, found.steps.get("num_equal"))
            raise UsageError(
                f"The replay was interrupted after iteration {place}, before iteration "
                f"{found.stop}: {self.session.requests.interruption}. Up to there, all lines are "
                "equal. Replay without what interrupts it, or pass an earlier stop."
            )
        is_spread = self.replicas.num_replicas > 1 and not self._is_elastic
        if found.iteration is not None and is_spread:
            found.causes.append(_PROCESSES)
        return found

    def _describe_rescue(self) -> str:
        return ""
