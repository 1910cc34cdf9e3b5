"""Shows the progress of a run: bars on a terminal, and lines of the log, which need no terminal.

A loop reports each event to a :class:`Display`. That takes a fraction of a microsecond, because
losses are read at intervals only. Beside bars, lines are written to the log file only. They show
the learning rates that the last steps have used.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, TextIO
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from helios.core.loss_means import LossMeans, Viewer
from helios.core.utils import find_peak_memory, peak_text
from helios.distributed.collectives import get_global_rank
from helios.protocols import Clock
from helios.schedule import Schedule
from helios.terminal.root_logger import log_to_file
from helios.terminal.screen import Bars, Gauge, open_bars
from helios.text import number_text, rate_text

_LOGGER = logging.getLogger(__name__)
_RATE_SECONDS = 10.0
_DRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0
_QUICK_SECONDS = 1.0


class Display(ABC):
    """Shows the progress of a run; loops report events to it.

    Attributes:
        is_shown: whether it shows iterations; if not, they need not be reported.
        viewers: what shows mean losses on its own, at times of its own, once training has begun.
    """

    is_shown: ClassVar[bool] = True
    viewers: tuple[Viewer, ...] = ()

    @abstractmethod
    def start_training(
        self,
        schedule: Schedule,
        *,
        epoch: int,
        done_in_epoch: int,
        num_batches: int | None,
        steps_done: int,
        step_in_epoch: int,
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
    ) -> None:
        """Start at the position of a new or resumed run.

        Args:
            schedule: the options of the run.
            epoch: number of completed epochs.
            done_in_epoch: completed batches of the current epoch.
            num_batches: batches of the current epoch, if known.
            steps_done: number of completed steps.
            step_in_epoch: completed steps of the current epoch.
            find_optimizers: returns the optimizers by path.
        """

    @abstractmethod
    def start_epoch(self, epoch: int, num_batches: int | None, done: int, step: int = 0) -> None:
        """Start an epoch, or continue inside it.

        Args:
            epoch: number of completed epochs.
            num_batches: batches of this epoch, if known.
            done: completed batches of this epoch.
            step: completed steps of this epoch.
        """

    @abstractmethod
    def expect_line(self) -> None:
        """Prepare for an iteration at whose end ``print_frequency`` is reached."""

    @abstractmethod
    def advance(
        self,
        losses: LossMeans,
        num_samples: int,
        moved_step: bool,
        *,
        logged: Mapping[str, float] | None = None,
    ) -> None:
        """Count an iteration.

        Args:
            losses: the losses, to which those of the iteration were added.
            num_samples: samples of the iteration.
            moved_step: whether the iteration completed a step.
            logged: the means that are logged, where ``print_frequency`` is reached.
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

    def start_training(self, schedule: Schedule, **position: Any) -> None:
        """Do nothing."""

    def start_epoch(self, epoch: int, num_batches: int | None, done: int, step: int = 0) -> None:
        """Do nothing."""

    def expect_line(self) -> None:
        """Do nothing."""

    def advance(
        self,
        losses: LossMeans,
        num_samples: int,
        moved_step: bool,
        *,
        logged: Mapping[str, float] | None = None,
    ) -> None:
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
    """The speed over the last ten seconds, without pauses."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def restart(self, now: float, count: int) -> None:
        self._marks.clear()
        self._marks.append((now, count))

    def skip(self, seconds: float) -> None:
        self._marks = deque((then + seconds, count) for then, count in self._marks)

    def record(self, now: float, count: int) -> None:
        self._marks.append((now, count))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()

    def text(self, unit: str) -> str:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        if end <= start or last == first:
            return ""
        rate = (last - first) / (end - start)
        return f"{rate:.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


@dataclasses.dataclass
class _Training:
    """Counters of a training, and the position and time at which this session started."""

    schedule: Schedule
    steps: int
    epochs: int = 0
    batches: int = 0
    num_batches: int | None = None
    step_in_epoch: int = 0
    is_between_epochs: bool = False
    first_position: float = 0.0
    first_time: float = 0.0

    def begin_epoch(self, epoch: int, num_batches: int | None, done: int, step: int) -> None:
        self.epochs, self.num_batches, self.batches = epoch, num_batches, done
        self.step_in_epoch = step
        self.is_between_epochs = False

    def end_epoch(self) -> None:
        # The counts of its batches and steps are still shown, but not part of the position.
        self.epochs += 1
        self.is_between_epochs = True

    def position(self) -> float:
        """Return the progress of the run, in units of ``total_steps``."""
        if not self.schedule.is_by_epoch:
            return self.steps
        if self.is_between_epochs or not self.num_batches:
            return self.epochs
        return self.epochs + self.batches / self.num_batches

    def time_left(self, now: float) -> str:
        """Return the estimated time left at the speed of this session, including validation."""
        covered = self.position() - self.first_position
        if covered <= 0 or not math.isfinite(self.schedule.total_steps):
            return ""
        left = (
            max(0.0, self.schedule.total_steps - self.position())
            * (now - self.first_time)
            / covered
        )
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"

    @property
    def steps_of_epoch(self) -> int | None:
        """Steps of the current epoch; ``None`` if unknown."""
        if self.num_batches is None:
            return None
        total = math.ceil(self.num_batches / self.schedule.accumulation_steps)
        # A model that steps its optimizers itself may do so in each batch.
        return total if total >= self.step_in_epoch else None

    @property
    def steps_of_run(self) -> int | None:
        """Steps of the whole run; ``None`` if unknown."""
        if not math.isfinite(self.schedule.total_steps):
            return None
        if not self.schedule.is_by_epoch:
            return int(self.schedule.total_steps)
        total = (
            None
            if self.steps_of_epoch is None
            else self.steps_of_epoch * int(self.schedule.total_steps)
        )
        return total if total is not None and total >= self.steps else None

    def gauges(self, speed: str, left: str) -> list[Gauge]:
        """Return the gauges: epochs and steps of the current epoch, or steps."""
        total = int(self.schedule.total_steps) if math.isfinite(self.schedule.total_steps) else None
        if not self.schedule.is_by_epoch:
            text = ", ".join(filter(None, (speed, left)))
            return [Gauge("steps", self.steps, total, text, stays=True)]
        return [
            Gauge("epochs", self.epochs, total, left, stays=True),
            Gauge("steps", self.step_in_epoch, self.steps_of_epoch, speed),
        ]


class ProgressDisplay(Display):
    """Shows bars on a terminal if asked to, and writes lines to the log.

    EPOCH unit has two bars, for epochs and for steps of the current epoch; ITERATION unit has one,
    for steps. A validation or test adds one for its batches. A line is written at each multiple of
    ``print_frequency``, or every 30 seconds; beside bars, to the log file only.

    Args:
        has_bars: whether to show bars where there is a terminal.
        stream: the output stream of the bars; ``sys.stderr`` if ``None``.
        clock: returns the time in seconds.
        find_memory: returns peaks of memory in bytes; called once per update.
    """

    def __init__(
        self,
        has_bars: bool = True,
        stream: TextIO | None = None,
        clock: Clock = time.perf_counter,
        *,
        find_memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._has_bars = has_bars
        self._stream = stream
        self._clock = clock
        self._find_memory = find_memory
        self._is_open = False
        self._bars: Bars | None = None
        self._training: _Training | None = None
        self._evaluation: Gauge | None = None
        self._rates = UsedRates(dict)
        self._sample_rate, self._step_rate = _Rate(), _Rate()
        self._has_frequency = False
        # When there is something to draw or to log at the earliest, and when the first of these is.
        self._next_drawing = self._next_line = self._next_evaluation_line = self._next_time = 0.0
        self._num_samples = 0
        self._num_evaluated = 0
        self._pause_start = 0.0
        self._losses = ""
        self._scores = ""

    def start_training(
        self,
        schedule: Schedule,
        *,
        epoch: int,
        done_in_epoch: int,
        num_batches: int | None,
        steps_done: int,
        step_in_epoch: int,
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
    ) -> None:
        """Show the start of the run, and start measuring its speed."""
        training = _Training(schedule, steps_done)
        training.begin_epoch(epoch, num_batches, done_in_epoch, step_in_epoch)
        training.first_position = training.position()
        training.first_time = now = self._clock()
        self._training = training
        self._has_frequency = schedule.logs
        self._sample_rate.restart(now, self._num_samples)
        self._step_rate.restart(now, steps_done)
        self._rates = UsedRates(find_optimizers)
        if schedule.accumulation_steps > 1:
            self._rates.open()
        self._open()
        bar = () if self._bars is None else (Viewer.BAR,)
        self.viewers = bar if schedule.logs else (*bar, Viewer.LINE)

    def start_epoch(self, epoch: int, num_batches: int | None, done: int, step: int = 0) -> None:
        """Show the steps of an epoch."""
        if self._training is not None:
            self._training.begin_epoch(epoch, num_batches, done, step)
            self._draw_if_due()

    def expect_line(self) -> None:
        """Note the rates that the steps of the iteration use."""
        self._rates.open()

    def advance(
        self,
        losses: LossMeans,
        num_samples: int,
        moved_step: bool,
        *,
        logged: Mapping[str, float] | None = None,
    ) -> None:
        """Count an iteration; reads the losses only where it shows them."""
        training = self._training
        if training is None:
            return
        training.batches += 1
        if moved_step:
            training.steps += 1
            training.step_in_epoch += 1
        self._num_samples += num_samples
        if logged is not None:
            self._write_line(logged)
        now = self._clock()
        if now < self._next_time:
            return
        if self._bars is not None and now >= self._next_drawing:
            self._losses = ", ".join(_describe(losses.pop_means(Viewer.BAR)))
            self._draw()
        if not self._has_frequency and now >= self._next_line:
            # Watching the steps costs time in each: only the line of a step that is watched knows
            # its rates. Where updates are rare, lines do not wait for one.
            is_watched = self._rates.is_open
            self._rates.open()
            if is_watched and (moved_step or now >= self._next_line + _LINE_SECONDS):
                self._write_line(losses.pop_means(Viewer.LINE))
        self._plan()

    def _write_line(self, means: Mapping[str, float]) -> None:
        """Log how far the run has come."""
        training, now = self._training, self._clock()
        assert training is not None
        self._step_rate.record(now, training.steps)
        total = "" if training.steps_of_run is None else f"/{training.steps_of_run}"
        left = training.time_left(now)
        parts = [
            f"step {training.steps}{total}",
            f"epoch {training.epochs + 1}",
            *_describe(means),
            *self._rates.texts(),
            self._step_rate.text("steps"),
            f"eta {left}" if left else "",
        ]
        self._say("  ".join(filter(None, parts)))
        # Watching costs little where steps are rare, and a line must not wait for two of them.
        is_rare = training.schedule.accumulation_steps > 1
        if not is_rare and now < self._next_line + _QUICK_SECONDS:
            self._rates.close()
        self._next_line = now + _LINE_SECONDS

    def _say(self, text: str) -> None:
        if self._bars is None:
            _LOGGER.info("%s", text)
        else:
            log_to_file(_LOGGER, text)

    def end_epoch(self) -> None:
        """Count an epoch."""
        if self._training is not None:
            self._training.end_epoch()
            self._draw_if_due()

    def note_scores(self, text: str) -> None:
        """Show the scores of the last validation from now on."""
        self._scores = text
        self._draw_if_due()

    def start_evaluation(self, label: str, num_batches: int | None) -> None:
        """Show the batches of a validation or test, too."""
        self._evaluation = Gauge(label, 0, num_batches, stays=self._training is None)
        self._num_evaluated = 0
        self._pause_start = now = self._clock()
        self._next_evaluation_line = now + _LINE_SECONDS
        self._open()

    def advance_evaluation(self) -> None:
        """Count a batch of the evaluation."""
        self._num_evaluated += 1
        now = self._clock()
        if now < self._next_time:
            return
        if self._bars is not None and now >= self._next_drawing:
            self._draw()
        if self._evaluation is not None and now >= self._next_evaluation_line:
            total = self._evaluation.total
            of = "" if total is None else f"/{total}"
            self._say(f"{self._evaluation.label}  batch {self._num_evaluated}{of}")
            self._next_evaluation_line = now + _LINE_SECONDS
        self._plan()

    def end_evaluation(self) -> None:
        """Hide the batches of the evaluation; does nothing if there is none."""
        if self._evaluation is None:
            return
        if self._training is None:
            self._draw()
        self._evaluation = None
        self._plan()
        pause = self._clock() - self._pause_start
        self._sample_rate.skip(pause)
        self._step_rate.skip(pause)

    def close(self) -> None:
        """Show the final state, and finish the output."""
        self._rates.close()
        # The losses are not read again, because after an error, reading them may fail, too.
        if self._training is not None:
            self._draw()
        if self._bars is not None:
            self._bars.close()
        self._bars = self._training = self._evaluation = None
        self._is_open = False

    def _open(self) -> None:
        if self._is_open:
            self._draw_if_due()
        else:
            self._is_open = True
            self._bars = open_bars(self._stream) if self._has_bars else None
            self._next_line = self._clock() + _LINE_SECONDS
            self._draw()
        self._plan()

    def _plan(self) -> None:
        """Determine when the clock next says that something is due."""
        drawing = math.inf if self._bars is None else self._next_drawing
        if self._evaluation is None:
            line = math.inf if self._has_frequency else self._next_line
        else:
            line = self._next_evaluation_line
        self._next_time = min(drawing, line)

    def _draw_if_due(self) -> None:
        if self._bars is not None and self._clock() >= self._next_drawing:
            self._draw()

    def _draw(self) -> None:
        bars, gauges, now = self._bars, [], self._clock()
        if bars is None:
            return
        if self._training is not None:
            if self._evaluation is None:
                self._sample_rate.record(now, self._num_samples)
            peak = peak_text(self._find_memory())
            speed = ", ".join(filter(None, (self._losses, self._sample_rate.text("samples"), peak)))
            left = self._training.time_left(now)
            left = ", ".join(filter(None, (f"{left} left" if left else "", self._scores)))
            gauges += self._training.gauges(speed, left)
        if self._evaluation is not None:
            gauges.append(dataclasses.replace(self._evaluation, done=self._num_evaluated))
        bars.show(gauges)
        self._next_drawing = now + _DRAW_SECONDS


def _describe(means: Mapping[str, float]) -> list[str]:
    return [f"{name} {number_text(mean, 4)}" for name, mean in means.items()]


def create_display(
    has_bars: bool, *, stream: TextIO | None = None, clock: Clock = time.perf_counter
) -> Display:
    """Return a display; it shows nothing on ranks other than 0.

    Args:
        has_bars: the argument ``enable_progress_bar`` of the trainer.
        stream: the output stream of the bars; ``sys.stderr`` if ``None``.
        clock: returns the time in seconds.
    """
    if get_global_rank() == 0:
        return ProgressDisplay(has_bars, stream, clock, find_memory=find_peak_memory)
    return NullDisplay()


class UsedRates:
    """Notes the rates of each step when it is made: schedulers may change them right after it.

    Args:
        find_optimizers: returns those of the run, by path.
    """

    def __init__(self, find_optimizers: Callable[[], Mapping[str, Optimizer]]) -> None:
        self._find_optimizers = find_optimizers
        # A script may make new optimizers all the time.
        self._used: MutableMapping[Optimizer, list[Any]] = WeakKeyDictionary()
        self._hook: Any = None

    @property
    def is_open(self) -> bool:
        """Whether steps are watched."""
        return self._hook is not None

    def open(self) -> None:
        """Begin to watch the steps; a second call does nothing."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._see)

    def close(self) -> None:
        """Stop watching, and forget what was seen; a second call does nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._used.clear()

    def _see(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[optimizer] = _rates_of(optimizer)

    def texts(self) -> list[str]:
        """Return e.g. ``["lr 8.2e-4"]``: of each optimizer, and of each group if they differ.

        An optimizer whose steps were not watched has the rates of its next one.
        """
        found = self._find_optimizers()
        parts = []
        for path, optimizer in found.items():
            rates = self._used.get(optimizer) or _rates_of(optimizer)
            texts = dict.fromkeys(rate_text(float(rate)) for rate in rates)
            name = "lr" if len(found) == 1 else f"lr {path}"
            if texts:
                parts.append(f"{name} {'/'.join(texts)}")
        return parts


def _rates_of(optimizer: Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # Schedulers change a tensor in place.
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
