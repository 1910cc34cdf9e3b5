"""What ranks tell each other while they wait, over a connection that nothing else uses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from helios.distributed.deadlines import in_time
from helios.distributed.process_groups import DistributedInfo, open_store

_TOPIC = "helios/waiting"
_STORE_SECONDS = 5.0


class Heard(NamedTuple):
    """What a rank knows of all.

    Attributes:
        words: what the ranks say that answer, by rank.
        mute: the ranks that do not.
        speaker: the rank that speaks for all.
    """

    words: Mapping[int, Mapping[str, Any]]
    mute: list[int]
    speaker: int


@final
class Heartbeats:
    """The last words of all ranks, in the store of the group.

    Args:
        info: the rank of this process, and how many there are.
        fresh: for how many seconds a rank counts as answering after it has said something new.
    """

    def __init__(self, info: DistributedInfo, fresh: float) -> None:
        self._info = info
        self._fresh = fresh
        self._store: Any = None
        self._count = 0
        # The last text of each rank, and when it was new.
        self._last: dict[int, tuple[bytes, float]] = {}

    def exchange(self, words: Mapping[str, Any], *, reads: bool = True) -> Heard:
        """Write the words of this rank; return those of the ranks that answer.

        Args:
            words: plain values.
            reads: whether to look for what the others say.
        """
        own = self._info.rank
        self._count += 1
        text = json.dumps({**words, "count": self._count})
        # A store that is stopped answers nobody, and may wait forever.
        has_store = in_time(lambda: self._talk(text, reads), _STORE_SECONDS)
        if has_store is None:
            # Rank 0 has the store, or is beside it. Who else answers is not known.
            return Heard({own: words}, [0] if own else [], 1 if own else 0)
        if not has_store:
            return Heard({own: words}, [], own)
        found = {own: words}
        for rank, (said, when) in self._last.items():
            if time.monotonic() - when < self._fresh:
                found[rank] = json.loads(said)
        mute = [rank for rank in range(self._info.world_size) if rank not in found]
        return Heard(dict(sorted(found.items())), mute, min(found))

    def _talk(self, text: str, reads: bool) -> bool:
        """Write the words of this rank and read those of others; False if there is no store."""
        # After an error it is opened again: it may come back.
        store, self._store = self._store or open_store(), None
        if store is None:
            return False
        store.set(f"{_TOPIC}/{self._info.rank}", text)
        for rank in range(self._info.world_size) if reads else ():
            key = f"{_TOPIC}/{rank}"
            if rank == self._info.rank or not store.check([key]):
                continue
            said, before = store.get(key), self._last.get(rank)
            if before is None:
                # It may be of an earlier call, or of ranks that torchrun has started before.
                self._last[rank] = said, -math.inf
            elif before[0] != said:
                self._last[rank] = said, time.monotonic()
        self._store = store
        return True
