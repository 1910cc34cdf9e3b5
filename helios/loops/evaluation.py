"""Passes over data without gradients: validation, inside fit or separate, tests, predictions.

An evaluation uses its own random numbers and restores the generators, modes and cuDNN settings,
also after an error, so it does not affect training.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeAlias

import torch

from helios.core import rng
from helios.core.cuda import DisableCuDNNBenchmarkContext
from helios.core.loss_means import WeightedLoss, as_numbers, as_summand
from helios.core.step_log import StepLog
from helios.counters import Phase
from helios.data.source import NO_BATCH, BatchIterator, Source
from helios.errors import Interrupted, UsageError
from helios.findings import FindingKind
from helios.loops.loop import Forward, Loop, make_stray_stop, moves_batches
from helios.model.model import find_test_step
from helios.model.processor import Processed
from helios.run_parts import RunParts
from helios.run_state import Place
from helios.sharding.repeated_steps import without_trace

_LOGGER = logging.getLogger(__name__)
_END = object()
_ReplicaBatch: TypeAlias = tuple[int, Any, int | None]
"""A replica of this process, its batch, and how many samples that has."""


class EvaluationLoop(Loop):
    """Base of the evaluation loops, over one loader or several in order.

    Attributes:
        phase: the phase of the loop.
        noun: the part of its events' names that names the phase.
        step_name: name of the model's step.
    """

    _bound: ClassVar[str] = "_forward _moves"
    _internals: ClassVar[str] = (
        f"{_bound} _batch_size _batches _kept _loader _log _modes _num_done _pass_number "
        "_randomness _sources _step _total"
    )

    phase: ClassVar[Phase]
    noun: ClassVar[str]
    step_name: str

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[Source] = []
        self._batches: BatchIterator | None = None
        self._randomness = ExitStack()
        self._modes = ExitStack()
        self._step = self._num_done = 0
        self._total: int | None = None
        self._loader = 0
        self._pass_number = 0
        self._kept: Any = None
        # Of the batch of a replica, and what its step logs; ``None`` where steps do not log.
        self._batch_size: int | None = None
        self._log: StepLog | None = None

    def _bind(self, parts: RunParts) -> None:
        self._forward = Forward(parts, self.step_name)
        self._moves = moves_batches(parts)

    @property
    def skip(self) -> bool:
        """Whether there is no data for the phase."""
        return self.phase not in self._parts.sources

    @property
    def done(self) -> bool:
        """Whether the data is exhausted; the batches raise ``StopIteration`` then."""
        return False

    @property
    def source(self) -> Source:
        """The data of the current loader."""
        return self._sources[self._loader]

    def reset(self) -> None:
        """Begin a pass."""
        self._sources = self._parts.sources[self.phase]
        self._step = self._loader = 0
        self._kept = None
        self._pass_number = self._run.state.validation_cycles

    def on_run_start(self, *args: Any) -> None:
        """Set evaluation mode, then emit the start of the pass."""
        parts, run, enter = self._parts, self._run, self._modes.enter_context
        run.place = Place.EVALUATION
        is_inside_fit = run.phase is Phase.TRAINING
        self._randomness.enter_context(self._entering())
        # Inference mode makes tensors that a sharded model cannot keep for the next pass.
        is_kept = is_inside_fit or self._parts.runner.keeps_batches
        enter(torch.no_grad() if is_kept else torch.inference_mode())
        enter(DisableCuDNNBenchmarkContext())
        self._modes.callback(parts.model.train)
        parts.model.eval()
        for notify in reversed(parts.listeners.paused):
            self._modes.callback(notify)
        self._num_done, self._total = 0, self._count_batches()
        self._notify()
        self._emit_start()
        self._modes.callback(self._close_batches)
        self._open_batches()

    @contextmanager
    def _entering(self) -> Iterator[None]:
        """Run the pass with its own random numbers; the generators are restored afterwards."""
        run, found = self._run, self._run.phase
        run.phase = self.phase
        try:
            with rng.stream(rng.key(self._parts.seed, self.phase.value, self._pass_number)):
                yield
        finally:
            run.phase = found

    def _notify(self) -> None:
        """Notify listeners of the batches that are done."""
        for notify in self._parts.listeners.evaluated:
            notify(self.phase.value, self._num_done, self._total)

    def advance(self, *args: Any) -> None:
        """Evaluate one batch, or continue with the next loader."""
        assert self._batches is not None, "on_run_start opens them"
        parts = self._parts
        # Inside fit, the training ends at its safe point.
        if parts.writer is None and (reason := parts.outside()):
            raise Interrupted(0, reason)
        is_enough = self._step == self._limit
        found: Any = _END if is_enough else next(self._batches, _END)
        has_ended = found is _END
        shares = [] if has_ended else self._pair(found, self._batches)
        num_idle = self._parts.runner.count_idle(len(shares))
        if has_ended and not num_idle:
            self._next_loader()
            return
        which = (self._loader,) if len(self._sources) > 1 else ()
        try:
            if shares:
                self._process(shares, self._step, *which)
            for _ in range(num_idle):
                self._compute_along(*which)
        except StopIteration as error:
            raise make_stray_stop(error) from error
        self._num_done += 1
        self._notify()
        self._run.num_other_batches += 1
        self._step += 1

    @property
    def _limit(self) -> int | None:
        """Maximum number of batches per loader during a sanity check, else ``None``."""
        return self._parts.sanity_steps if self._run.is_sanity_check else None

    def _count_batches(self) -> int | None:
        """Return the number of batches of the whole pass, of all loaders; ``None`` if unknown."""
        most, total = self._limit, 0
        for source in self._sources:
            count = source.num_batches()
            if count is None:
                return None
            total += count if most is None else min(count, most)
        return total

    def _open_batches(self) -> None:
        self._batches = self.source.batches(self._pass_number)

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _next_loader(self) -> None:
        self._close_batches()
        if self._step == 0:
            where = f" in loader {self.source.name!r}" if self.source.name else ""
            raise UsageError(
                f"The data of {self.phase.value} must yield at least one batch, got none{where}. "
                "Check the data; an iterator that can be read only once cannot be used."
            )
        if self._loader + 1 == len(self._sources):
            raise StopIteration
        self._loader += 1
        self._step = 0
        self._open_batches()

    def _seed(self, replica: int | None = None) -> None:
        """Seed the generators for a batch of a replica, or, without one, for the hooks."""
        which: tuple[int | str, ...] = (self._loader,) if self._loader else ()
        if replica is not None:
            which = (*which, "replica", replica)
        fields = (self.phase.value, self._pass_number, self._step, *which)
        rng.reseed(rng.key(self._parts.seed, *fields))

    def _pair(self, found: Sequence[Any], batches: BatchIterator) -> list[_ReplicaBatch]:
        """Return the replicas of this process that have a batch, with it and its size."""
        return [
            (replica, batch, batches.size(place))
            for place, (replica, batch) in enumerate(
                zip(self._parts.replicas.local_replicas, found, strict=True)
            )
            if batch is not NO_BATCH
        ]

    def _process(self, shares: Sequence[_ReplicaBatch], step: int, *which: int) -> None:
        """Evaluate the batches of this process's replicas, between one pair of events."""
        run, hooks, noun, forward = self._run, self._parts.hooks, self.noun, self._forward
        model = self._parts.model
        self._seed()
        run.batch = run.raw_batch = shares[0][1]
        hooks.emit(f"on_{noun}_batch_start", step, *which)
        for replica, batch, size in shares:
            self._parts.runner.begin_share(replica, self._seed)
            if self._moves:
                batch = model.batch_to_device(batch, self.phase)
            batch = hooks.transform(f"process_{noun}_batch", batch, step, *which)
            run.batch = run.raw_batch = batch
            batch = forward.begin(batch)
            self._kept = batch if self._parts.runner.keeps_batches else None
            self._batch_size, model._step_log = size, self._log
            result = forward.call(batch, step, *which)
            model._step_log = None
            forward.end(result, result.loss if isinstance(result, Processed) else None)
            self._add_result(result, replica, size)
        self._parts.runner.end_shares(self._seed)
        run.batch = run.raw_batch
        hooks.emit(f"on_{noun}_batch_end", step, *self._shown(result), *which)
        run.batch = run.raw_batch = run.model_outputs = run.loss = None

    def _compute_along(self, *which: int) -> None:
        """Repeat the last step of this process without a trace, because others have a batch.

        Raises:
            UsageError: if this process had no batch yet.
        """
        if self._kept is None:
            raise UsageError(
                f"The data of {self.phase.value} must have a batch for each process when the model "
                f"is sharded, but there are fewer. Add samples, or start fewer processes than "
                f"{self._parts.replicas.num_processes}."
            )
        with without_trace(self._parts):
            self._forward.call(self._kept, self._step, *which)

    def _shown(self, result: Any) -> tuple[Any, ...]:
        """Return what the end event of a batch gets of the step's result."""
        return ()

    def on_run_end(self) -> Any:
        """Restore modes, then emit the end of the pass; returns its result."""
        self._parts.gradients.compare_calls()
        self._run.place = Place.AFTER_EVALUATION
        result = self._finish_pass()
        self._modes.close()
        # A process whose replicas had no batch at the end has drawn fewer numbers than others.
        self._parts.runner.end_shares(self._seed)
        self._emit_end()
        self._compare()
        self._randomness.close()
        return result

    def teardown(self) -> None:
        """Close a pass that an error has left open."""
        self._modes.close()
        self._randomness.close()
        super().teardown()

    def _compare(self) -> None:
        """Compare results over processes, after the last hook; does nothing by default."""

    def _emit_start(self) -> None:
        self._parts.hooks.emit(f"on_{self.noun}_start")

    def _emit_end(self) -> None:
        self._parts.hooks.emit(f"on_{self.noun}_end")

    @abstractmethod
    def _add_result(self, result: Any, replica: int = 0, size: int | None = None) -> None:
        """Record the result of one step of a replica, whose batch has so many samples."""

    @abstractmethod
    def _finish_pass(self) -> Any:
        """Return the result of the pass, while modes are still those of the evaluation."""


