"""Writes a line of the ledger for each iteration of a run.

Each process hashes the batches of its replicas. The hashes are added over all replicas with the
losses, exactly, so that their sum does not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.ledger.line import write_float, write_hash
from helios.ledger.tensor_digests import TensorDigests
from helios.ledger.timing import Timing
from helios.state import TrainingState
from helios.storage.content_hash import Fingerprint, fingerprint, hash_indices

_LOGGER = logging.getLogger(__name__)
_LOW = 0xFFFF_FFFF
_MODULUS = 1 << 64
# Lines are composed many at a time, which is faster, once numbers of an accelerator have arrived.
_FEWEST, _MOST = 32, 96
_NOTHING = "null"


def _join(high: float, low: float) -> str:
    return write_hash(((int(high) << 32) + int(low)) % _MODULUS)


def _quote(number: Any) -> str:
    """Return the bits of a number as a JSON text, ``null`` for what is no number."""
    try:
        return f'"{write_float(float(number))}"'
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _NOTHING


class LineReceiver(Protocol):
    """What takes the lines: a file, or a comparison.

    Attributes:
        every: the number of steps between two hashes of the weights.
    """

    every: int

    def append(self, body: str) -> None:
        """Take a line, given as a JSON object without its closing brace."""
        ...


class _Iteration(NamedTuple):
    """What a line will say, before it is composed; the numbers are floats, or tensors to come."""

    place: tuple[int, int, int]
    totals: Sequence[float]
    losses: list[tuple[Any, Any]]
    rates: list[Any]
    norm: Any
    rest: str
    moment: Any


@final
class LedgerWriter:
    """Writes the lines of the ledger; on ranks other than 0 it only makes fingerprints.

    Args:
        book: takes the lines; ``None`` on ranks that do not write.
        block: the replicas of this process.
        find_weights: returns all parameters by name.
        find_optimizers: returns the optimizers by path.
        attributes: those of the model, in which an optimizer may be replaced.
        tensors: takes the digests of all tensors; ``None`` unless the ledger is full.
        timing: the times of the run; ``None`` on ranks that do not write.
    """

    def __init__(
        self,
        book: LineReceiver | None,
        block: range,
        *,
        find_weights: Callable[[], Mapping[str, Tensor]],
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
        attributes: Mapping[str, Any],
        tensors: TensorDigests | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._book = book
        self._tensors = tensors
        self._block = block
        self._find_weights = find_weights
        self._find_optimizers = find_optimizers
        self._attributes = attributes
        self._timing = timing
        self._holders: dict[str, Any] = {}
        self._optimizers: list[Optimizer] = []
        self._losses: list[tuple[Any, Any]] = []
        self._iterations: list[_Iteration] = []
        self._is_far = False
        self._names: dict[Any, str] = {}
        self._has_warned = False

    def see(self, batches: Sequence[Any], indices: Sequence[Any] | None) -> list[float]:
        """Hash the batches of an iteration, before anybody can change them.

        Args:
            batches: the batch of each replica of this process.
            indices: those of the samples of each; ``None`` if unknown.

        Returns:
            Whole numbers that must be added over all processes: the argument of :meth:`write`.
        """
        totals = [0.0] * 6
        for number, (replica, batch) in enumerate(zip(self._block, batches, strict=False)):
            content = self._look(batch, replica)
            order = 0 if indices is None else hash_indices(indices[number], replica)
            totals[0] += order >> 32
            totals[1] += order & _LOW
            totals[2] += content.value >> 32
            totals[3] += content.value & _LOW
            totals[4] += content.num_unseen
            totals[5] += indices is None
        if self._tensors is not None:
            with self._guard("batches"):
                self._tensors.see(batches)
        return totals

    def open(self) -> None:
        """Begin to watch the steps of optimizers, if the ledger is full."""
        if self._tensors is not None:
            self._tensors.open(self._before_step)

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self._tensors is not None:
            self._tensors.close()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._tensors is not None:
            with self._guard("gradients"):
                self._tensors.before_step(optimizer)

    def begin_turn(self, iteration: int) -> None:
        """Note the generators before the step of the next replica of this process."""
        if self._tensors is not None:
            with self._guard("generators"):
                self._tensors.begin_turn(iteration)

    def take_gradients(self, optimizer: Optimizer) -> None:
        """Note the averaged gradients of an optimizer, before they are clipped."""
        if self._tensors is not None:
            with self._guard("gradients"):
                self._tensors.take_gradients(optimizer)

    def _look(self, batch: Any, replica: int) -> Fingerprint:
        try:
            return fingerprint(batch, replica)
        except Exception as error:
            # A tensor of a user's class may fail here; that is no reason to stop.
            self._warn("batches", error)
            return Fingerprint(0, num_unseen=1)

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "The ledger cannot read the %s (%s: %s), so its lines lack them.",
                what,
                type(error).__name__,
                error,
            )

    def take_losses(self, losses: Mapping[str, Any]) -> None:
        """Read the losses of an iteration, before the events of its end.

        Args:
            losses: numbers or tensors of one element, as means over replicas.
        """
        if self._book is not None:
            self._losses = [(name, self._read(loss)) for name, loss in losses.items()]

    def write(
        self, state: TrainingState, totals: Sequence[float], *, norm: Tensor | None = None
    ) -> None:
        """Write the line of an iteration, at its end; a collective call if the ledger is full.

        Args:
            state: the counters.
            totals: what :meth:`see` has returned, added over all processes.
            norm: the norm of the gradients, if one was computed.
        """
        if self._tensors is not None:
            self._tensors.exchange()
        book = self._book
        if book is None:
            return
        rest = ""
        if state.is_step_boundary:
            if not state.is_step_committed:
                rest = ',"skipped":1'
            elif state.global_step % book.every == 0:
                rest = self._digests()
        if self._tensors is not None:
            with self._guard("weights"):
                rest += self._tensors.describe(state)
        rates = self._rates()
        norm = None if norm is None else self._read(norm)
        moment = _mark_time() if self._is_far else None
        place = (state.global_epoch, state.global_iteration, state.global_step)
        iterations = self._iterations
        iterations.append(_Iteration(place, totals, self._losses, rates, norm, rest, moment))
        if len(iterations) >= _MOST:
            self._compose(_FEWEST)

    def end(self, state: TrainingState) -> None:
        """Write the last line of a run that has ended, not only been interrupted."""
        self.settle()
        if self._book is not None:
            place = f"{state.global_epoch},{state.global_iteration},{state.global_step}"
            self._book.append(f'{{"at":[{place}],"end":1{self._digests()}')

    def settle(self) -> None:
        """Wait for numbers on an accelerator, so that all lines are complete."""
        self._compose(0)

    def _compose(self, most: int) -> None:
        """Append the oldest lines that wait, whose numbers have arrived by now.

        Args:
            most: how many of the newest ones wait longer.
        """
        book, names = self._book, self._names
        if book is None:
            return
        count = max(0, len(self._iterations) - most)
        due, self._iterations = self._iterations[:count], self._iterations[count:]
        for place, totals, losses, rates, norm, rest, moment in due:
            if moment is not None:
                moment.synchronize()
            parts = []
            for name, loss in losses:
                if name not in names:
                    names[name] = json.dumps(str(name))
                parts.append(f"{names[name]}:{_quote(loss)}")
            epoch, iteration, step = place
            body = f'{{"at":[{epoch},{iteration},{step}],{_data(totals)}'
            if parts:
                body += f',"loss":{{{",".join(parts)}}}'
            if rates:
                body += f',"lr":[{",".join(map(_quote, rates))}]'
            if norm is not None:
                body += f',"norm":{_quote(norm)}'
            book.append(body + rest)
        if due and self._timing is not None:
            self._timing.note(due[-1].place[1])

    @staticmethod
    def _waits(tensor: Tensor) -> bool:
        """Whether to read a number would wait for an accelerator."""
        return not tensor.is_cpu

    def _read(self, number: Any) -> Any:
        """Return a number as it is now; one of an accelerator arrives later."""
        if isinstance(number, Tensor):
            number = number.detach()
            if self._waits(number):
                self._is_far = True
                return number.to("cpu", non_blocking=number.is_cuda, copy=True)
            return number.item() if number.numel() == 1 else None
        if type(number) not in (float, int, type(None)):
            # A number of the user's own may change until the line is composed.
            with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
                return float(number)
            return None
        return number

    def _rates(self) -> list[Any]:
        attributes = self._attributes
        if not self._holders or any(
            attributes.get(name) is not holder or not isinstance(holder, Optimizer)
            for name, holder in self._holders.items()
        ):
            self.find_optimizers()
        return [
            self._read(group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if "lr" in group
        ]

    def find_optimizers(self) -> None:
        """Search for the optimizers: at the start of an epoch, or if one may be another now."""
        found = self._find_optimizers()
        self._optimizers = list(found.values())
        names = {path.partition(".")[0].partition("[")[0] for path in found}
        self._holders = {name: self._attributes.get(name) for name in names}

    def _digests(self) -> str:
        try:
            weights = self._find_weights()
            names = {id(tensor): name for name, tensor in weights.items()}
            state = {path: _state_of(each, names) for path, each in self._find_optimizers().items()}
            hashes = [write_hash(fingerprint(value).value) for value in (weights, state)]
        except Exception as error:
            self._warn("weights", error)
            return ""
        return f',"weights":"{hashes[0]}","optimizer":"{hashes[1]}"'


def _mark_time() -> Any:
    """Return an event after the copies to the host; ``None`` where copies are complete at once."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _data(totals: Sequence[float]) -> str:
    *_, num_unseen, num_unknown = totals
    order = _NOTHING if num_unknown else f'"{_join(totals[0], totals[1])}"'
    unseen = f",{int(num_unseen)}" if num_unseen else ""
    return f'"data":[{order},"{_join(totals[2], totals[3])}"{unseen}]'


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
