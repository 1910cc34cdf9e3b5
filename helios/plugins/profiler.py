"""``Profiler``: run ``torch.profiler`` for some iterations.

It does not affect the results and holds no state: a resumed run restarts its schedule. With several
processes, rank 0 is recorded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

from torch.profiler import profile, schedule, tensorboard_trace_handler

from helios.counters import TrainingState
from helios.distributed.collectives import get_global_rank
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.storage.files import as_local_path

_LOGGER = logging.getLogger(__name__)


@PLUGIN_REGISTRY.register
class Profiler(Plugin):
    """Profile some iterations, and write a trace of each cycle into a folder.

    Iterations are counted from the start of training in this process. A cycle consists of ``wait``,
    ``warmup`` and ``active`` iterations, as in ``torch.profiler.schedule``; a trace is written
    after the last active one, or when training ends. Open traces in Perfetto, ``chrome://tracing``
    or TensorBoard's profiler plugin.

    Args:
        folder: folder for traces; created if missing.
        skip_first: iterations before the first cycle.
        wait: iterations at the start of a cycle that are not profiled.
        warmup: iterations that are profiled and discarded; 0 makes ``torch.profiler`` warn.
        active: iterations that are recorded.
        repeat: number of cycles; 0 for no limit.
        options: arguments of ``torch.profiler.profile``, such as ``activities``,
            ``record_shapes``, ``profile_memory`` and ``with_stack``.

    Raises:
        ArgumentError: for a URL.
    """

    _internals: ClassVar[str] = "_folder _has_written _lengths _options _profile"

    def __init__(
        self,
        folder: str | Path,
        *,
        skip_first: int = 0,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        **options: Any,
    ) -> None:
        super().__init__("profiler")
        self._folder = as_local_path("Profiler(folder=...)", folder).absolute()
        self._lengths = {"skip_first": skip_first, "wait": wait, "warmup": warmup}
        self._lengths |= {"active": active, "repeat": repeat}
        schedule(**self._lengths)  # refuses lengths that make no cycle
        self._options = options
        self._profile: profile | None = None
        self._has_written = False

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_start(self) -> None:
        """Start the schedule."""
        if get_global_rank() == 0 and not self.context.is_replay:
            self._has_written = False
            self._profile = profile(
                schedule=schedule(**self._lengths), on_trace_ready=self._write, **self._options
            )
            self._profile.start()

    def _write(self, finished: profile) -> None:
        self._has_written = True
        try:
            tensorboard_trace_handler(str(self._folder))(finished)
        except Exception:
            # Raised inside torch's state machine, it would crash the process at the end.
            _LOGGER.exception("Profiler could not write a trace into %s.", self._folder)

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Advance the schedule."""
        recording, self._profile = self._profile, None
        if recording is not None:
            # After an error, PyTorch would crash where it is stopped.
            recording.step()
            self._profile = recording

    def on_training_end(self) -> None:
        """End the recording right after training."""
        self.teardown()

    def teardown(self) -> None:
        """End the recording, and write a trace that was started."""
        recording, self._profile = self._profile, None
        if recording is not None:
            recording.stop()
            if not self._has_written:
                _LOGGER.warning(
                    "Profiler recorded nothing: training ended within skip_first, wait and warmup "
                    "of its schedule. Lower them, or train longer."
                )