class Totals:
    """Sums and weights of named scores, added in float64 in the order of the batches.

    Args:
        step_name: the step whose results are added, for messages.

    Attributes:
        sums: sum and weight of each score so far.
    """

    def __init__(self, step_name: str) -> None:
        self._step_name = step_name
        self.sums: dict[str, tuple[Any, Any]] = {}

    def add(self, result: Any, suffix: str = "", *, size: int | None = None) -> None:
        """Add the result of one step.

        Args:
            result: what the step returned; for a batch processor, its loss, as ``"loss"``.
            suffix: appended to the names, so that each of several loaders has its own scores.
            size: the samples of the batch, which are the weight of a processor's loss; ``None`` if
                they are unknown: then the weight is 1.

        Raises:
            UsageError: if it is neither ``None`` nor ``{name: (sum, weight)}``.
        """
        if isinstance(result, Processed) and isinstance(result.loss, WeightedLoss):
            result = {"loss": (result.loss.sum, result.loss.weight)}
        elif isinstance(result, Processed):
            weight = 1 if size is None else size
            loss = as_summand(result.loss)
            result = None if loss is None else {"loss": (loss * weight, weight)}
        if result is None:
            return
        if not isinstance(result, dict) or not all(
            isinstance(item, tuple) and len(item) == 2 for item in result.values()
        ):
            raise UsageError(
                f"Model.{self._step_name} must return None or a dict {{name: (sum, weight)}}, "
                f'got {result!r}. Log a mean instead: self.log("loss", loss).'
            )
        for name, item in result.items():
            known = self.sums.get(name + suffix, (0.0, 0.0))
            total, weight = map(as_summand, item)
            self.sums[name + suffix] = (known[0] + total, known[1] + weight)


