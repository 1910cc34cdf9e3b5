"""``Trainer.find_lr``: a short run with a growing learning rate, without lasting effects.

The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), with rates
that grow exponentially.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from helios.core import rng
from helios.core.loss_means import as_numbers
from helios.core.utils import import_extra
from helios.counters import TrainingState, TrainingUnit
from helios.data.datamodule import DataModule
from helios.errors import ArgumentError
from helios.hooks.bus import overridden
from helios.hooks.events import EVENTS
from helios.launch.launcher import Launch
from helios.loops.loop import Loop, find_loops
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.start.model_setup import undone
from helios.start.objects import PluginTable, check_subjects
from helios.start.options import Options
from helios.start.processes import choose_processes, choose_replicas
from helios.state.values import children_of, each_in

_DIVERGED = 4.0
"""A loss of this many times the lowest one ends the search: larger rates diverge faster."""

Train: TypeAlias = Callable[[Options, PluginTable], object]
"""Trains the model with these options and plugins in the place of the trainer's."""


@dataclass(frozen=True)
class RangeTest:
    """The rates that are tried.

    Attributes:
        lowest: the first rate.
        highest: the last one.
        num_steps: the number of rates, one for each optimizer step.
        loss: the name of the loss, for a model with several.

    Raises:
        ArgumentError: if a value is invalid.
    """

    lowest: float
    highest: float
    num_steps: int
    loss: str

    def __post_init__(self) -> None:
        if not 0 < self.lowest < math.inf:
            raise _refusal("lowest", "a positive number", self.lowest, "Pass e.g. 1e-7.")
        if not self.lowest < self.highest < math.inf:
            rule = f"a number above lowest={self.lowest}"
            raise _refusal("highest", rule, self.highest, "Pass e.g. 10.0.")
        if type(self.num_steps) is not int or self.num_steps < 10:
            raise _refusal("num_steps", "an int of at least 10", self.num_steps, "Pass e.g. 100.")

    def rate(self, step: int) -> float:
        """Return the rate of an optimizer step, from 0."""
        return float(self.lowest * (self.highest / self.lowest) ** (step / (self.num_steps - 1)))


def _refusal(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"Trainer.find_lr({name}=...) must be {rule}, got {value!r}. {remedy}")


