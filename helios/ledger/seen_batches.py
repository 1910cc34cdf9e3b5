"""What a line of the ledger says of the samples and batches of an iteration.

Each process hashes the batches of its replicas. The hashes are added over all replicas, exactly, so
that their sum does not depend on the number of processes. They are computed late: when processes
exchange them, or when the line is composed, many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from helios.ledger.line import write_hash
from helios.storage.content_hash import Content, hash_bytes, hash_content

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


def describe_batches(totals: Sequence[float]) -> str:
    """Return the entry of a line.

    Args:
        totals: the batches of all replicas, or the numbers of all processes, added.
    """
    if isinstance(totals, SeenBatches):
        order, content, num_unseen = totals.sums()
    else:
        *halves, num_unseen, num_unknown = map(int, totals)
        order = None if num_unknown else (halves[0] << 32) + halves[1]
        content = (halves[2] << 32) + halves[3]
    first = "null" if order is None else f'"{write_hash(order % _MODULUS)}"'
    unseen = f",{num_unseen}" if num_unseen else ""
    return f'"data":[{first},"{write_hash(content % _MODULUS)}"{unseen}]'
