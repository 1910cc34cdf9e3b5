"""Makes what repeats steps in a run: its audit, if its loops allow one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from helios.audit.step_audit import StepAudit
from helios.loops.batch import BatchLoop
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import EvaluationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.loops.run_along import RunningAlong
from helios.protocols import GradientAudit
from helios.session import Session
from helios.startup.options.audit_options import Audit

_LOGGER = logging.getLogger(__name__)


def make_audit(options: Audit | None, session: Session, loop: Loop) -> GradientAudit | None:
    """Return the audit of a run, or what computes along for others; ``None`` if there is neither.

    Args:
        options: which steps are audited; ``None`` for none.
        session: the run.
        loop: the root of all loops.
    """
    if session.engine.has_idle_turn:
        return RunningAlong(session)
    if options is None:
        return None
    own = sorted({type(part).__name__ for part in _other_loops(loop)})
    if own:
        _LOGGER.warning(
            "Trainer(audit=...) has no effect: %s takes the place of Helios' own BatchLoop or "
            "OptimizerLoop, so Helios does not know how to compute a gradient a second time.",
            ", ".join(own),
        )
        return None
    return StepAudit(session, every=options.every, is_strict=options.on_mismatch == "raise")


def _other_loops(loop: Loop) -> Iterator[Loop]:
    """Yield the loops that may compute gradients in another way."""
    is_outer = isinstance(loop, FitLoop | EpochLoop | EvaluationLoop)
    if not is_outer and type(loop) not in (BatchLoop, OptimizerLoop):
        yield loop
    for child in loop.children().values():
        yield from _other_loops(child)
