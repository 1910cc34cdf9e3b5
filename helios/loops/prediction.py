"""One pass that returns what the model predicts, in the order of the data."""

from __future__ import annotations

from typing import Any

from helios.loops.evaluation import EvaluationLoop
from helios.state import Phase


class PredictionLoop(EvaluationLoop):
    """One prediction pass; its result is the list of predictions, a batch each."""

    phase = Phase.PREDICTION
    noun = "predicting"

    def reset(self) -> None:
        """Begin a pass without predictions."""
        super().reset()
        self._predictions: list[Any] = []

    def _evaluate(self, batch: Any, step: int) -> None:
        prediction = self.session.model.predict_step(batch, step)
        self.session.hooks.emit("on_predicting_batch_end", step, prediction)
        self._predictions.append(prediction)

    def _conclude(self) -> list[Any]:
        predictions, self._predictions = self._predictions, []
        return predictions
