"""Writes a line of the ledger for each iteration of a run.

During an iteration its numbers are only noted; lines are made when they are flushed: after a second
at the latest, and before each commit.

Each process hashes the batches of its replicas. The hashes are added over all replicas, exactly, so
that their sum does not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import Clock, read_rates
from helios.counters import TrainingState
from helios.ledger.book import EVERY
from helios.ledger.line import Hashes, LineReceiver, write_body, write_hash, write_iteration
from helios.listeners import Iteration, Recorder, Validated
from helios.storage.content_hash import (
    Content,
    Sums,
    factor_of,
    fingerprint,
    fingerprint_indices,
    read_safely,
    read_sums,
    weigh,
)

_LOGGER = logging.getLogger(__name__)
_SECONDS = 1.0
_MOST_WAITING = 64
# Numbers of an accelerator arrive late: the newest lines wait longer, so that training does not.
_ON_THEIR_WAY = 32


_Line: TypeAlias = tuple[
    tuple[int, int, int],
    tuple[Sequence[Content | Sums], Sequence[Any] | None],
    Sequence[float],
    dict[str, Any],
    list[Any],
    Any,
    Mapping[str, Any],
    Any,
]
"""What a line is made of later: epoch, iteration and step; what was read of the batches, and their
indices; the hashes of all processes; losses, rates and norm, each of which may be a tensor that is
still to come; what few lines have; and when the tensors have come."""


@final
class LedgerWriter(Recorder):
    """Makes the lines of the ledger; on ranks other than 0 only fingerprints.

    Args:
        book: takes the lines; ``None`` on ranks other than 0.
        block: the replicas of this process.
        num_processes: processes that run replicas.
        find_weights: returns all parameters by name.
        find_buffers: returns the persistent buffers of the networks that are saved, by name.
        find_optimizers: returns the optimizers by path.
        reads_weights: whether this process reads them: it writes the ledger, or holds shards.
        every: the number of steps between two digests of the weights.
        attributes: those of the model, in which an optimizer may be replaced.
        mark: that of the ledger in the checkpoint that the run continues from.
        after: the last iteration before this start.
        unscored: names of scores that are left out.
        clock: returns seconds.
    """

    def __init__(
        self,
        book: LineReceiver | None,
        block: range,
        *,
        num_processes: int = 1,
        find_weights: Callable[[], Mapping[str, Tensor]],
        find_buffers: Callable[[], Mapping[str, Tensor]],
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
        reads_weights: bool,
        every: int = EVERY,
        attributes: Mapping[str, Any],
        mark: Mapping[str, Any] | None = None,
        after: int = 0,
        unscored: Collection[str] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._book = book
        self._block = block
        self._has_others = num_processes > 1
        self._find_weights = find_weights
        self._find_buffers = find_buffers
        self._find_optimizers = find_optimizers
        self._reads_weights = reads_weights
        self._every = every
        self._attributes = attributes
        self._mark = mark
        self._after = after
        self._unscored = unscored
        self._clock = clock
        self._holders: list[tuple[str, Any]] = []
        self._is_nested = True
        self._optimizers: list[Optimizer] = []
        self._batches: tuple[Sequence[Content | Sums], Sequence[Any] | None] = ((), None)
        self._waiting: list[_Line] = []
        self._due = 0.0
        self._is_far = False
        self._has_warned = False

    def batches_fetched(
        self,
        batches: Sequence[Any],
        indices: Sequence[Any] | None,
        contents: Sequence[Content | Sums] | None,
    ) -> Sequence[float]:
        """Note the batches of an iteration; returns their hashes where others have some, too."""
        if contents is None:
            contents = [*map(read_sums, batches)]
        for content in contents:
            if type(content) is Content and content.failure:
                self._warn("batches", content.failure)
        self._batches = contents, indices
        return as_numbers(add_up(self._block, *self._batches)) if self._has_others else ()

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

    def iteration_ended(self, iteration: Iteration) -> None:
        """Note the line of an iteration; a collective call if the weights are sharded."""
        state, norm, rest = iteration.state, iteration.norm, _NOTHING
        if state.is_step_boundary:
            if not state.is_step_committed:
                rest = _SKIPPED
            elif state.global_step % self._every == 0 and self._reads_weights:
                rest = self._digests()
        if self._book is None:
            return
        losses = {}
        for name, loss in iteration.means.items():
            is_near = type(loss) is Tensor and self._is_near(loss) and not loss.ndim
            losses[name] = loss.item() if is_near else self._read(loss)
        if norm is not None:
            norm = self._read(norm)
        rates = self._find_rates(iteration.rates)
        place = state.global_epoch, state.global_iteration, state.global_step
        arrival = _mark_time() if self._is_far else None
        line = place, self._batches, iteration.totals, losses, rates, norm, rest, arrival
        self._waiting.append(line)
        now = self._clock()
        if now >= self._due or len(self._waiting) >= _MOST_WAITING:
            self._due = now + _SECONDS
            self._flush(_ON_THEIR_WAY if self._is_far else 0)

    def training_ended(self, state: TrainingState) -> None:
        """Write the last line of a run that has ended, not only been interrupted."""
        self.settle()
        place = [state.global_epoch, state.global_iteration, state.global_step]
        content: dict[str, Any] = {"at": place, "end": 1}
        if self._reads_weights:
            content |= self._digests()
            with self._guard("buffers"):
                buffers = sorted(self._find_buffers().items())
                content["buffers"] = {name: hash_buffer(buffer) for name, buffer in buffers}
        if self._book is not None:
            self._book.append([write_body(content)])

    def opened(self) -> None:
        """Begin or continue the ledger."""
        if self._book is not None:
            self._book.open(self._mark, after=self._after)

    def saving(self) -> dict[str, Any]:
        """Return the size and hash of the ledger; ``None`` on ranks other than 0."""
        self.settle()
        return {"ledger": None if self._book is None else self._book.mark()}

    def before_commit(self) -> None:
        """Wait until all lines are on the disk; raises ``OSError`` if they cannot be written."""
        if self._book is not None:
            self._book.sync()

    def validated(self, validated: Validated) -> None:
        """Add the scores after the line of their iteration."""
        if self._book is not None:
            self.settle()
            iteration = validated.state.global_iteration
            self._book.append_scores(iteration, validated.scores, self._unscored)

    def closed(self) -> None:
        """Write the lines that wait, and close the ledger."""
        if self._book is not None:
            # After an error of an accelerator, its numbers cannot be read.
            with contextlib.suppress(RuntimeError):
                self.settle()
            self._book.close()

    def settle(self) -> None:
        """Write all lines that wait, once numbers on an accelerator have arrived."""
        self._flush(0)

    def _flush(self, most: int) -> None:
        """Append the oldest lines that wait.

        Args:
            most: how many of the newest ones wait longer.
        """
        count = len(self._waiting) - most
        if self._book is None or count <= 0:
            return
        due, self._waiting = self._waiting[:count], self._waiting[count:]
        self._book.append(self._make(due))

    def _make(self, lines: Iterable[_Line]) -> Iterator[str]:
        for place, batches, totals, losses, rates, norm, rest, arrival in lines:
            if arrival is not None:
                arrival.synchronize()
            hashes = from_numbers(totals) if self._has_others else add_up(self._block, *batches)
            yield write_iteration(place, hashes, losses=losses, rates=rates, norm=norm, rest=rest)

    # Whether a tensor can be read without waiting for an accelerator.
    _is_near = staticmethod(attrgetter("is_cpu"))

    def _read(self, number: Any) -> Any:
        """Return a number as it is now; one of an accelerator arrives later."""
        kind = type(number)
        if kind is float or kind is int or number is None:
            return number
        # A number of the user's own may change until the line is made.
        try:
            if not isinstance(number, Tensor):
                return float(number)
            if self._is_near(number):
                return number.item()
            self._is_far = True
            return number.detach().to("cpu", non_blocking=number.is_cuda, copy=True)
        except Exception:
            return None

    def _find_rates(self, used: Mapping[Optimizer, list[Any]]) -> list[Any]:
        """Return the rates of each optimizer: those that its step has used, or that it holds."""
        attributes = self._attributes
        is_same = not self._is_nested
        for name, holder in self._holders:
            is_same = is_same and attributes.get(name) is holder
        if not is_same:
            self._search()
        found: list[Any] = []
        for each in self._optimizers:
            found += used.get(each) or read_rates(each)
        return found

    def epoch_opened(self, epoch: int, num_batches: int | None, step: int) -> None:
        """Search for the optimizers again: one inside of an object may be another now."""
        self._is_nested = True

    def _search(self) -> None:
        found = self._find_optimizers()
        self._optimizers = list(found.values())
        names = {path.partition(".")[0].partition("[")[0] for path in found}
        self._holders = [(name, self._attributes.get(name)) for name in names]
        # One inside of a container may be replaced without a trace in the model.
        direct = [isinstance(holder, Optimizer) for _, holder in self._holders]
        self._is_nested = not all(direct) or not direct

    def _digests(self) -> dict[str, Any]:
        with self._guard("weights"):
            return digest_weights(self._find_weights(), self._find_optimizers())
        return {}


_NOTHING: Mapping[str, Any] = {}
_SKIPPED: Mapping[str, Any] = {"skipped": 1}


def _mark_time() -> Any:
    """Return an event after the copies to the host; ``None`` where copies are complete at once."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


