"""Shows the progress of a run: bars on a terminal, plain lines elsewhere, or nothing.

A loop reports each event to a :class:`Display`. That takes a fraction of a microsecond, because
losses are read and drawn at intervals only. Progress is not written to the log file.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TextIO

import torch

from helios.core.text import find_peak_memory, number_text, peak_text
from helios.distributed.collectives import get_global_rank
from helios.protocols import Clock
from helios.state import TrainingUnit
from helios.terminal.screen import Gauge, Surface, open_surface

_RATE_SECONDS = 10.0


class Display(ABC):
    """Shows the progress of a run; loops report events to it.

    Attributes:
        is_shown: whether it shows iterations; if not, they need not be reported.
    """

    is_shown: ClassVar[bool] = True

    @abstractmethod
    def start_training(
        self,
        *,
        unit: TrainingUnit,
        total_steps: float,
        epoch: int,
        done_in_epoch: int,
        num_batches: int | None,
        steps_done: int,
    ) -> None:
        """Start at the position of a new or resumed run.

        Args:
            unit: the unit of ``total_steps``.
            total_steps: length of the run; may be ``inf``.
            epoch: number of completed epochs.
            done_in_epoch: completed batches of the current epoch.
            num_batches: batches of the current epoch, if known.
            steps_done: number of completed steps.
        """

    @abstractmethod
    def start_epoch(self, epoch: int, num_batches: int | None, done: int) -> None:
        """Start an epoch, or continue inside it.

        Args:
            epoch: number of completed epochs.
            num_batches: batches of this epoch, if known.
            done: completed batches of this epoch.
        """

    @abstractmethod
    def advance(self, loss_items: Mapping[str, Any], num_samples: int, moved_step: bool) -> None:
        """Count an iteration.

        Args:
            loss_items: losses by name: numbers, or tensors of one element.
            num_samples: samples of the iteration.
            moved_step: whether the iteration completed a step.
        """

    @abstractmethod
    def end_epoch(self) -> None:
        """Count an epoch."""

    @abstractmethod
    def note_scores(self, text: str) -> None:
        """Take the scores of the last validation, to be shown until the next one."""

    @abstractmethod
    def start_evaluation(self, label: str, num_batches: int | None) -> None:
        """Start a validation, test or prediction."""

    @abstractmethod
    def advance_evaluation(self) -> None:
        """Count a batch of the evaluation."""

    @abstractmethod
    def end_evaluation(self) -> None:
        """End the evaluation; does nothing if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Finish the output; a second call does nothing."""


class NullDisplay(Display):
    """Shows nothing."""

    is_shown: ClassVar[bool] = False

    def start_training(self, **position: Any) -> None:
        """Do nothing."""

    def start_epoch(self, epoch: int, num_batches: int | None, done: int) -> None:
        """Do nothing."""

    def advance(self, loss_items: Mapping[str, Any], num_samples: int, moved_step: bool) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Do nothing."""

    def note_scores(self, text: str) -> None:
        """Do nothing."""

    def start_evaluation(self, label: str, num_batches: int | None) -> None:
        """Do nothing."""

    def advance_evaluation(self) -> None:
        """Do nothing."""

    def end_evaluation(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Rate:
    """Samples per second over the last ten seconds, without pauses."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def restart(self, now: float, num_samples: int) -> None:
        self._marks.clear()
        self._marks.append((now, num_samples))

    def skip(self, seconds: float) -> None:
        self._marks = deque((then + seconds, count) for then, count in self._marks)

    def record(self, now: float, num_samples: int) -> None:
        self._marks.append((now, num_samples))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()

    def text(self) -> str:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        if end <= start or last == first:
            return ""
        rate = (last - first) / (end - start)
        return f"{rate:.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"


@dataclasses.dataclass
class _Training:
    """Counters of a training, and the position and time at which this session started."""

    unit: TrainingUnit
    total: float
    steps: int
    epochs: int = 0
    batches: int = 0
    num_batches: int | None = None
    is_between_epochs: bool = False
    first_position: float = 0.0
    first_time: float = 0.0

    def begin_epoch(self, epoch: int, num_batches: int | None, done: int) -> None:
        self.epochs, self.num_batches, self.batches = epoch, num_batches, done
        self.is_between_epochs = False

    def end_epoch(self) -> None:
        # The count of its batches is still shown, but no longer part of the position.
        self.epochs += 1
        self.is_between_epochs = True

    def position(self) -> float:
        """Return the progress of the run, in units of ``total``."""
        if self.unit is TrainingUnit.ITERATION:
            return self.steps
        if self.is_between_epochs or not self.num_batches:
            return self.epochs
        return self.epochs + self.batches / self.num_batches

    def time_left(self, now: float) -> str:
        """Return the estimated time left at the speed of this session, including validation."""
        covered = self.position() - self.first_position
        if covered <= 0 or not math.isfinite(self.total):
            return ""
        left = max(0.0, self.total - self.position()) * (now - self.first_time) / covered
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"{clock} left"

    def gauges(self, speed: str, left: str) -> list[Gauge]:
        """Return the gauges: epochs and iterations of the current epoch, or steps."""
        total = int(self.total) if math.isfinite(self.total) else None
        if self.unit is TrainingUnit.ITERATION:
            text = ", ".join(filter(None, (speed, left)))
            return [Gauge("iterations", self.steps, total, text, stays=True)]
        return [
            Gauge("epochs", self.epochs, total, left, stays=True),
            Gauge("iterations", self.batches, self.num_batches, speed),
        ]


class BarDisplay(Display):
    """Shows bars on a terminal, otherwise a line at intervals.

    EPOCH unit has two bars, for epochs and for iterations of the current epoch; ITERATION unit has
    one, for steps. A validation or test adds one for its batches. On other streams, a line is
    written every 30 seconds, and in EPOCH unit at the end of each epoch.

    Args:
        stream: the output stream; ``sys.stderr`` if ``None``.
        clock: returns the time in seconds.
        find_memory: returns peaks of memory in bytes; called once per update.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Clock = time.perf_counter,
        *,
        find_memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._find_memory = find_memory
        self._surface: Surface | None = None
        self._training: _Training | None = None
        self._evaluation: Gauge | None = None
        self._rate = _Rate()
        self._next_time = 0.0
        self._num_samples = 0
        self._num_evaluated = 0
        self._pause_start = 0.0
        self._loss_items: Mapping[str, Any] = {}
        self._losses = ""
        self._scores = ""

    def start_training(
        self,
        *,
        unit: TrainingUnit,
        total_steps: float,
        epoch: int,
        done_in_epoch: int,
        num_batches: int | None,
        steps_done: int,
    ) -> None:
        """Show the start of the run, and start measuring its speed."""
        training = _Training(unit, total_steps, steps_done)
        training.begin_epoch(epoch, num_batches, done_in_epoch)
        training.first_position = training.position()
        training.first_time = now = self._clock()
        self._training = training
        self._rate.restart(now, self._num_samples)
        self._open()

    def start_epoch(self, epoch: int, num_batches: int | None, done: int) -> None:
        """Show the batches of an epoch."""
        if self._training is not None:
            self._training.begin_epoch(epoch, num_batches, done)
            self._show_if_due()

    def advance(self, loss_items: Mapping[str, Any], num_samples: int, moved_step: bool) -> None:
        """Count an iteration; reads the losses only if it redraws."""
        training = self._training
        if training is None:
            return
        training.batches += 1
        training.steps += moved_step
        self._num_samples += num_samples
        if self._clock() >= self._next_time:
            self._losses = _read(loss_items)
            self._show()
        self._loss_items = loss_items

    def end_epoch(self) -> None:
        """Count an epoch; without bars, write a line in EPOCH unit."""
        if self._training is None or self._surface is None:
            return
        self._training.end_epoch()
        if not self._surface.is_live:
            self._losses = _read(self._loss_items)
        if self._training.unit is TrainingUnit.EPOCH and not self._surface.is_live:
            self._show()
        else:
            self._show_if_due()

    def note_scores(self, text: str) -> None:
        """Show the scores of the last validation from now on."""
        self._scores = text
        self._show_if_due()

    def start_evaluation(self, label: str, num_batches: int | None) -> None:
        """Show the batches of a validation or test, too."""
        self._evaluation = Gauge(label, 0, num_batches, stays=self._training is None)
        self._num_evaluated = 0
        self._pause_start = self._clock()
        self._open()

    def advance_evaluation(self) -> None:
        """Count a batch of the evaluation."""
        self._num_evaluated += 1
        self._show_if_due()

    def end_evaluation(self) -> None:
        """Hide the batches of the evaluation; does nothing if there is none."""
        if self._evaluation is None:
            return
        if self._training is None:
            self._show()
        self._evaluation = None
        self._rate.skip(self._clock() - self._pause_start)

    def close(self) -> None:
        """Show the final state, and finish the output."""
        if self._surface is None:
            return
        # The losses are not read again, because after an error, reading them may fail, too.
        if self._training is not None:
            self._show()
        self._surface.close()
        self._surface = self._training = self._evaluation = None

    def _open(self) -> None:
        if self._surface is None:
            self._surface = open_surface(self._stream)
            self._next_time = self._clock() + self._surface.seconds
            if self._surface.is_live:
                self._show()
        else:
            self._show_if_due()

    def _show_if_due(self) -> None:
        if self._clock() >= self._next_time:
            self._show()

    def _show(self) -> None:
        surface, gauges, now = self._surface, [], self._clock()
        if surface is None:
            return
        if self._training is not None:
            if self._evaluation is None:
                self._rate.record(now, self._num_samples)
            peak = peak_text(self._find_memory())
            speed = ", ".join(filter(None, (self._losses, self._rate.text(), peak)))
            # Where lines are written, the log has written the scores just before.
            scores = self._scores if surface.is_live else ""
            left = ", ".join(filter(None, (self._training.time_left(now), scores)))
            gauges += self._training.gauges(speed, left)
        if self._evaluation is not None:
            gauges.append(dataclasses.replace(self._evaluation, done=self._num_evaluated))
        surface.show(gauges)
        self._next_time = now + surface.seconds


def _read(loss_items: Mapping[str, Any]) -> str:
    """Return the losses as text; copies them to the host."""
    parts = []
    for name, value in loss_items.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().item()
        if isinstance(value, numbers.Real):
            parts.append(f"{name} {number_text(float(value), 4)}")
    return ", ".join(parts)


def create_display(
    is_enabled: bool, *, stream: TextIO | None = None, clock: Clock = time.perf_counter
) -> Display:
    """Return a display; it shows nothing if disabled, and on ranks other than 0.

    Args:
        is_enabled: the argument ``enable_progress_bar`` of the trainer.
        stream: the output stream; ``sys.stderr`` if ``None``.
        clock: returns the time in seconds.
    """
    if is_enabled and get_global_rank() == 0:
        return BarDisplay(stream, clock, find_memory=find_peak_memory)
    return NullDisplay()