@final
@dataclass(frozen=True, repr=False)
class LearningRates:
    """The result of a range test.

    Attributes:
        rates: the learning rate of each optimizer step, for the first group of each optimizer.
        losses: the loss of each step, before its update.
    """

    rates: list[float]
    losses: list[float]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(suggestion={self.suggestion!r})"

    @property
    def smoothed(self) -> list[float]:
        """The losses, each averaged over its neighbours: a twentieth of all on either side."""
        return _smooth(self.losses)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest; ``None`` if it never falls.

        The slope is smoothed, too: noise falls fast, but not for long.
        """
        smoothed = self.smoothed
        falling = smoothed[: int(np.argmin(smoothed)) + 1] if smoothed else []
        if len(falling) < 2:
            return None
        slopes = _smooth(np.gradient(smoothed).tolist())
        return self.rates[int(np.argmin(slopes[: len(falling)]))]

    def plot(self) -> Any:
        """Draw the losses over the rates.

        Returns:
            The ``Figure`` of matplotlib: a notebook shows it, its ``savefig`` writes it.

        Raises:
            UsageError: without matplotlib.
        """
        library = import_extra("matplotlib.figure", "report")
        figure = library.Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion: {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="black", linestyle=":", label=label)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        return figure


def _smooth(numbers: list[float]) -> list[float]:
    width = len(numbers) // 20
    places = range(len(numbers))
    windows = (numbers[max(0, place - width) : place + width + 1] for place in places)
    return [float(np.mean(window)) for window in windows]


@final
class _Growing(Plugin):
    """Sets the rate of each step, notes its loss, and ends the run once that diverges."""

    _internals: ClassVar[str] = "_lowest _ratios _test _window losses rates"

    def __init__(self, test: RangeTest) -> None:
        super().__init__("find-lr")
        self._test = test
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._window: list[float] = []
        self._lowest = math.inf
        self._ratios: dict[int, list[float]] = {}

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_step_start(self, state: TrainingState) -> None:
        """Set the rates of a model that steps its optimizers itself."""
        for optimizer in self.context.optimizers.values():
            self._set(optimizer)

    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Set the rates again, after schedulers and hooks of the model have."""
        self._set(optimizer)

    def _set(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        if id(optimizer) not in self._ratios:
            first = float(groups[0]["lr"]) or 1.0
            # A rate of 0, as at the start of a warmup, says nothing of the others.
            ratios = [float(group["lr"]) / first or 1.0 for group in groups]
            self._ratios[id(optimizer)] = ratios
        rate = self._test.rate(len(self.rates))
        for group, ratio in zip(groups, self._ratios[id(optimizer)], strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        """Note the loss of a micro-batch, and at the end of a window that of the step."""
        self._window.append(self._read_loss())
        if not state.is_step_boundary:
            return
        loss, self._window = sum(self._window) / len(self._window), []
        if math.isfinite(loss):
            self.rates.append(self._test.rate(len(self.rates)))
            self.losses.append(loss)
        if not math.isfinite(loss) or self._has_diverged():
            self.context.request_stop("the loss diverges")

    def _has_diverged(self) -> bool:
        """Return whether the mean over the last losses is far above the lowest such mean so far."""
        width = max(2, self._test.num_steps // 10)
        mean = sum(self.losses[-width:]) / width
        if len(self.losses) < width:
            return False
        self._lowest = min(mean, self._lowest)
        return mean - self._lowest > (_DIVERGED - 1) * abs(self._lowest)

    def _read_loss(self) -> float:
        found = as_numbers(self.context.model.loss_items)
        if len(found) == 1:
            return next(iter(found.values()))
        if self._test.loss not in found:
            rule = f"the name of a loss ({', '.join(found) or 'the model has none'})"
            remedy = "Return the loss from train_step, or write it to self.loss_items."
            raise _refusal("loss", rule, self._test.loss, remedy)
        return found[self._test.loss]


def find_rates(
    model: Model,
    datamodule: DataModule,
    test: RangeTest,
    train: Train,
    *,
    options: Options,
    plugins: Sequence[Plugin],
    loop: Loop,
) -> LearningRates:
    """Train with a growing rate, and restore everything.

    Args:
        model: the model.
        datamodule: its data.
        test: the rates.
        train: trains it.
        options: those of the trainer.
        plugins: those of the trainer, of which one may map batches.
        loop: its loop over all epochs.
    """
    check_subjects(model, datamodule)
    growing, table = _Growing(test), PluginTable()
    mapping = [each for each in plugins if overridden(each, EVENTS["process_training_batch"])]
    for plugin in (*mapping, growing):
        table[plugin.plug_id] = plugin
    with _without_trace(model, datamodule, [*mapping, *find_loops(loop).values()]):
        train(_choose_options(options, test), table)
    return LearningRates(growing.rates, growing.losses)


def _choose_options(options: Options, test: RangeTest) -> Options:
    """Return options for a run of a few steps in this process, which writes no files."""
    launch = Launch.read()
    num_processes = choose_processes(options, launch, None)
    return replace(
        options,
        train_unit=TrainingUnit.ITERATION,
        total_steps=test.num_steps,
        max_epochs=None,
        max_steps=test.num_steps,
        valid_frequency=None,
        chkpt_frequency=None,
        print_frequency=None,
        early_stop_cycles=None,
        enable_tensorboard=False,
        enable_file_logging=False,
        print_banner=False,
        chkpt_root=None,
        plugins=(),
        store=None,
        resume="auto",
        allow_changes=(),
        sanity_steps=0,
        max_restarts=0,
        # The bits do not depend on the number of processes.
        nproc=options.nproc if launch.is_given else 1,
        num_replicas=choose_replicas(options, launch, None, num_processes),
    )


@contextmanager
def _without_trace(
    model: Model, datamodule: DataModule, others: Sequence[object]
) -> Iterator[None]:
    """Restore the objects of a run, and all generators, after a block."""
    leading = each_in(datamodule, children_of)
    data = [each for each in leading if isinstance(each, Dataset | DataLoader)]
    logger = logging.getLogger("helios")
    level = logger.level
    # What a search would log of schedulers and of its end is not about the run.
    logger.setLevel(max(level, logging.WARNING))
    try:
        with undone(model, datamodule, *data, *others), rng.stream(rng.key(0, "find_lr")):
            yield
    finally:
        logger.setLevel(level)
