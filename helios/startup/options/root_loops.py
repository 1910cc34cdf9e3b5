"""The four loops that a trainer runs, and what may take their places (L1, L13)."""

from __future__ import annotations

from typing import Protocol

from helios.errors import ArgumentTypeError
from helios.loops.batch import BatchLoop
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import EvaluationLoop, TestingLoop, ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.optimizer import OptimizerLoop
from helios.loops.prediction import PredictionLoop
from helios.state import Phase


class Roots:
    """The roots of the trees of loops (L14).

    Attributes:
        fit: the loop over all epochs.
        evaluations: the loops that evaluate, by phase.
    """

    def __init__(self) -> None:
        self.fit = FitLoop(EpochLoop(BatchLoop(OptimizerLoop()), ValidationLoop()))
        self.evaluations: dict[Phase, EvaluationLoop] = {
            Phase.VALIDATION: ValidationLoop(),
            Phase.TESTING: TestingLoop(),
            Phase.PREDICTION: PredictionLoop(),
        }

    def replace_fit(self, loop: FitLoop) -> None:
        """Put another loop in the place of the fit loop; it adopts the tree below the old one.

        Raises:
            ArgumentTypeError: for something that is no fit loop.
        """
        if not isinstance(loop, FitLoop):
            raise ArgumentTypeError(f"Trainer.fit_loop must be a FitLoop, got {loop!r}.")
        loop.adopt(self.fit)
        self.fit = loop


class HasRoots(Protocol):
    """A trainer, as far as its loops go."""

    roots: Roots


class EvaluationRoot:
    """An attribute of a trainer that holds the loop of one kind of evaluation.

    Args:
        phase: the kind.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __get__(self, trainer: HasRoots, kind: type | None = None) -> EvaluationLoop:
        return trainer.roots.evaluations[self._phase]

    def __set__(self, trainer: HasRoots, loop: EvaluationLoop) -> None:
        """Put another loop in its place.

        Raises:
            ArgumentTypeError: for something that is no evaluation loop of the phase.
        """
        if not isinstance(loop, EvaluationLoop) or loop.phase is not self._phase:
            raise ArgumentTypeError(
                f"The loop for {self._phase.value} must be an EvaluationLoop whose phase is "
                f"{self._phase}, got {loop!r}."
            )
        trainer.roots.evaluations[self._phase] = loop
