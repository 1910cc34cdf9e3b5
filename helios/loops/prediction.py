"""``PredictionLoop``: one pass that returns the predictions, in the order of the data."""

from __future__ import annotations

from typing import Any, ClassVar

from helios.counters import Phase
from helios.loops.evaluation import EvaluationLoop


class PredictionLoop(EvaluationLoop):
    """One prediction pass.

    Its result is the list of predictions, one per batch; with several loaders, a list of such
    lists, one for each loader.
    """

    _internals: ClassVar[str] = "_predictions"

    phase = Phase.PREDICTION
    noun = "predicting"
    step_name = "predict_step"

    def reset(self) -> None:
        """Begin a pass without predictions."""
        super().reset()
        self._predictions: list[list[Any]] = [[] for _ in self._sources]

    def _add_result(self, result: Any, replica: int = 0, size: int | None = None) -> None:
        self._predictions[self._loader].append(result)

    def _shown(self, result: Any) -> tuple[Any, ...]:
        return (result,)

    def _finish_pass(self) -> list[Any]:
        predictions, self._predictions = self._predictions, []
        return predictions if len(self._sources) > 1 else predictions[0]