_LOW = 0xFFFF_FFFF
_MODULUS = 1 << 64


def add_up(
    block: range, contents: Sequence[Content | Sums], indices: Sequence[Any] | None
) -> Hashes:
    """Return the hashes of the batches of some replicas, added up.

    Args:
        block: the replicas.
        contents: what was read of the batch of each.
        indices: those of the samples of each; ``None`` if unknown.
    """
    order = content = num_unseen = 0
    for place, (replica, found) in enumerate(zip(block, contents, strict=False)):
        factor = factor_of(replica)
        if type(found) is Content:
            content += found.fingerprint * factor
            num_unseen += found.num_unseen
        else:
            content += weigh(*found) * factor
        if indices is not None:
            order += fingerprint_indices(indices[place]) * factor
    return Hashes(None if indices is None else order % _MODULUS, content % _MODULUS, num_unseen)


def as_numbers(hashes: Hashes) -> list[float]:
    """Return numbers whose sums over processes are those of the hashes.

    These are halves: their sums are exact as floats for up to two million processes.
    """
    order = hashes.order or 0
    halves = (order >> 32, order & _LOW, hashes.content >> 32, hashes.content & _LOW)
    return [*map(float, (*halves, hashes.num_unseen, hashes.order is None))]


def from_numbers(totals: Sequence[float]) -> Hashes:
    """Return the hashes of all replicas from the sums of :func:`as_numbers`."""
    *halves, num_unseen, num_unknown = map(int, totals)
    order = None if num_unknown else ((halves[0] << 32) + halves[1]) % _MODULUS
    return Hashes(order, ((halves[2] << 32) + halves[3]) % _MODULUS, num_unseen)


