"""Writes a line of the ledger for each iteration of a run.

During an iteration its numbers are only noted; lines are composed later, many at a time.

Each process hashes the batches of its replicas. The hashes are added over all replicas, exactly, so
that their sum does not depend on the number of processes. They are computed late: when processes
exchange them, or when the line is composed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.counters import TrainingState
from helios.ledger.line import write_body, write_float, write_hash
from helios.ledger.run_file import RunFile
from helios.ledger.weight_digests import WeightDigests
from helios.listeners import IterationListener
from helios.storage.content_hash import Content, hash_bytes, hash_content, look_safely, pack_indices

_LOGGER = logging.getLogger(__name__)
# Lines are composed many at a time, which is faster, once numbers of an accelerator have arrived.
_FEWEST, _MOST = 32, 96


class _Iteration(NamedTuple):
    """What a line is composed of later; a number may be a tensor that is still to come."""

    place: list[int]
    batches: Sequence[float]
    losses: dict[str, Any]
    rates: list[Any]
    norm: Any
    rest: dict[str, Any]
    arrival: Any


class LineReceiver(Protocol):
    """What takes the lines: a file, or a comparison."""

    def append(self, body: str, *, is_end: bool = False) -> None:
        """Take a line, given as a JSON object without its closing brace."""
        ...


@final
class LedgerWriter(IterationListener):
    """Writes the lines of the ledger; on ranks other than 0 it only makes fingerprints.

    Args:
        book: takes the lines; ``None`` on ranks that do not write.
        block: the replicas of this process.
        weights: takes the digests of the weights.
        find_optimizers: returns the optimizers by path.
        attributes: those of the model, in which an optimizer may be replaced.
        run_file: takes the times; ``None`` on ranks that do not write.
    """

    def __init__(
        self,
        book: LineReceiver | None,
        block: range,
        *,
        weights: WeightDigests,
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
        attributes: Mapping[str, Any],
        run_file: RunFile | None = None,
    ) -> None:
        self._book = book
        self._block = block
        self._weights = weights
        self._find_optimizers = find_optimizers
        self._attributes = attributes
        self._run_file = run_file
        self._holders: list[tuple[str, Any]] = []
        self._is_nested = True
        self._optimizers: list[Optimizer] = []
        self._losses: dict[str, Any] = {}
        self._iterations: list[_Iteration] = []
        self._is_far = False
        self._has_warned = False

    def batches_fetched(
        self,
        batches: Sequence[Any],
        indices: Sequence[Any] | None,
        contents: Sequence[Content] | None,
    ) -> SeenBatches:
        """Note the batches of an iteration; returns what :meth:`line_due` takes, when added."""
        if contents is None:
            contents = [*map(look_safely, batches)]
        for content in contents:
            if content.failure:
                self._warn("batches", content.failure)
        packed = None if indices is None else [*map(pack_indices, indices)]
        return SeenBatches(self._block, contents, packed)

    def paused(self) -> None:
        """Leave out of the times what has passed since the last iteration."""
        if self._run_file is not None:
            self._run_file.end_pause()

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._warn(what, f"{type(error).__name__}: {error}")

    def _warn(self, what: str, error: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "The ledger cannot read the %s (%s), so its lines lack them.", what, error
            )

    def losses_known(self, losses: Mapping[str, Any]) -> None:
        """Read the losses of an iteration."""
        if self._book is not None:
            self._losses = {str(name): self._read(loss) for name, loss in losses.items()}

    def line_due(
        self, state: TrainingState, totals: Sequence[float], *, norm: Tensor | None = None
    ) -> None:
        """Note the line of an iteration; a collective call if the weights are sharded."""
        rest = self._describe_update(state)
        if self._book is not None:
            self._add_line(state, totals, norm, rest)

    def _describe_update(self, state: TrainingState) -> dict[str, Any]:
        if not state.is_step_boundary:
            return {}
        if not state.is_step_committed:
            return {"skipped": 1}
        is_due = self._weights.is_read and state.global_step % self._weights.every == 0
        return self._digests() if is_due else {}

    def _add_line(
        self,
        state: TrainingState,
        totals: Sequence[float],
        norm: Tensor | None,
        rest: dict[str, Any],
    ) -> None:
        norm = None if norm is None else self._read(norm)
        rates, iteration = self._rates(), state.global_iteration
        if self._run_file is not None:
            self._run_file.note(iteration)
        arrival = _mark_time() if self._is_far else None
        place = [state.global_epoch, iteration, state.global_step]
        line = _Iteration(place, totals, self._losses, rates, norm, rest, arrival)
        self._iterations.append(line)
        if len(self._iterations) >= _MOST:
            self._compose(_FEWEST)

    def training_ended(self, state: TrainingState) -> None:
        """Write the last line of a run that has ended, not only been interrupted."""
        self.settle()
        place = [state.global_epoch, state.global_iteration, state.global_step]
        content: dict[str, Any] = {"at": place, "end": 1}
        if self._weights.is_read:
            content |= self._digests()
            with self._guard("buffers"):
                content |= self._weights.describe_buffers()
        if self._book is not None:
            self._book.append(write_body(content), is_end=True)

    def settle(self) -> None:
        """Wait for numbers on an accelerator, so that all lines are complete."""
        self._compose(0)

    def _compose(self, most: int) -> None:
        """Append the oldest lines that wait, whose numbers have arrived by now.

        Args:
            most: how many of the newest ones wait longer.
        """
        book = self._book
        if book is None:
            return
        count = max(0, len(self._iterations) - most)
        due, self._iterations = self._iterations[:count], self._iterations[count:]
        for iteration in due:
            if iteration.arrival is not None:
                iteration.arrival.synchronize()
            book.append(write_body(_describe(iteration)))

    # Whether a tensor can be read without waiting for an accelerator.
    _is_near = staticmethod(attrgetter("is_cpu"))

    def _read(self, number: Any) -> Any:
        """Return a number as it is now; one of an accelerator arrives later."""
        kind = type(number)
        if kind is float or kind is int or number is None:
            return number
        # A number of the user's own may change until the line is composed.
        try:
            if not isinstance(number, Tensor):
                return float(number)
            if self._is_near(number):
                return number.item()
            self._is_far = True
            return number.detach().to("cpu", non_blocking=number.is_cuda, copy=True)
        except Exception:
            return None

    def _rates(self) -> list[Any]:
        attributes = self._attributes
        is_same = not self._is_nested
        for name, holder in self._holders:
            is_same = is_same and attributes.get(name) is holder
        if not is_same:
            self.epoch_opened()
        rates = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "lr" in group:
                    rate = group["lr"]
                    rates.append(rate if type(rate) is float else self._read(rate))
        return rates

    def epoch_opened(self) -> None:
        """Search for the optimizers, also if one may be another now."""
        found = self._find_optimizers()
        self._optimizers = list(found.values())
        names = {path.partition(".")[0].partition("[")[0] for path in found}
        self._holders = [(name, self._attributes.get(name)) for name in names]
        # One inside of a container may be replaced without a trace in the model.
        direct = [isinstance(holder, Optimizer) for _, holder in self._holders]
        self._is_nested = not all(direct) or not direct

    def _digests(self) -> dict[str, Any]:
        with self._guard("weights"):
            return self._weights.describe()
        return {}


def _describe(iteration: _Iteration) -> dict[str, Any]:
    """Return the content of a line."""
    content: dict[str, Any] = {"at": iteration.place, "data": describe_batches(iteration.batches)}
    if iteration.losses:
        content["loss"] = {name: _digits_of(loss) for name, loss in iteration.losses.items()}
    if iteration.rates:
        content["lr"] = [*map(_digits_of, iteration.rates)]
    if iteration.norm is not None:
        content["norm"] = _digits_of(iteration.norm)
    return content | iteration.rest


def _digits_of(number: Any) -> str | None:
    """Return the bits of a number; ``None`` for what is no number."""
    try:
        return write_float(float(number))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _mark_time() -> Any:
    """Return an event after the copies to the host; ``None`` where copies are complete at once."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


