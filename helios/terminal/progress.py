"""Shows the progress of a run: bars on a terminal, and lines of the log, which need no terminal.

A display listens to the iterations. That takes a fraction of a microsecond, because losses are read
at intervals only. With bars, lines are written to the log file only.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from torch.optim import Optimizer
from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from helios.core.loss_means import Viewer
from helios.core.utils import Clock, peak_memory_text, read_rates
from helios.listeners import Iteration, IterationListener
from helios.schedule import Schedule
from helios.terminal.root_logger import Bar, log_to_file
from helios.text import number_text, rate_text

_LOGGER = logging.getLogger(__name__)
_TEXT_SECONDS = 1.0
_LINE_SECONDS = 30.0


class Display(IterationListener):
    """Shows nothing; the base of displays of a run's progress.

    Attributes:
        viewers: the viewers of mean losses, each with its own window, once training has begun.
    """

    viewers: tuple[Viewer, ...] = ()

    def close(self) -> None:
        """Finish the output; a second call does nothing."""


class ProgressDisplay(Display):
    """Shows bars on a terminal if asked to, and writes lines to the log.

    EPOCH unit has two bars, for epochs and for steps of the current epoch; ITERATION unit has one,
    for steps. A validation or test adds one for its batches. A line is written at each multiple of
    ``print_frequency``, or every 30 seconds; with bars, to the log file only.

    Args:
        has_bars: whether to show bars where there is a terminal.
        stream: the output stream of the bars; ``sys.stderr`` if ``None``.
        clock: returns the time in seconds.
    """

    def __init__(
        self, has_bars: bool = True, stream: TextIO | None = None, clock: Clock = time.perf_counter
    ) -> None:
        self._has_bars = has_bars
        self._stream = stream
        self._clock = clock
        self._bars: Bars | None = None
        self._schedule: Schedule | None = None
        self._evaluation = ""
        self._used: dict[Optimizer, list[Any]] = {}
        self._epoch = self._steps = self._step_in_epoch = 0
        self._num_batches: int | None = None
        self._next_text = self._next_line = 0.0

    def training_started(
        self,
        schedule: Schedule,
        *,
        epoch: int,
        steps_done: int,
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
    ) -> None:
        """Show the start of the run, and start measuring its speed."""
        self._schedule, self._steps, self._find_optimizers = schedule, steps_done, find_optimizers
        self._start = self._mark = (self._clock(), steps_done)
        self._next_line = self._start[0] + _LINE_SECONDS
        bars = self._open()
        total = int(schedule.total_steps) if math.isfinite(schedule.total_steps) else None
        if schedule.is_by_epoch:
            bars.open("epochs", total, done=epoch, stays=True)
        else:
            bars.open("steps", total, done=steps_done, stays=True)
        self._next_text = 0.0 if bars.is_drawn else math.inf
        self.viewers = (
            *((Viewer.BAR,) if bars.is_drawn else ()),
            *((Viewer.LINE,) if schedule.shows_by_time else ()),
        )

    def epoch_opened(self, epoch: int, num_batches: int | None, step: int) -> None:
        """Show the steps of an epoch."""
        self._epoch, self._num_batches, self._step_in_epoch = epoch, num_batches, step
        if self._schedule is not None and self._schedule.is_by_epoch:
            self._open().open("steps", self._steps_of_epoch, done=step)

    @property
    def _steps_of_epoch(self) -> int | None:
        assert self._schedule is not None
        if self._num_batches is None:
            return None
        total = math.ceil(self._num_batches / self._schedule.accumulation_steps)
        # A model that steps its optimizers itself may do so in each batch.
        return total if total >= self._step_in_epoch else None

    def iteration_ended(self, iteration: Iteration) -> None:
        """Count an iteration; reads the losses only if it shows them."""
        if self._schedule is None or self._bars is None:
            return
        state, losses, logged = iteration.state, iteration.loss_means, iteration.logged
        # The rates that steps have used: schedulers have changed those of the optimizers by now.
        self._used |= iteration.rates
        if state.is_step_boundary and state.is_step_committed:
            self._steps += 1
            self._step_in_epoch += 1
            if self._bars.is_drawn:
                self._bars.advance("steps")
        now = self._clock()
        if not self._schedule.shows_by_time:
            if logged is not None:
                self._write_line(logged)
        elif now >= self._next_line:
            self._write_line(losses.pop_means(Viewer.LINE))
        if now >= self._next_text:
            texts = [*_describe(losses.pop_means(Viewer.BAR)), peak_memory_text()]
            self._bars.describe("steps", ", ".join(filter(None, texts)))
            self._next_text = now + _TEXT_SECONDS

    def _write_line(self, means: Mapping[str, float]) -> None:
        """Log how far the run has come, and the speed since the last line."""
        now, total = self._clock(), self._steps_of_run
        of = "" if total is None else f"/{total}"
        parts = [f"step {self._steps}{of}", f"epoch {self._epoch + 1}", *_describe(means)]
        parts += self._rates()
        (then, steps), (start, first) = self._mark, self._start
        if self._steps > steps and now > then:
            rate = (self._steps - steps) / (now - then)
            parts.append(f"{rate:.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
        if total is not None and self._steps > first:
            left = (total - self._steps) * (now - start) / (self._steps - first)
            parts.append(f"eta {datetime.timedelta(seconds=round(left))}")
        self._say("  ".join(parts))
        self._mark, self._next_line = (now, self._steps), now + _LINE_SECONDS

    @property
    def _steps_of_run(self) -> int | None:
        assert self._schedule is not None
        total = self._schedule.total_steps
        if self._schedule.is_by_epoch:
            most = math.inf if self._schedule.max_steps is None else self._schedule.max_steps
            total = min(total * (self._steps_of_epoch or math.inf), most)
        return int(total) if self._steps <= total < math.inf else None

    def _rates(self) -> list[str]:
        """Return e.g. ``["lr 8.2e-4"]``: of each optimizer, and of each group if they differ."""
        found = self._find_optimizers()
        texts = {}
        for path, optimizer in found.items():
            # A model that makes the steps itself has changed the rates, if it does, by now.
            rates = self._used.get(optimizer) or read_rates(optimizer)
            texts[path] = "/".join(dict.fromkeys(rate_text(float(rate)) for rate in rates))
        # One that the model has replaced is not kept.
        self._used = {each: self._used[each] for each in found.values() if each in self._used}
        return [
            f"lr {text}" if len(found) == 1 else f"lr {path} {text}"
            for path, text in texts.items()
            if text
        ]

    def _say(self, text: str) -> None:
        if self._bars is not None and self._bars.is_drawn:
            log_to_file(_LOGGER, text)
        else:
            _LOGGER.info("%s", text)

    def epoch_ended(self) -> None:
        """Count an epoch."""
        if self._bars is not None:
            self._bars.advance("epochs")

    def evaluated(self, label: str, number: int, total: int | None) -> None:
        """Show the batches of a validation or test, too."""
        if number == 0:
            self._evaluation = label
            self._open().open(label, total, stays=self._schedule is None)
            self._next_line = max(self._next_line, self._clock() + _LINE_SECONDS)
        if number == 0 or self._bars is None:
            return
        self._bars.advance(label)
        now = self._clock()
        if now >= self._next_line:
            of = "" if total is None else f"/{total}"
            self._say(f"{label}  batch {number}{of}")
            self._next_line = now + _LINE_SECONDS

    def paused(self) -> None:
        """Hide the batches of an evaluation."""
        if self._evaluation and self._bars is not None:
            self._bars.close(self._evaluation)
        self._evaluation = ""

    def close(self) -> None:
        """Finish the output."""
        if self._bars is not None:
            self._bars.close()
        self._bars = self._schedule = None
        self._evaluation, self._used = "", {}

    def _open(self) -> Bars:
        self._bars = self._bars or Bars(is_wanted=self._has_bars, stream=self._stream)
        return self._bars


class Bars:
    """Progress bars of tqdm by label, from :meth:`open` on; nothing is drawn without a terminal.

    Args:
        stream: where they are drawn and log lines are written; ``sys.stderr`` if ``None``.
    """

    def __init__(self, *, is_wanted: bool, stream: TextIO | None) -> None:
        self._stream = stream
        self._bars: dict[str, Any] = {}
        has_widgets = stream is None and issubclass(tqdm, tqdm_notebook)
        self.is_drawn = is_wanted and (has_widgets or _is_terminal(stream or sys.stderr))

    def open(self, label: str, total: int | None, *, done: int = 0, stays: bool = False) -> None:
        """Show a bar; one of the same label is removed before."""
        self.close(label)
        if self.is_drawn:
            self._bars[label] = Bar(
                desc=label,
                total=total,
                initial=done,
                file=self._stream,
                leave=stays,
                dynamic_ncols=True,
                unit="",
            )

    def advance(self, label: str) -> None:
        """Count one; does nothing if there is no such bar."""
        if label in self._bars:
            self._bars[label].update()

    def describe(self, label: str, text: str) -> None:
        """Show a text behind a bar; does nothing if there is no such bar."""
        if label in self._bars:
            self._bars[label].set_postfix_str(text)

    def close(self, label: str | None = None) -> None:
        """Remove a bar, or all of them; bars that stay are left on the screen."""
        # The lowest bar first: closing one moves those below it up.
        for name in [name for name in reversed(self._bars) if label in (None, name)]:
            self._bars.pop(name).close()


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with room for bars; some terminals report 0 columns."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True
    except (AttributeError, ValueError):
        # A service may have no stderr, or a closed one, and an object in its place no isatty.
        return False


def _describe(means: Mapping[str, float]) -> list[str]:
    return [f"{name} {number_text(mean, 4)}" for name, mean in means.items()]