def digest_weights(
    weights: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer]
) -> dict[str, Any]:
    """Return hashes of the weights and of the state of the optimizers, as a line has them.

    A collective call if the weights are sharded.

    Raises:
        Exception: whatever reading a tensor of the user raises.
    """
    names = {id(tensor): name for name, tensor in weights.items()}
    state = {path: _state_of(each, names) for path, each in optimizers.items()}
    hashes = [write_hash(fingerprint(value)) for value in (weights, state)]
    return {"weights": hashes[0], "optimizer": hashes[1]}


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, whose order may differ."""
    groups, state, number = [], {}, 0
    for group in optimizer.param_groups:
        found = []
        for parameter in group["params"]:
            name = names.get(id(parameter), f"?{number}")
            number += 1
            found.append(name)
            if parameter in optimizer.state:
                state[name] = optimizer.state[parameter]
        rest = {name: value for name, value in group.items() if name != "params"}
        groups.append({**rest, "params": sorted(found)})
    return {"groups": groups, "state": state}


def hash_buffer(buffer: Tensor) -> str | None:
    """Return the hash of a buffer; ``None`` if its content cannot be read, as of a sparse one."""
    # A device may hash large ones in its own way.
    content = read_safely(buffer.cpu())
    return None if content.num_unseen else write_hash(content.fingerprint)
