"""The order of events: the loops over epochs, batches and evaluations."""

from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import EvaluationLoop, PredictionLoop, TestingLoop, ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop, YieldLoop

__all__ = [
    "BatchLoop",
    "EpochLoop",
    "EvaluationLoop",
    "FitLoop",
    "Loop",
    "OptimizerLoop",
    "PredictionLoop",
    "TestingLoop",
    "ValidationLoop",
    "YieldLoop",
]
