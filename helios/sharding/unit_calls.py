"""Compares which units the processes call, because they gather the parameters of a unit together.

FSDP does not look at it. Where two processes call different units of one size, each would compute
with shards of both; where the sizes differ, the processes would wait or be aborted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import final

from helios.errors import UsageError
from helios.replicas.replicas import Replicas

_COMPARED_AT_ONCE = 1000
_BITS = 64
_FORWARD, _END_OF_FORWARD, _GRADIENTS, _BACKWARD = range(4)
_WORDS = {
    _FORWARD: "the forward of",
    _END_OF_FORWARD: "the end of the forward of",
    _GRADIENTS: "the gradients of",
    _BACKWARD: "the backward of",
}


@final
class UnitCalls:
    """What this process has called since the last comparison.

    The first calls are compared one by one, before anything is gathered or summed; later ones
    together, when backward begins, and at the end of a step or of a pass without gradients, so
    that nothing that was computed in between is used.

    Args:
        replicas: the processes.
        names: of the units.
    """

    def __init__(self, replicas: Replicas, names: Sequence[str]) -> None:
        self._replicas = replicas
        self._names = names
        self._end = len(_WORDS) * len(names)
        self._calls = array("L")
        self._num_single = 0
        self._is_forward = False

    def record_forward(self, unit: int) -> None:
        """Record that the forward of a unit begins."""
        self._is_forward = True
        self._record(_FORWARD, unit)

    def record_end(self, unit: int) -> None:
        """Record that the forward of a unit has ended."""
        self._record(_END_OF_FORWARD, unit)

    def record_gather(self, unit: int) -> None:
        """Record that a unit is gathered in backward; compares before the first one."""
        self._record(_BACKWARD, unit)
        self.compare_forward()

    def _number(self, kind: int, unit: int) -> int:
        return kind * len(self._names) + unit

    def _record(self, kind: int, unit: int) -> None:
        call = self._number(kind, unit)
        self._calls.append(call)
        if self._num_single < _COMPARED_AT_ONCE:
            self._num_single += 1
            self._compare_one(call)

    def _compare_one(self, call: int) -> None:
        made = self._replicas.agree(*(call == other for other in range(self._end + 1)))
        found = [self._describe(other) for other, is_made in enumerate(made) if is_made]
        if len(found) > 1:
            raise _make_error(found)

    def record_sum(self, unit: int) -> None:
        """Record that the gradients of a unit are to be added over the processes.

        Compares before the first one after a forward: after different calls, processes would wait
        for sums that others do not make.
        """
        self._record(_GRADIENTS, unit)
        self.compare_forward()

    def compare_forward(self) -> None:
        """Compare the calls, if a forward was among them."""
        if self._is_forward:
            self.compare()

    def compare(self) -> None:
        """Compare the calls since the last comparison; all processes call this together.

        Raises:
            UsageError: if not all processes have made the same calls in the same order.
        """
        if self._num_single < _COMPARED_AT_ONCE:
            # Another process may come to a single one now, with a message of another length.
            self._compare_one(self._end)
        calls, self._calls = self._calls, array("L")
        self._is_forward = False
        digest = hashlib.blake2b(calls.tobytes(), digest_size=_BITS // 8).digest()
        number = int.from_bytes(digest, "big")
        bits = [bool(number >> place & 1) for place in range(_BITS)]
        agreed = self._replicas.agree(*bits, *(not bit for bit in bits))
        if any(one and zero for one, zero in zip(agreed[:_BITS], agreed[_BITS:], strict=True)):
            raise _make_error(self._find_difference(calls))

    def _find_difference(self, calls: array[int]) -> list[str]:
        tables = self._replicas.gather_objects(calls.tolist())
        for place in range(max(map(len, tables))):
            made = {table[place] if place < len(table) else self._end for table in tables}
            if len(made) > 1:
                return sorted(map(self._describe, made))
        raise AssertionError("digests differ, and so do the calls")

    def _describe(self, call: int) -> str:
        if call == self._end:
            return "the end of its calls"
        kind, unit = divmod(call, len(self._names))
        return f"{_WORDS[kind]} {self._names[unit]}"


def _make_error(found: Sequence[str]) -> UsageError:
    return UsageError(
        "All processes must call the units of a sharded model in the same order, because they "
        f"gather them together, but one came to {found[0]} while another came to "
        f"{' and to '.join(found[1:])}. Call a unit for every replica, and use its result in "
        "the loss, multiplied by zero if need be, or make the choice inside of a unit: take its "
        "parts out of Model.shard()."
    )