def write_scores(sums: Mapping[str, tuple[Any, Any]], scores: dict[str, Any]) -> None:
    """Write the ratio of each sum and its weight into a table, as a number."""
    for name, (total, weight) in sums.items():
        scores[name] = float(total) / float(weight) if weight else float("nan")


class ScoringLoop(EvaluationLoop):
    """Base of passes whose steps return scores; the result is True, or None without data."""

    _internals: ClassVar[str] = "_totals"

    def _find_batch_size(self) -> int | None:
        return self._batch_size

    def reset(self) -> None:
        """Begin a pass with empty totals."""
        super().reset()
        # What a failed pass has logged is not in the next one.
        self._log = StepLog(self._find_batch_size)
        block = self._parts.replicas.local_replicas
        self._totals = {replica: Totals(self.step_name) for replica in block}

    @property
    @abstractmethod
    def scores(self) -> dict[str, Any]:
        """The model's table for the scores."""

    def _add_result(self, result: Any, replica: int = 0, size: int | None = None) -> None:
        suffix = f"/{self.source.name or self._loader}" if len(self._sources) > 1 else ""
        self._totals[replica].add(result, suffix, size=size)
        if self._log is not None and self._log.sums:
            logged, self._log.sums = self._log.sums, {}
            self._totals[replica].add(logged, suffix)

    def _compare(self) -> None:
        if not self._run.is_sanity_check:
            self._parts.replicas.compare(self._compare_scores)

    def _compare_scores(self, gather: Callable[[Any], list[Any]]) -> None:
        """Warn of scores that differ between processes: they were not summed."""
        first, *others = (
            {name: repr(value) for name, value in table.items()}
            for table in gather(as_numbers(self.scores))
        )
        names = {n for table in others for n in table | first if table.get(n) != first.get(n)}
        shown = ", ".join(sorted(names))
        text, findings = f"scores that differ between processes: {shown}", self._parts.findings
        if names and findings.add(FindingKind.OBSTACLE, text=text):
            _LOGGER.warning(
                "The scores %s differ between processes, because each evaluates only a part of the "
                "data. Return {name: (sum, weight)} from %s: these are summed over all processes.",
                shown,
                self.step_name,
            )

    def _finish_pass(self) -> bool:
        sums = self._parts.replicas.sum_scores([part.sums for part in self._totals.values()])
        write_scores(sums, self.scores)
        return True


