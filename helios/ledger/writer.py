"""Writes a line of the ledger for each iteration of a run.

A line is composed when its iteration ends. Each process makes the fingerprints of its batches. They
are summed over replicas together with the losses, exactly and in integers, so that the sum does not
depend on the number of processes.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer

from helios.ledger.book import Book
from helios.ledger.line import write_float, write_hash
from helios.state import TrainingState
from helios.storage.content_hash import Fingerprint, fingerprint, hash_indices

_LOGGER = logging.getLogger(__name__)
Marks: TypeAlias = dict[str, tuple[float, float]]
"""64-bit numbers, each as its upper and its lower half, which are added over replicas."""
ORDER, CONTENT, UNSEEN = "\0order", "\0content", "\0unseen"
_LOW = 0xFFFF_FFFF
_MODULUS = 1 << 64
# Where a number of an accelerator belongs in a line; JSON text holds no such character.
_LATE = "\x01"
_MOST_LATE = 32


def _as_mark(value: int) -> tuple[float, float]:
    return float(value >> 32), float(value & _LOW)


def _as_hash(mark: tuple[float, float]) -> str:
    high, low = mark
    return write_hash(((int(high) << 32) + int(low)) % _MODULUS)


@final
class LedgerWriter:
    """Writes the lines of the ledger; on ranks other than 0 it only makes fingerprints.

    Args:
        book: the file; ``None`` on ranks that do not write.
        block: the replicas of this process.
        find_weights: returns all parameters by name.
        find_optimizers: returns the optimizers by path.
        attributes: those of the model, where an optimizer may be replaced.

    Attributes:
        marks: those of each replica of this process, in the current iteration.
    """

    def __init__(
        self,
        book: Book | None,
        block: range,
        *,
        find_weights: Callable[[], Mapping[str, Tensor]],
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
        attributes: Mapping[str, Any],
    ) -> None:
        self.marks: list[Marks] = []
        self._book = book
        self._block = block
        self._find_weights = find_weights
        self._find_optimizers = find_optimizers
        self._attributes = attributes
        self._holders: dict[str, Any] = {}
        self._optimizers: list[Optimizer] = []
        self._late: deque[tuple[str, list[Tensor]]] = deque()
        self._arriving: list[Tensor] = []
        self._names: dict[str, str] = {}
        self._has_warned = False

    def see(self, batches: Sequence[Any], indices: Sequence[Any] | None) -> None:
        """Make the fingerprints of the batches of an iteration, before hooks can change them.

        Args:
            batches: the batch of each replica of this process.
            indices: the indices of the samples of each batch; ``None`` if unknown.
        """
        self.marks = []
        for number, (replica, batch) in enumerate(zip(self._block, batches, strict=False)):
            found = self._look(batch, replica)
            order = 0 if indices is None else hash_indices(indices[number], replica)
            self.marks.append(
                {
                    ORDER: _as_mark(order),
                    CONTENT: _as_mark(found.value),
                    UNSEEN: (float(found.num_unseen), float(indices is None)),
                }
            )

    def _look(self, batch: Any, replica: int) -> Fingerprint:
        try:
            return fingerprint(batch, replica)
        except Exception as error:
            # A tensor of a user's class may fail here; that is no reason to stop.
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "The ledger cannot read the content of batches (%s: %s) and does not cover it.",
                    type(error).__name__,
                    error,
                )
            return Fingerprint(0, num_unseen=1)

    def write(
        self,
        state: TrainingState,
        losses: Mapping[str, Any],
        marks: Mapping[str, tuple[float, float]],
        *,
        norm: Any = None,
    ) -> None:
        """Write the line of an iteration, at its end.

        Args:
            state: the counters.
            losses: numbers or tensors of one element, as means over replicas.
            marks: the sums over all replicas.
            norm: the norm of the gradients, if one was computed.
        """
        book = self._book
        if book is None:
            return
        body = f"{{{self._place(state)},{self._data(marks)}"
        if losses:
            body += f',"loss":{{{self._losses(losses)}}}'
        rates = self._rates()
        if rates:
            body += f',"lr":[{rates}]'
        if norm is not None:
            body += f',"norm":{self._number(norm)}'
        if state.is_step_boundary:
            if not state.is_step_committed:
                body += ',"skipped":1'
            elif state.global_step % book.every == 0:
                body += self._digests()
        if self._arriving or self._late:
            self._late.append((body, self._arriving))
            self._arriving = []
            self._append_late(_MOST_LATE)
        else:
            book.append(body)

    def end(self, state: TrainingState) -> None:
        """Write the last line of a run that has ended, not only been interrupted."""
        self.settle()
        if self._book is not None:
            self._book.append(f'{{{self._place(state)},"end":1{self._digests()}')

    def settle(self) -> None:
        """Wait for numbers on an accelerator, so that all lines are complete."""
        self._append_late(0)

    def _append_late(self, most: int) -> None:
        """Append the oldest waiting lines, whose numbers have arrived by now."""
        while len(self._late) > most and self._book is not None:
            body, numbers = self._late.popleft()
            for number in numbers:
                body = body.replace(_LATE, write_float(float(number)), 1)
            self._book.append(body)

    @staticmethod
    def _is_far(tensor: Tensor) -> bool:
        """Whether reading a number would wait for an accelerator."""
        return tensor.device.type != "cpu"

    def _number(self, number: Any) -> str:
        """Return the bits of a number in quotes; those of an accelerator follow later."""
        if isinstance(number, Tensor):
            number = number.detach()
            if self._is_far(number):
                # A copy: the training may change it in place.
                self._arriving.append(number.clone())
                return f'"{_LATE}"'
        return f'"{write_float(float(number))}"'

    @staticmethod
    def _place(state: TrainingState) -> str:
        return f'"at":[{state.global_epoch},{state.global_iteration},{state.global_step}]'

    @staticmethod
    def _data(marks: Mapping[str, tuple[float, float]]) -> str:
        num_unseen, num_unknown = marks[UNSEEN]
        order = "null" if num_unknown else f'"{_as_hash(marks[ORDER])}"'
        unseen = f",{int(num_unseen)}" if num_unseen else ""
        return f'"data":[{order},"{_as_hash(marks[CONTENT])}"{unseen}]'

    def _losses(self, losses: Mapping[str, Any]) -> str:
        names, parts = self._names, []
        for name, loss in losses.items():
            if name not in names:
                names[name] = json.dumps(str(name))
            parts.append(f"{names[name]}:{self._number(loss)}")
        return ",".join(parts)

    def _rates(self) -> str:
        attributes = self._attributes
        if not self._holders or any(
            attributes.get(name) is not holder for name, holder in self._holders.items()
        ):
            self.find_optimizers()
        return ",".join(
            [
                self._number(group["lr"])
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                if "lr" in group
            ]
        )

    def find_optimizers(self) -> None:
        """Search for the optimizers: at the start of an epoch, or if an attribute has changed."""
        found = self._find_optimizers()
        self._optimizers = list(found.values())
        names = {path.partition(".")[0].partition("[")[0] for path in found}
        self._holders = {name: self._attributes.get(name) for name in names}

    def _digests(self) -> str:
        weights = self._find_weights()
        found = fingerprint({name: weights[name] for name in sorted(weights)})
        names = {id(tensor): name for name, tensor in weights.items()}
        state = {
            path: _state_of(optimizer, names)
            for path, optimizer in sorted(self._find_optimizers().items())
        }
        moments = fingerprint(state)
        return f',"weights":"{write_hash(found.value)}","optimizer":"{write_hash(moments.value)}"'


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, whose order may differ."""
    groups = [
        {
            **{name: value for name, value in sorted(group.items()) if name != "params"},
            "params": sorted(names.get(id(each), "") for each in group["params"]),
        }
        for group in optimizer.param_groups
    ]
    state = {
        names.get(id(each), ""): optimizer.state[each]
        for group in optimizer.param_groups
        for each in group["params"]
        if each in optimizer.state
    }
    return {"groups": groups, "state": {name: state[name] for name in sorted(state)}}
