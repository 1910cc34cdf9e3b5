"""``Profiler``: run ``torch.profiler`` for some iterations.

It changes no bit of the training and holds no state: a resumed run restarts its schedule. With
several processes, rank 0 is recorded.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.profiler import ProfilerAction, profile, schedule, tensorboard_trace_handler

from helios.distributed.collectives import get_global_rank
from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.context import Context
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin, check_folder
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)
_OWN = ("schedule", "on_trace_ready")


@PLUGIN_REGISTRY.register
class Profiler(Plugin):
    """Profile some iterations, and write a trace of each cycle into a folder.

    Iterations are counted from the start of training in this process. A cycle consists of ``wait``,
    ``warmup`` and ``active`` iterations; a trace is written after the last active one, or when
    training ends. Open traces in Perfetto, ``chrome://tracing`` or TensorBoard's profiler plugin.

    Args:
        folder: folder for traces; created if missing.
        skip_first: iterations before the first cycle.
        wait: iterations at the start of a cycle that are not profiled.
        warmup: iterations that are profiled and discarded; 0 makes ``torch.profiler`` warn.
        active: iterations that are recorded.
        repeat: number of cycles; 0 for no limit.
        ranges: mark the forward pass, the backward pass and the optimizer step in traces.
        options: arguments of ``torch.profiler.profile``, such as ``activities``,
            ``record_shapes``, ``profile_memory`` and ``with_stack``.

    Raises:
        ArgumentError: for an invalid number, and for a folder that is a file.
        ArgumentTypeError: for an invalid path, and an unknown option.
    """

    _internals: ClassVar[str] = (
        "_before_first _closing _folder _has_ranges _lengths _num_steps _num_traces "
        "_open_ranges _options _profile _repeat _schedule"
    )

    unsaved = ("_num_steps", "_num_traces", "_open_ranges", "_profile", "_schedule")

    def __init__(
        self,
        folder: str | Path,
        *,
        skip_first: int = 0,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranges: bool = True,
        **options: Any,
    ) -> None:
        super().__init__("profiler")
        self._folder = check_folder("Profiler", folder, example="runs/traces")
        lengths = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "repeat": repeat}
        for name, value in {**lengths, "active": active}.items():
            _check_count(name, value, least=1 if name == "active" else 0)
        _check_options(options)
        self._before_first = skip_first + wait + warmup
        self._repeat = repeat
        self._lengths = {**lengths, "active": active}
        # A function of torch's that cannot be sent to another process.
        self._schedule = _record_nothing
        self._options = options
        self._has_ranges = ranges
        self._profile: profile | None = None
        self._closing = ExitStack()
        self._open_ranges: list[ExitStack] = []
        self._num_steps = self._num_traces = 0

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_start(self) -> None:
        """Start the schedule."""
        if get_global_rank() != 0 or self.context.is_replay:
            return
        self._num_steps = self._num_traces = 0
        self._open_ranges = []
        self._schedule = schedule(**self._lengths)
        self._profile = self._closing.enter_context(
            profile(schedule=self._schedule, on_trace_ready=self._write, **self._options)
        )

    def _write(self, finished: profile) -> None:
        self._num_traces += 1
        try:
            tensorboard_trace_handler(str(self._folder))(finished)
        except Exception:
            # Raised inside torch's state machine, it would crash the process at the end.
            _LOGGER.exception("Profiler could not write a trace into %s.", self._folder)

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Advance the schedule; after its last cycle, profiling costs nothing."""
        if self._profile is None:
            return
        self._num_steps += 1
        with self._quiet_between_cycles(self._profile):
            self._step(self._profile)
        if self._repeat and self._num_traces == self._repeat:
            self._end()

    def _step(self, recording: profile) -> None:
        try:
            recording.step()
        except BaseException:
            # Ending it, too, would crash the process, because part of it is closed already.
            self._closing.pop_all()
            self._profile = None
            raise

    @contextmanager
    def _quiet_between_cycles(self, recording: profile) -> Iterator[None]:
        """Suppress torch's warning that a cycle clears the previous one: it was written."""
        begins = self._schedule(self._num_steps) is not ProfilerAction.NONE
        between = (ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE)
        if not begins or recording.current_action not in between:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield

    def on_training_end(self) -> None:
        """End the recording before anything that follows training."""
        self._end()

    def teardown(self) -> None:
        """End the recording in all other cases, and write a trace that was started."""
        self._end()

    def _end(self) -> None:
        if self._profile is None:
            return
        self._profile, self._schedule = None, _record_nothing
        while self._open_ranges:
            self._leave()
        self._closing.close()
        if self._num_traces == 0:
            _LOGGER.warning(
                "Profiler recorded nothing: this start made %d iterations, and the schedule skips "
                "the first %d (skip_first, wait and warmup). Lower them, or train longer.",
                self._num_steps,
                self._before_first,
            )

    def _enter(self, name: str) -> None:
        recording = self._profile
        if not self._has_ranges or recording is None:
            return
        if recording.current_action is not ProfilerAction.NONE:
            self._open_ranges.append(ExitStack())
            self._open_ranges[-1].enter_context(record_function(name))

    def _leave(self) -> None:
        if self._open_ranges:
            self._open_ranges.pop().close()

    def on_forward_start(self, context: Context) -> None:
        """Begin a range."""
        self._enter(f"{context.phase.value} forward")

    def on_forward_end(self, context: Context) -> None:
        """End the range."""
        self._leave()

    def on_backward_start(self, loss: torch.Tensor) -> None:
        """Begin a range."""
        self._enter("backward")

    def on_backward_end(self) -> None:
        """End the range."""
        self._leave()

    @asks_nothing
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Begin a range."""
        self._enter("optimizer step")

    @asks_nothing
    def on_optimizer_step_end(self, optimizer: Optimizer, committed: bool) -> None:
        """End the range."""
        self._leave()


def _record_nothing(step: int) -> ProfilerAction:
    return ProfilerAction.NONE


def _check_count(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(
            f"Profiler({name}=...) must be an int of at least {least}, got {value!r}. It counts "
            "iterations (repeat counts cycles, 0 for no limit)."
        )


def _check_options(options: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(profile).parameters if name not in _OWN]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ArgumentTypeError(
            f"Profiler(**options) must be arguments of torch.profiler.profile, got {unknown}. "
            f"Valid ones are: {', '.join(known)}."
        )