class ValidationLoop(ScoringLoop):
    """One validation pass."""

    phase = Phase.VALIDATION
    noun = "validation"
    step_name = "valid_step"

    @property
    def scores(self) -> dict[str, Any]:
        """The validation scores."""
        return self._parts.model.metrics

    def _emit_start(self) -> None:
        self._parts.hooks.emit("on_validation_start", self._pass_number)

    def _emit_end(self) -> None:
        self._parts.hooks.emit("on_validation_end", self._pass_number)


class TestingLoop(ScoringLoop):
    """One test pass."""

    _internals: ClassVar[str] = "_validated step_name"
    __test__: ClassVar[bool] = False  # else pytest collects the class as a test
    phase = Phase.TESTING
    noun = "testing"
    step_name = "test_step"

    def _bind(self, parts: RunParts) -> None:
        # One step for both, if the model has no test_step.
        self.step_name = find_test_step(parts.model) or "test_step"
        super()._bind(parts)

    def _finish_pass(self) -> bool:
        model = self._parts.model
        if self.step_name == "valid_step":
            # What the step has written itself belongs to the test.
            model.test_scores.update(model.val_scores)
            model.val_scores.clear()
            model.val_scores.update(self._validated)
        return super()._finish_pass()

    def on_run_start(self, *args: Any) -> None:
        """Begin the pass; the scores of a validation are kept."""
        self._validated = dict(self._parts.model.val_scores)
        if self.step_name == "valid_step":
            self._parts.model.val_scores.clear()
        super().on_run_start(*args)

    @property
    def scores(self) -> dict[str, Any]:
        """The test scores."""
        return self._parts.model.test_scores


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
