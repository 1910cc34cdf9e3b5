"""The lines of a ledger: JSON objects, each of which ends in a hash over the chain before it.

A line is a function of the run's definition and of the iteration. It does not depend on time, host,
the number of processes, or how often the run is saved or logged. Numbers are the bits of a float64,
as 16 hexadecimal digits, so lines can be compared as text.

=============  ============================================================================
key            content
=============  ============================================================================
``at``         epoch and iteration, from 1, and the number of optimizer steps so far
``data``       hash of the indices of the samples, and fingerprint of the batches of all
               replicas; ``null`` if unknown. Then the number of parts without fingerprint,
               unless it is zero
``loss``       the losses by name, as means over replicas
``lr``         the learning rates that its step has used, by optimizer and group
``skipped``    1 if a window ended without an update
``norm``       the norm of the gradients before ``clip_norm`` was applied
``weights``    hash of all parameters, in every n-th step
``optimizer``  hash of the state of all optimizers, in every n-th step
``h``          the hash
=============  ============================================================================

The first line is the header: the version of the format, the run's definition, n, and the last
iteration before the ledger begins, which is not zero if the ledger was lost or switched on later.
The last line of a run that has ended has the key ``end``, and ``buffers``: the
hash of each persistent buffer by name, ``null`` where its content cannot be read.

The scores of a validation are a line that hangs beside the chain: its hash is
over the line of the iteration that it follows and over itself, and no other line's hash is over it.
So the chain, and the hash of the last line, are the same with other validations or none.

=============  ============================================================================
key            content
=============  ============================================================================
``scores``     the scores by name
``after``      the iteration that the validation follows
``unscored``   names of scores that are left out because they differ between equal runs
``h``          the hash
=============  ============================================================================
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from helios.errors import LedgerError

VERSION = 3
"""The version of the format."""
_DIGITS = 16
_HASH = b',"h":"'
_SCORES = b'{"scores":'
_PLACE = b'{"at":['
TAIL_BYTES = len(_HASH) + _DIGITS + len(b'"}\n')
"""Bytes at the end of a line that hold its hash."""
_FLOAT = struct.Struct(">d")
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def write_float(number: float) -> str:
    """Return the bits of a number as 16 hexadecimal digits."""
    return _FLOAT.pack(number).hex()


def read_float(digits: str) -> float:
    """Return the number of 16 hexadecimal digits."""
    (number,) = _FLOAT.unpack(bytes.fromhex(digits))
    return float(number)


def describe_scores(scores: Mapping[str, float], unscored: Collection[str], after: int) -> str:
    """Return the line of a validation without its closing brace.

    Args:
        scores: by name.
        unscored: names of those that are left out.
        after: the iteration that the validation follows.
    """
    digits = {name: write_float(x) for name, x in scores.items() if name not in unscored}
    content: dict[str, Any] = {"scores": digits, "after": after}
    left_out = [name for name in scores if name in unscored]
    return write_body(content | ({"unscored": left_out} if left_out else {}))


@lru_cache(maxsize=1024)
def _key(name: object) -> str:
    return f"{json.dumps(str(name))}:"


def _digits(number: Any) -> str:
    """Return the bits of a number as JSON; ``null`` for what is no number."""
    try:
        return f'"{_FLOAT.pack(number).hex()}"'
    except struct.error:
        return "null"


class Hashes(NamedTuple):
    """Hashes of the batches of all replicas, which are sums of 64 bits.

    Attributes:
        order: of the indices of the samples; ``None`` if they are unknown.
        content: of the batches.
        num_unseen: parts of them without a fingerprint.
    """

    order: int | None
    content: int
    num_unseen: int

    def as_plain(self) -> list[str | int | None]:
        """Return the entry ``data`` of a line."""
        order = None if self.order is None else write_hash(self.order)
        rest = [self.num_unseen] if self.num_unseen else []
        return [order, write_hash(self.content), *rest]


def write_iteration(
    place: Sequence[int],
    data: Hashes,
    *,
    losses: Mapping[str, Any],
    rates: Sequence[Any],
    norm: Any,
    rest: Mapping[str, Any],
) -> str:
    """Return the line of an iteration without its closing brace.

    Args:
        place: epoch, iteration and step.
        data: the hashes of the batches.
        losses: by name.
        rates: the learning rates.
        norm: that of the gradients; ``None`` without one.
        rest: what few lines have.
    """
    epoch, iteration, step = place
    order = "null" if data.order is None else f'"{data.order:016x}"'
    unseen = f",{data.num_unseen}" if data.num_unseen else ""
    body = f'{{"at":[{epoch},{iteration},{step}],"data":[{order},"{data.content:016x}"{unseen}]'
    if losses:
        shown = [f"{_key(name)}{_digits(loss)}" for name, loss in losses.items()]
        body += f',"loss":{{{",".join(shown)}}}'
    if rates:
        body += f',"lr":[{",".join(map(_digits, rates))}]'
    if norm is not None:
        body += f',"norm":{_digits(norm)}'
    return f"{body},{write_body(rest)[1:]}" if rest else body


def write_body(content: Mapping[str, Any]) -> str:
    """Return the text of a line without its closing brace."""
    return _ENCODER.encode(content)[:-1]


def is_scores(data: bytes) -> bool:
    """Return whether a line has the scores of a validation, and is beside the chain."""
    return data.startswith(_SCORES)


def step_of(data: bytes) -> int | None:
    """Return the optimizer steps that the line of an iteration states; ``None`` if it has none."""
    head, _, _ = data.partition(b"]")
    number = head.rpartition(b",")[2]
    return int(number) if data.startswith(_PLACE) and number.isdigit() else None


def write_hash(value: int) -> str:
    """Return 64 bits as 16 hexadecimal digits."""
    return f"{value:016x}"


def hash_of(content: Mapping[str, Any]) -> str:
    """Return the hash of what defines a run, given as plain values."""
    text = json.dumps(content, sort_keys=True, default=repr, separators=(",", ":"))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def seal(body: str, chain: str) -> tuple[bytes, str]:
    """Return a whole line, and its hash.

    Args:
        body: a JSON object without its closing brace; not empty.
        chain: the hash of the line before; empty for the first line.
    """
    data = body.encode()
    found = sha256(chain.encode() + data).hexdigest()[:_DIGITS]
    return data + _HASH + found.encode() + b'"}\n', found


def unseal(data: bytes, chain: str) -> tuple[dict[str, Any], str]:
    """Return the content of a line, and its hash.

    Args:
        data: the line, with its end.
        chain: as in :func:`seal`.

    Raises:
        LedgerError: if the line is incomplete, is not JSON, or does not follow the one before.
    """
    body, tail = data[:-TAIL_BYTES], data[-TAIL_BYTES:]
    if not data.endswith(b"\n"):
        raise LedgerError(
            "is truncated: the run is writing it, or was killed, and the next start continues "
            "from its checkpoint"
        )
    found = sha256(chain.encode() + body).hexdigest()[:_DIGITS]
    if tail != _HASH + found.encode() + b'"}\n':
        raise LedgerError("does not match its hash, or does not follow the line before it")
    try:
        return json.loads(body + b"}"), found
    except ValueError as error:
        raise LedgerError("is not JSON") from error


def end_of(chain: str) -> bytes:
    """Return how a line with this hash ends."""
    return f'"{chain}"}}\n'.encode()


def stated_hash(data: bytes) -> str:
    """Return the hash that a line states, right or wrong."""
    return data[len(_HASH) - TAIL_BYTES :][:_DIGITS].decode("ascii", "replace")


class LineReceiver(ABC):
    """The receiver of the lines of a run: a file, or a comparison."""

    @abstractmethod
    def append(self, bodies: Iterable[str]) -> None:
        """Take lines of the chain, given as JSON objects without their closing braces."""

    @abstractmethod
    def append_scores(
        self, after: int, scores: Mapping[str, float], unscored: Collection[str]
    ) -> None:
        """Take the scores of a validation, which hang beside the chain.

        Args:
            after: the last iteration, whose line was taken.
            scores: by name.
            unscored: names of those that are left out.
        """

    def open(self, mark: Mapping[str, Any] | None, *, after: int) -> None:
        """Begin, or continue after the lines of a checkpoint.

        Args:
            mark: the result of :meth:`mark` in the checkpoint; ``None`` if it has none.
            after: the last iteration before the first new line.
        """

    def mark(self) -> dict[str, Any] | None:
        """Return how far the lines go, for a checkpoint."""
        return None

    def sync(self) -> None:
        """Wait until all lines are on the disk; another thread may call this."""

    def close(self) -> None:
        """Write pending lines."""
