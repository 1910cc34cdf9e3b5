"""The four loops that a trainer runs, and how to replace them."""

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
    """The root loops.

    Attributes:
        fit: the loop over all epochs.
        evaluations: the evaluation loops, by phase.
    """

    def __init__(self) -> None:
        self.fit = FitLoop(EpochLoop(BatchLoop(OptimizerLoop()), ValidationLoop()))
        self.evaluations: dict[Phase, EvaluationLoop] = {
            Phase.VALIDATION: ValidationLoop(),
            Phase.TESTING: TestingLoop(),
            Phase.PREDICTION: PredictionLoop(),
        }

    def replace_fit(self, loop: FitLoop) -> None:
        """Replace the fit loop; the new one adopts the loops below the old one.

        Raises:
            ArgumentTypeError: for something that is not a fit loop.
        """
        if not isinstance(loop, FitLoop):
            raise ArgumentTypeError(f"Trainer.fit_loop must be a FitLoop, got {loop!r}.")
        loop.adopt(self.fit)
        self.fit = loop


class HasRoots(Protocol):
    """A trainer, as far as its loops are concerned."""

    roots: Roots


class EvaluationRoot:
    """Descriptor of a trainer's attribute that holds an evaluation loop.

    Args:
        phase: the phase of the loop.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __get__(self, trainer: HasRoots, kind: type | None = None) -> EvaluationLoop:
        return trainer.roots.evaluations[self._phase]

    def __set__(self, trainer: HasRoots, loop: EvaluationLoop) -> None:
        """Replace the loop.

        Raises:
            ArgumentTypeError: for something that is not an evaluation loop of the phase.
        """
        if not isinstance(loop, EvaluationLoop) or loop.phase is not self._phase:
            raise ArgumentTypeError(
                f"The loop for {self._phase.value} must be an EvaluationLoop whose phase is "
                f"{self._phase}, got {loop!r}."
            )
        trainer.roots.evaluations[self._phase] = loop
