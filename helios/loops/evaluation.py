"""Passes over data without gradients: validation inside fit or on its own, and testing.

An evaluation runs on random numbers of its own and gives back the generators, modes and cuDNN
settings that it found, also after an error: training never notices it (DESIGN R2, C4, C5).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from helios.core.cuda import DisableCuDNNBenchmarkContext
from helios.data.source import BatchIterator
from helios.errors import UsageError
from helios.loops.loop import Loop, make_stray_stop
from helios.state import Phase


class EvaluationLoop(Loop):
    """Base of the loops that evaluate.

    Attributes:
        phase: what the loop does.
        noun: the part of its events' names that names the phase.
    """

    phase: ClassVar[Phase]
    noun: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._batches: BatchIterator | None = None
        self._randomness = ExitStack()
        self._modes = ExitStack()
        self._step = 0
        self._pass_number = 0

    @property
    def skip(self) -> bool:
        """Whether there is no data for the phase (H57)."""
        return self.phase not in self.session.sources

    @property
    def done(self) -> bool:
        """Whether the data is exhausted; the batches say so by ``StopIteration``."""
        return False

    def reset(self) -> None:
        """Begin a pass."""
        self._step = 0
        self._pass_number = self.session.state.validation_cycles

    def on_run_start(self, *args: Any) -> None:
        """Set evaluation mode, then tell that the pass starts."""
        session, enter = self.session, self._modes.enter_context
        source = session.sources[self.phase]
        is_inside_fit = session.phase is Phase.TRAINING
        self._randomness.enter_context(session.entering(self.phase, self._pass_number))
        enter(torch.no_grad() if is_inside_fit else torch.inference_mode())
        enter(DisableCuDNNBenchmarkContext())
        self._modes.callback(session.model.train)
        session.model.eval()
        self._modes.callback(session.display.end_evaluation)
        session.display.start_evaluation(self.phase.value, source.num_batches())
        self._tell_start()
        self._batches = source.batches(self._pass_number)
        self._modes.callback(self._batches.close)

    def advance(self, *args: Any) -> None:
        """Evaluate one batch (H54)."""
        batch = next(self._open_batches())
        try:
            self._process(batch, self._step)
        except StopIteration as error:
            raise make_stray_stop(error) from error
        self.session.display.advance_evaluation()
        self._step += 1

    def _process(self, batch: Any, step: int) -> None:
        session = self.session
        session.seed_evaluation(self._pass_number, step)
        batch = session.move_batch(batch, self.phase)
        batch = session.hooks.transform(f"process_{self.noun}_batch", batch, step)
        session.hooks.emit(f"on_{self.noun}_batch_start", step)
        self._evaluate(batch, step)

    def on_run_end(self) -> Any:
        """Restore modes, then tell the end of the pass; returns its result."""
        result = self._conclude()
        self._modes.close()
        self._tell_end()
        self._randomness.close()
        return result

    def teardown(self) -> None:
        """Close a pass that an error has left open."""
        self._batches = None
        self._modes.close()
        self._randomness.close()
        super().teardown()

    def _open_batches(self) -> BatchIterator:
        if self._batches is None:
            raise UsageError(f"{type(self).__name__} was advanced before it was started.")
        return self._batches

    def _tell_start(self) -> None:
        self.session.hooks.emit(f"on_{self.noun}_start")

    def _tell_end(self) -> None:
        self.session.hooks.emit(f"on_{self.noun}_end")

    @abstractmethod
    def _evaluate(self, batch: Any, step: int) -> None:
        """Evaluate one batch that lies on the device, and tell that it is done."""

    @abstractmethod
    def _conclude(self) -> Any:
        """Return the result of the pass, while modes are still those of the evaluation."""


class Totals:
    """Sums and weights of named scores, added in the order of the batches (DESIGN R3).

    Args:
        step_name: the step whose results are added, for messages.
    """

    def __init__(self, step_name: str) -> None:
        self._step_name = step_name
        self._totals: dict[str, tuple[Any, Any]] = {}

    def add(self, result: Any) -> None:
        """Add the result of one step.

        Raises:
            UsageError: if it is neither ``None`` nor ``{name: (sum, weight)}``.
        """
        if result is None:
            return
        if not isinstance(result, dict) or not all(
            isinstance(item, tuple) and len(item) == 2 for item in result.values()
        ):
            raise UsageError(
                f"Model.{self._step_name} must return None or a dict {{name: (sum, weight)}}, "
                f"got {result!r}."
            )
        for name, item in result.items():
            total, weight = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (total + item[0], weight + item[1])

    def write(self, scores: dict[str, Any]) -> None:
        """Write the ratio of each total into a table, as a number."""
        for name, (total, weight) in self._totals.items():
            scores[name] = float(total) / float(weight) if weight else float("nan")


class ValidationLoop(EvaluationLoop):
    """One validation pass; its result is True, or None where there is no data."""

    phase = Phase.VALIDATION
    noun = "validation"

    def reset(self) -> None:
        """Begin a pass with empty totals."""
        super().reset()
        self._totals = Totals("valid_step")

    def _tell_start(self) -> None:
        self.session.hooks.emit("on_validation_start", self._pass_number)

    def _tell_end(self) -> None:
        self.session.hooks.emit("on_validation_end", self._pass_number)

    def _evaluate(self, batch: Any, step: int) -> None:
        self._totals.add(self.session.model.valid_step(batch, step))
        self.session.hooks.emit("on_validation_batch_end", step)

    def _conclude(self) -> bool:
        self._totals.write(self.session.model.metrics)
        return True


class TestingLoop(EvaluationLoop):
    """One test pass (H55); its result is True, or None where there is no data."""

    __test__: ClassVar[bool] = False  # else pytest takes the class for a test of its users
    phase = Phase.TESTING
    noun = "testing"

    def reset(self) -> None:
        """Begin a pass with empty totals."""
        super().reset()
        self._totals = Totals("test_step")

    def _evaluate(self, batch: Any, step: int) -> None:
        self._totals.add(self.session.model.test_step(batch, step))
        self.session.hooks.emit("on_testing_batch_end", step)

    def _conclude(self) -> bool:
        self._totals.write(self.session.model.test_scores)
        return True
