"""Means of losses for several viewers, each over the iterations since its last mean.

Each viewer has its own sums, so that viewers do not affect each other, and a loss that is not
finite affects one mean only. A number on the CPU is read when it is added. On an accelerator sums
stay there, and one addition serves all viewers: it waits when a mean is read.

Sums are in float64, for any dtype of the model. A total in a coarse dtype stops growing: in bf16,
256 + 1 is 256, and fp16 ends at 65504.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from helios.counters import TrainingState
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.listeners import Iteration, IterationListener
from helios.text import with_step

_LOGGER = logging.getLogger(__name__)

# By name: a sum, and of how many numbers it is, or its weight.
_Parts: TypeAlias = dict[str, tuple[float, float]]
Gather: TypeAlias = Callable[[Mapping[int, Any]], dict[int, Any]]
WeightedSums: TypeAlias = Mapping[str, tuple[Any, Any, float]]
"""By name: the mean that is shown, its sum and its weight."""


@final
@dataclass(frozen=True, init=False, eq=False)
class WeightedLoss:
    """A loss that is a sum over a number of items, such as the tokens of a batch.

    If ``train_step`` returns it, the gradient of an accumulation window is the gradient of the sum
    over all its micro-batches and replicas, divided once by the sum of their weights, and losses
    are logged as such means. An update of a window whose weights are all zero is skipped.

    Attributes:
        sum: the sum, a scalar tensor with a graph.
        weight: its number of items: a finite number of at least 0. A tensor of one element is read,
            without its graph; on a GPU that waits for it.

    Raises:
        ArgumentError: for a weight out of range.

    Example:
        >>> loss = WeightedLoss(sum=torch.tensor(6.0), weight=torch.tensor(4))
        >>> loss.weight, loss.mean
        (4.0, tensor(1.5000))
    """

    sum: Tensor
    weight: float

    def __init__(self, sum: Tensor, weight: float | Tensor) -> None:  # noqa: A002
        if not isinstance(sum, Tensor) or sum.numel() != 1:
            raise ArgumentTypeError(
                f"WeightedLoss(sum=...) must be a tensor of one element, got {sum!r}. Pass the sum "
                'of the losses, e.g. with reduction="sum".'
            )
        number = float(weight.detach() if isinstance(weight, Tensor) else weight)
        if not 0 <= number < math.inf:
            raise ArgumentError(
                "WeightedLoss(weight=...) must be a finite number of at least 0, got "
                f"{weight!r}. Pass the number of parts that the sum is of, e.g. (labels != "
                "-100).sum()."
            )
        object.__setattr__(self, "sum", sum)
        object.__setattr__(self, "weight", number)

    @property
    def mean(self) -> Tensor:
        """The sum divided by the weight, detached; with the weight 0, the sum."""
        return self.sum.detach() / (self.weight or 1.0)


class Viewer(enum.IntEnum):
    """The viewers of means, each with its own window."""

    FILES = 0
    """Event files, ``on_log`` and the line of the log, at multiples of ``print_frequency``."""
    VALIDATION = 1
    """The line of a validation in the log."""
    BAR = 2
    LINE = 3
    """The line of the log that is due by the clock."""


KEPT = (Viewer.FILES, Viewer.VALIDATION)
"""Viewers with the same windows in each repetition of a run: their sums are state."""
_NUM_VIEWERS = len(Viewer)


@final
class _Total:
    """The numbers of one name: a sum for each viewer, and how many there were, or their weight."""

    __slots__ = ("begins", "count", "sums")

    def __init__(self) -> None:
        self.sums: list[float] | Tensor = [0.0] * _NUM_VIEWERS
        self.count: float = 0
        self.begins: list[float] = [0] * _NUM_VIEWERS

    def add_tensor(self, number: Tensor) -> None:
        """Add a number that stays where it is."""
        summand = as_summand(number)
        sums = self.sums
        if not isinstance(sums, Tensor) or sums.device != summand.device:
            sums = torch.tensor(self.read(), dtype=summand.dtype, device=summand.device)
            self.sums = sums
        sums += summand

    def read(self) -> list[float]:
        """Return the sums; waits for an accelerator."""
        sums = self.sums
        return sums if isinstance(sums, list) else sums.tolist()

    def count_for(self, viewer: int) -> float:
        """Return how many numbers there were since a viewer has looked last, or their weight."""
        return self.count - self.begins[viewer]

    def clear(self, viewer: int) -> None:
        """Begin anew for a viewer."""
        sums = self.sums
        if isinstance(sums, Tensor):
            sums[viewer].zero_()  # to assign a number waits for an accelerator
        else:
            sums[viewer] = 0.0
        self.begins[viewer] = self.count


_Totals: TypeAlias = dict[str, _Total]


@final
class LossMeans(IterationListener):
    """Sums of the losses of a run, and of other numbers of its replicas.

    Attributes:
        nonfinite: the first loss of this start that was not finite; empty if all were.
    """

    def __init__(self) -> None:
        self.nonfinite = ""
        self._state = TrainingState()
        self._viewers: tuple[Viewer, ...] = ()
        self._losses: _Totals = {}
        self._beside: dict[int, _Totals] = {}

    def serve(self, viewers: Iterable[Viewer]) -> None:
        """Add up for these viewers only from now on."""
        self._viewers = tuple(viewers)

    def iteration_ended(self, iteration: Iteration) -> None:
        """Add the losses of an iteration; anything but a single number is skipped."""
        self._state, weighted = iteration.state, iteration.weighted
        for name, number in iteration.losses.items():
            weight: float = 1
            if name in weighted and weighted[name][0] is number:
                _, number, weight = weighted[name]
            # As in RunningSums: a plain tensor of the CPU is read at once.
            is_near = type(number) is Tensor and number.is_cpu and not number.ndim
            value = number.item() if is_near else number
            if type(value) is not float:
                value = _read(value)
                if not isinstance(value, float):
                    self._add_other(self._losses, name, value, weight)
                    continue
            total = self._losses.get(name)
            if total is None:
                total = self._losses[name] = _Total()
            total.count += weight
            sums: Any = total.sums
            for viewer in self._viewers:
                sums[viewer] += value
            # Neither is the difference of two infinities.
            if value - value != 0:
                self._warn_of_nonfinite(name, value)
        if iteration.is_last:
            self.report_nonfinite()

    def add_beside(self, replica: int, numbers: Mapping[str, Any]) -> None:
        """Add what the step of a replica has logged, or has returned along with its losses.

        Args:
            replica: the replica.
            numbers: by name; each alone, or as a sum with its weight.
        """
        totals = self._beside.setdefault(replica, {})
        for name, number in numbers.items():
            weight = 1.0
            if type(number) is tuple:
                number, weight = number
            total = totals.get(name)
            if total is None or type(number) is not float or type(total.sums) is not list:
                self._add_other(totals, name, _read(number), weight)
                continue
            total.count += weight
            sums = total.sums
            for viewer in self._viewers:
                sums[viewer] += number

    def _add_other(
        self, totals: _Totals, name: str, number: float | Tensor | None, weight: float = 1
    ) -> None:
        """Add a number to the total of its name; ``None`` is none."""
        if number is None:
            return
        total = totals.get(name)
        if total is None:
            total = totals[name] = _Total()
        total.count += weight
        if isinstance(number, Tensor):
            total.add_tensor(number)
            return
        sums: Any = total.sums
        for viewer in self._viewers:
            sums[viewer] += number

    def pop_means(self, viewer: Viewer, gather: Gather | None = None) -> dict[str, float]:
        """Return the means since a viewer's last call, by name, and begin its next window.

        A name that occurs in some iterations only has the mean over these. If a loss has the same
        name, numbers of replicas are skipped.

        Args:
            viewer: the viewer.
            gather: returns values by replica, those of all processes; ``None`` for the replicas
                of this process only.
        """
        if viewer not in self._viewers:
            return {}
        self.report_nonfinite()
        losses = _parts(self._losses, viewer)
        own = {replica: _parts(totals, viewer) for replica, totals in self._beside.items()}
        for totals in (self._losses, *self._beside.values()):
            for total in totals.values():
                total.clear(viewer)
        by_replica = own if gather is None else gather(own)
        sums = _join(by_replica[replica] for replica in sorted(by_replica)) | losses
        names = [*losses, *(name for name in sums if name not in losses)]
        return {name: sums[name][0] / sums[name][1] for name in names}

    def report_nonfinite(self) -> None:
        """Report sums that are not finite on an accelerator; waits for it."""
        for name, total in self._losses.items():
            if isinstance(total.sums, Tensor):
                odd = [part for part in total.read() if not math.isfinite(part)]
                if odd:
                    self._warn_of_nonfinite(name, odd[0], when=" or earlier")

    def _warn_of_nonfinite(self, name: str, value: float, *, when: str = "") -> None:
        """Warn of the first loss that is not finite, and note it for the summary.

        Args:
            name: its name.
            value: its value, or the sum of which it is a part.
            when: said of the iteration.
        """
        if self.nonfinite:
            return
        state = self._state
        iteration = with_step(state.global_iteration, state.global_step)
        place = f"epoch {state.global_epoch}, iteration {iteration}{when}"
        self.nonfinite = f"{name} was {value} ({place})"
        _LOGGER.warning(
            "%s is %s in %s, and no warning follows for later ones. The plugin NaNGuard names the "
            "samples, and keeps such losses from the weights.",
            name,
            value,
            place,
        )

    def capture(self, gather: Gather) -> dict[str, Any] | None:
        """Return the sums that are state; ``None`` without any. All processes call this together.

        Args:
            gather: as in :meth:`pop_means`.
        """
        viewers = [each for each in self._viewers if each in KEPT]
        if not viewers:
            return None
        beside = {replica: _capture(each, viewers) for replica, each in self._beside.items()}
        return {"losses": _capture(self._losses, viewers), "beside": gather(beside)}

    def restore(
        self, sums: Mapping[str, Any], state: TrainingState, replicas: Collection[int]
    ) -> None:
        """Continue with what :meth:`capture` has returned.

        Args:
            sums: the sums.
            state: the counters of the iteration that they end with.
            replicas: those of this process.
        """
        self._state = state
        self._losses = _restore(sums["losses"])
        self._beside = {
            replica: _restore(part)
            for replica, part in sums["beside"].items()
            if replica in replicas
        }


@final
class LossLog(IterationListener):
    """Logs the mean losses, over all replicas, when due.

    Args:
        means: the sums.
        log: logs numbers by name.
        gather: as in :meth:`LossMeans.pop_means`.
    """

    def __init__(
        self, means: LossMeans, log: Callable[[Mapping[str, Any]], None], gather: Gather
    ) -> None:
        self._means = means
        self._log = log
        self._gather = gather

    def iteration_ended(self, iteration: Iteration) -> None:
        """Log the means since the last log."""
        iteration.logged = None
        if iteration.logs:
            means = self._means.pop_means(Viewer.FILES, self._gather)
            # What is no number cannot be logged, and says so.
            others = {name: x for name, x in iteration.losses.items() if name not in means}
            self._log({f"train/{name}": loss for name, loss in (means | others).items()})
            iteration.logged = means


def _read(number: Any) -> float | Tensor | None:
    """Return a number; a tensor if reading it could mean to wait, ``None`` if it is no number."""
    try:
        if isinstance(number, Tensor):
            # Other classes of tensors decide themselves what reading one costs.
            if type(number) is not Tensor or not number.is_cpu:
                return number.detach().reshape(()) if number.numel() == 1 else None
            number = number.item()
        return None if isinstance(number, str) else float(number)
    except (TypeError, ValueError, RuntimeError):
        return None


def _parts(totals: _Totals, viewer: int) -> _Parts:
    """Return what a viewer has not seen yet, by name."""
    return {
        name: (total.read()[viewer], total.count_for(viewer))
        for name, total in totals.items()
        if total.count_for(viewer)
    }


def _join(tables: Iterable[_Parts]) -> _Parts:
    """Add up tables in their order."""
    found: _Parts = {}
    for table in tables:
        for name, (part, count) in table.items():
            known = found.get(name)
            found[name] = (part, count) if known is None else (known[0] + part, known[1] + count)
    return found


def _capture(totals: _Totals, viewers: Collection[Viewer]) -> dict[str, Any]:
    # Names that nobody waits for are there, too: they keep their place in the order.
    return {
        name: {each.name.lower(): [total.read()[each], total.count_for(each)] for each in viewers}
        for name, total in totals.items()
    }


def _restore(state: Mapping[str, Any]) -> _Totals:
    totals: _Totals = {}
    for name, parts in state.items():
        total = totals[name] = _Total()
        total.count = max((count for _, count in parts.values()), default=0)
        total.begins = [total.count] * _NUM_VIEWERS
        for viewer in Viewer:
            part, count = parts.get(viewer.name.lower(), (0.0, 0))
            total.sums[viewer] = part
            total.begins[viewer] = total.count - count
    return totals


def as_summand(value: Any) -> Any:
    """Return a number for a sum: tensors and NumPy's numbers in float64, all others as they are.

    A tensor stays on its device, without its graph; where the device lacks float64, as Apple's GPUs
    do, it is in float32.
    """
    if isinstance(value, Tensor):
        try:
            return _cast(value, torch.float64)
        except (TypeError, RuntimeError):
            return _cast(value, torch.float32)
    return float(value) if isinstance(value, np.number | np.bool_) else value


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A complex number stays one: it is refused where a real number is needed.
    return value.detach().to(torch.promote_types(value.dtype, dtype))


@final
class RunningSums:
    """Sums of losses by name, in float64 and on their device.

    Sums of plain CPU tensors are kept as numbers, which cost a fraction of an operation on tensors,
    and become tensors when the table is read.

    Args:
        table: the sums so far.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table
        # Newer than what the table has under the same names.
        self._numbers: dict[str, float] = {}

    def add(self, losses: Mapping[str, Any]) -> None:
        """Add losses: numbers or tensors, which are not changed."""
        numbers = self._numbers
        for name, loss in losses.items():
            if type(loss) is Tensor and loss.is_cpu and not loss.ndim:
                value = loss.item()
                known = numbers.get(name)
                if known is None and type(value) is float:
                    known = self._as_number(name)
                if known is not None:
                    numbers[name] = known + value
                    continue
            table = self.table()
            part = loss.detach() if isinstance(loss, Tensor) and loss.requires_grad else loss
            # Not in place: a sum that a hook has kept would change, but not after a resume. The
            # first loss gives the sum its type, so later ones need no cast of their own.
            table[name] = table[name] + part if name in table else as_summand(part)

    def _as_number(self, name: str) -> float | None:
        """Return the sum of a name as a number; ``None`` if it must be a tensor."""
        # Adding to negative zero returns each number as it is; the entry keeps the place.
        known = self._table.setdefault(name, -0.0)
        if isinstance(known, Tensor):
            is_number = known.is_cpu and not known.ndim and known.dtype is torch.float64
            return known.item() if is_number and type(known) is Tensor else None
        return known if type(known) is float else None

    def table(self) -> dict[str, Any]:
        """Return the table, in which sums of tensors are tensors."""
        for name, number in self._numbers.items():
            self._table[name] = torch.tensor(number, dtype=torch.float64, device="cpu")
        self._numbers.clear()
        return self._table


def as_number(name: str, value: Any) -> float:
    """Return a logged value as a number; copies a tensor from its device.

    Args:
        name: the name that it is logged under, for the error message.
        value: a number, or a tensor of one element.

    Raises:
        UsageError: if it is not a single number.
    """
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"A logged value must be a single number, but {name!r} is {value!r}. Log a number, or "
            "a tensor of one element."
        ) from error


def as_numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores that are single numbers, as floats."""
    numbers = {}
    for name, score in scores.items():
        if isinstance(score, Tensor) and score.numel() == 1:
            score = score.item()
        if isinstance(score, int | float):
            numbers[str(name)] = float(score)
    return numbers
