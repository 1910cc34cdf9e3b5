"""What ranks tell each other while they wait, over a connection that nothing else uses."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from helios.distributed.process_groups import DistributedInfo, open_store

_TOPIC = "helios/waiting"
_STORE_SECONDS = 5.0


@dataclass(frozen=True)
class Heard:
    """What a rank knows of all.

    Attributes:
        words: what the ranks say that can speak, by rank.
        mute: the ranks that say nothing.
        speaker: the rank that speaks for all.
    """

    words: Mapping[int, Mapping[str, Any]]
    mute: list[int] = field(default_factory=list)
    speaker: int = 0


@final
class Heartbeats:
    """The words of all ranks; nothing is opened before the first of them.

    Args:
        info: the rank of this process, and how many there are.
    """

    def __init__(self, info: DistributedInfo) -> None:
        self._info = info
        self._store: Any = None
        self._is_alone = info.world_size == 1
        self._count = 0
        self._asking: threading.Thread | None = None
        # The last words of each rank, and when they were new.
        self._last: dict[int, tuple[bytes, float]] = {}

    def say(self, words: Mapping[str, Any]) -> None:
        """Say something, for others that may wait for this rank.

        Args:
            words: plain values.
        """
        if not self._is_alone:
            self._post(words, listens=False)

    def exchange(self, words: Mapping[str, Any], *, fresh: float) -> Heard:
        """Say something, and return what the others say.

        Args:
            words: plain values.
            fresh: for how many seconds the words of a rank count that says nothing new.
        """
        own = self._info.rank
        found = None if self._is_alone else self._post(words)
        if self._is_alone:
            return Heard({own: words}, [], own)
        if found is None:
            # Rank 0 has the store, or none of them has. Who else can speak is not known.
            return Heard({own: words}, [0] if own else [], 1 if own else 0)
        now = time.monotonic()
        for rank, text in found.items():
            before = self._last.get(rank)
            if before is None and rank != own:
                # It may be of an earlier call, or of ranks that torchrun has started before.
                self._last[rank] = text, -math.inf
            elif before is None or before[0] != text:
                self._last[rank] = text, now
        speaking = {
            rank: json.loads(text)
            for rank, (text, when) in sorted(self._last.items())
            if now - when < fresh
        }
        mute = [rank for rank in range(self._info.world_size) if rank not in speaking]
        return Heard(speaking, mute, min(speaking))

    def _post(self, words: Mapping[str, Any], *, listens: bool = True) -> dict[int, bytes] | None:
        """Return what each rank has said last; ``None`` if the store does not answer."""
        if self._asking is not None and self._asking.is_alive():
            return None
        self._count += 1
        text = json.dumps({**words, "count": self._count})
        found: list[dict[int, bytes]] = []
        self._asking = threading.Thread(
            target=self._talk, args=(text, found, listens), name="helios-heartbeat", daemon=True
        )
        self._asking.start()
        self._asking.join(_STORE_SECONDS)
        return found[0] if found else None

    def _talk(self, text: str, found: list[dict[int, bytes]], listens: bool) -> None:
        try:
            if self._store is None:
                self._store = open_store()
            store = self._store
            if store is None:
                self._is_alone = True
                return
            store.set(f"{_TOPIC}/{self._info.rank}", text)
            if not listens:
                return
            keys = {rank: f"{_TOPIC}/{rank}" for rank in range(self._info.world_size)}
            said = {rank: key for rank, key in keys.items() if store.check([key])}
            found.append({rank: store.get(key) for rank, key in said.items()})
        except RuntimeError:
            # The store is gone, or refuses connections; it may come back.
            self._store = None
