"""Boundaries: what may follow a step or an epoch, in a fixed order.

A resume continues after the safe point, with exactly the events that follow it in a run without
interruptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import helios.schedule as due
from helios.best import Validation
from helios.checkpoint.capture import capture
from helios.core.loss_means import Viewer, as_numbers
from helios.counters import Phase
from helios.findings import FindingKind
from helios.listeners import Validated
from helios.run_parts import RunParts
from helios.run_state import Place
from helios.state.steps import check_alike

Validate: TypeAlias = Callable[[], bool]


@dataclass(frozen=True)
class BoundaryRules:
    """The rules of a kind of boundary, at which a run may validate, save and end.

    Attributes:
        agrees: whether all processes first exchange requests. At the end of an epoch they have
            done so at its last step, and do so again after its last event.
        validates: whether a validation may be due.
        is_counted: whether ``total_steps`` and the frequencies count it.
        polls_late: whether a stop poll always follows the safe point, or only after a validation.
    """

    agrees: bool = True
    validates: bool = False
    is_counted: bool = False
    polls_late: bool = False


STEP = BoundaryRules(validates=True, is_counted=True)
"""End of a window, if steps are counted."""
WINDOW = BoundaryRules()
"""End of a window inside an epoch, if epochs are counted."""
EPOCH = BoundaryRules(agrees=False, validates=True, is_counted=True, polls_late=True)
"""End of an epoch, if epochs are counted."""
CUT = BoundaryRules(agrees=False)
"""End of an epoch that a hook has ended early, after the end of a window; steps are counted."""


@final
class Boundary:
    """Runs what follows a step or an epoch.

    Args:
        parts: the objects of the run.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._run = parts.run
        self._schedule = parts.schedule
        self._settle = parts.agreement.settle
        self._next_due = 0.0
        self._has_step_limit = parts.schedule.max_steps is not None

    def follow(
        self, kind: BoundaryRules, validate: Validate, end_epoch: Callable[[], None] | None = None
    ) -> bool:
        """Do what follows a step or an epoch; returns whether the run ends here.

        Args:
            kind: the kind of boundary.
            validate: runs a validation; returns whether there is data for one.
            end_epoch: advances the counters after the validation at the end of an epoch.
        """
        run = self._run
        run.place = Place.BOUNDARY
        if kind.agrees and not self._settle(ends_window=True):
            is_quiet = not kind.is_counted or run.state.current_iteration < self._next_due
            # Inside an epoch, nothing else ends a run that nobody asks to end.
            has_limit = self._has_step_limit and due.is_out_of_steps(self._schedule, run.state)
            if is_quiet and not has_limit:
                return False
        # At the end of a run by steps, nothing is validated or saved just because it is due.
        is_open = kind is EPOCH or not run.is_stopping
        has_validated = kind.validates and is_open and self.validate_if_due(validate)
        if end_epoch is not None:
            end_epoch()
        elif has_validated:
            self._settle()
        self.check_limits()
        if kind.is_counted:
            self._next_due = due.find_next(self._schedule, run.state)
        is_due = kind.is_counted and is_open and due.is_save_due(self._schedule, run.state)
        is_due |= has_validated and self._schedule.saves_validated
        self._pass_safe_point(is_due=is_due)
        return self._leave(kind, has_validated=has_validated)

    def resume(self, kind: BoundaryRules) -> bool:
        """Continue after the safe point of the checkpoint; returns as :meth:`follow` does."""
        is_open = kind is EPOCH or not self._run.is_stopping
        has_validated = (
            kind.validates
            and is_open
            and Phase.VALIDATION in self._parts.sources
            and due.is_validation_due(self._schedule, self._run.state)
        )
        self.check_limits()
        return self._leave(kind, has_validated=has_validated)

    def poll(self) -> None:
        """Ask plugins and model whether training should stop."""
        if self._parts.hooks.ask("should_training_stop"):
            self._parts.context.request_stop("should_training_stop returned True")

    def check_limits(self) -> None:
        """Request the end of the run if the options say so."""
        limit = self._find_limit()
        if limit:
            self._run.stop(limit)

    def _find_limit(self) -> str:
        return due.find_limit(self._schedule, self._run.state, self._run.cursor)

    def validate_if_due(self, validate: Validate) -> bool:
        """Run a validation if one is due, and count it; returns whether it took place."""
        parts, run = self._parts, self._run
        if not due.is_validation_due(self._schedule, run.state) or not validate():
            return False
        scores = parts.model.metrics
        if parts.schedulers is not None and not run.is_manual:
            parts.schedulers.after_validation(scores)
        parts.context.log({f"valid/{name}": score for name, score in as_numbers(scores).items()})
        run.state.end_validation()
        run.state.record_improvement(has_improved=self._judge_scores())
        return True

    def _judge_scores(self) -> bool:
        """Judge the validation that has ended, whether it is one of the best, and tell listeners.

        The scores of rank 0 decide in all processes. One of the best is saved at the safe point of
        the same boundary, if the rule says so.

        Returns:
            Whether ``have_metrics_improved`` returned True in any process.
        """
        parts, run, state = self._parts, self._run, self._run.state
        replicas, scores = parts.replicas, as_numbers(parts.model.metrics)
        judgements = replicas.gather_objects((bool(parts.model.have_metrics_improved()), scores))
        has_improved = any(improved for improved, _ in judgements)
        losses = parts.loss_means.pop_means(Viewer.VALIDATION, replicas.gather_by_replica)
        validation = Validation(state.global_iteration, judgements[0][1], state.global_step)
        is_among = run.best.judge(validation, has_improved=has_improved)
        if is_among and run.best.rule is not None and run.best.rule.saves:
            run.agreed.is_checkpoint_wanted = True
        validated = Validated(
            validation.scores,
            state,
            has_improved=has_improved,
            best=run.best.best,
            losses=losses,
        )
        for listener in parts.run_listeners:
            listener.validated(validated)
        return has_improved

    def _pass_safe_point(self, *, is_due: bool) -> None:
        """Write a checkpoint if one is due, requested or final."""
        run = self._run
        if run.is_stopping and not self._find_limit():
            run.cursor.stop(run.agreed.stop_reason)
        is_wanted = is_due or run.agreed.is_checkpoint_wanted or run.is_leaving
        run.agreed.is_checkpoint_wanted = False
        if is_wanted and self._parts.can_save:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint of this safe point, if it is not written yet."""
        parts, run, writer = self._parts, self._run, self._parts.writer
        # If a poll after the save ends the run, the checkpoint exists already.
        if writer is None or writer.has(run.state):
            return
        run.place = Place.SAVE
        parts.loss_means.report_nonfinite()
        parts.idle_watch.conclude(run.state.global_iteration, is_manual=run.is_manual)
        check_weights(parts)
        if run.is_leaving:
            parts.note_last_safe_point()
        record = capture(parts)
        parts.check_record(record)
        snapshot = record.snapshot()
        parts.hooks.emit("on_save_checkpoint", snapshot)
        writer.save(snapshot)

    def _leave(self, kind: BoundaryRules, *, has_validated: bool) -> bool:
        """Do what follows a safe point: the last poll, and the end if one is due."""
        run = self._run
        if has_validated or kind.polls_late:
            before = (run.is_stopping, run.is_leaving)
            self.poll()
            self._settle()
            if (run.is_stopping, run.is_leaving) != before:
                self._pass_safe_point(is_due=False)
        return run.is_leaving


def check_weights(parts: RunParts) -> None:
    """Check that all processes have the same weights; raises ``UsageError`` if they differ."""
    ignored = parts.findings.names(FindingKind.UNSHARED)
    parts.replicas.compare(partial(check_alike, parts.model.discovery, ignored=ignored))