_LOW = 0xFFFF_FFFF
_MODULUS = 1 << 64


@final
class SeenBatches(Sequence[float]):
    """The batches of an iteration; as a sequence, whole numbers to add over all processes.

    They are the upper and the lower half of the sum of the hashes of the samples' indices, those of
    the batches, the number of unseen parts, and that of replicas whose indices are unknown.

    Args:
        block: the replicas of this process.
        contents: what was read of the batch of each.
        indices: the bytes of the indices of the samples of each; ``None`` if unknown.
    """

    __slots__ = ("_block", "_contents", "_indices")

    def __init__(
        self, block: range, contents: Sequence[Content], indices: Sequence[bytes] | None
    ) -> None:
        self._block = block
        self._contents = contents
        self._indices = indices

    def sums(self) -> tuple[int | None, int, int]:
        """Return the sums of both kinds of hashes over replicas, and the number of unseen parts."""
        block, contents, indices = self._block, self._contents, self._indices
        order = None if indices is None else sum(map(hash_bytes, indices, block))
        content = num_unseen = 0
        for each, replica in zip(contents, block, strict=True):
            content += hash_content(each, replica)
            num_unseen += each.num_unseen
        return order, content, num_unseen

    def _numbers(self) -> list[float]:
        # Sums of halves are exact as floats for up to two million replicas.
        found = []
        for hashes in (
            [*map(hash_bytes, self._indices or (), self._block)],
            [*map(hash_content, self._contents, self._block)],
        ):
            found += [sum(each >> 32 for each in hashes), sum(each & _LOW for each in hashes)]
        num_unseen = sum(each.num_unseen for each in self._contents)
        num_unknown = len(self._contents) if self._indices is None else 0
        return [*map(float, (*found, num_unseen, num_unknown))]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: Any) -> Any:
        return self._numbers()[place]

    def __iter__(self) -> Iterator[float]:
        return iter(self._numbers())


def describe_batches(totals: Sequence[float]) -> list[str | int | None]:
    """Return the entry ``data`` of a line.

    Args:
        totals: the batches of all replicas, or the numbers of all processes, added.
    """
    if isinstance(totals, SeenBatches):
        order, content, num_unseen = totals.sums()
    else:
        *halves, num_unseen, num_unknown = map(int, totals)
        order = None if num_unknown else (halves[0] << 32) + halves[1]
        content = (halves[2] << 32) + halves[3]
    first = None if order is None else write_hash(order % _MODULUS)
    found: list[str | int | None] = [first, write_hash(content % _MODULUS)]
    return [*found, num_unseen] if num_unseen else found
