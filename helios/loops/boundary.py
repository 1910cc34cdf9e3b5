"""Boundaries: what may follow a step or an epoch, in a fixed order.

A resume continues after the safe point, with exactly the events that follow it in a run without
interruptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import helios.schedule as due
from helios.counters import Phase
from helios.session import Place, Session

Validate: TypeAlias = Callable[[], bool]


@dataclass(frozen=True)
class BoundaryRules:
    """What happens at a kind of boundary, at which a run may validate, save and end.

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
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_due = 0.0

    def follow(
        self, kind: BoundaryRules, validate: Validate, end_epoch: Callable[[], None] | None = None
    ) -> bool:
        """Do what follows a step or an epoch; returns whether the run ends here.

        Args:
            kind: the kind of boundary.
            validate: runs a validation; returns whether there is data for one.
            end_epoch: advances the counters after the validation at the end of an epoch.
        """
        session, schedule, state = self._session, self._session.schedule, self._session.state
        session.place = Place.BOUNDARY
        if kind.agrees and not session.agree(ends_window=True):
            is_quiet = not kind.is_counted or state.current_iteration < self._next_due
            if is_quiet:
                return False
        # At the end of a run by steps, nothing is validated or saved just because it is due.
        is_open = kind is EPOCH or not session.is_stopping
        has_validated = kind.validates and is_open and self.validate_if_due(validate)
        if end_epoch is not None:
            end_epoch()
        elif has_validated:
            session.agree()
        if kind.is_counted:
            self.check_limits()
            self._next_due = due.find_next(schedule, state)
        is_due = kind.is_counted and is_open and due.is_save_due(schedule, state)
        self._pass_safe_point(is_due=is_due)
        return self._leave(kind, has_validated=has_validated)

    def resume(self, kind: BoundaryRules) -> bool:
        """Continue after the safe point of the checkpoint; returns as :meth:`follow` does."""
        session = self._session
        is_open = kind is EPOCH or not session.is_stopping
        has_validated = (
            kind.validates
            and is_open
            and Phase.VALIDATION in session.sources
            and due.is_validation_due(session.schedule, session.state)
        )
        self.check_limits()
        return self._leave(kind, has_validated=has_validated)

    def poll(self) -> None:
        """Ask plugins and model whether training should stop."""
        if self._session.hooks.ask("should_training_stop"):
            self._session.context.request_stop("should_training_stop returned True")

    def check_limits(self) -> None:
        """Request the end of the run if the options say so."""
        session = self._session
        limit = due.find_limit(session.schedule, session.state, session.cursor)
        if limit:
            session.stop(limit)

    def validate_if_due(self, validate: Validate) -> bool:
        """Run a validation if one is due, and count it; returns whether it took place."""
        session = self._session
        if not due.is_validation_due(session.schedule, session.state) or not validate():
            return False
        if session.schedulers is not None and not session.is_manual:
            session.schedulers.after_validation(session.model.metrics)
        session.log_scores()
        session.state.end_validation()
        session.state.record_improvement(has_improved=session.judge_scores())
        return True

    def _pass_safe_point(self, *, is_due: bool) -> None:
        """Write a checkpoint if one is due, requested or final."""
        session = self._session
        if session.is_stopping:
            limit = due.find_limit(session.schedule, session.state, session.cursor)
            if not limit:
                session.cursor.stop(session.agreement.agreed.stop_reason)
        is_wanted = is_due or session.agreement.agreed.is_checkpoint_wanted or session.is_leaving
        session.agreement.agreed.is_checkpoint_wanted = False
        if is_wanted:
            session.save()

    def _leave(self, kind: BoundaryRules, *, has_validated: bool) -> bool:
        """Do what follows a safe point: the last poll, and the end if one is due."""
        session = self._session
        if has_validated or kind.polls_late:
            before = (session.is_stopping, session.is_leaving)
            self.poll()
            session.agree()
            if (session.is_stopping, session.is_leaving) != before:
                self._pass_safe_point(is_due=False)
        return session.is_leaving
