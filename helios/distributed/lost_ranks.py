"""How a rank learns that another one has failed: by an error, or from their common store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from helios.errors import RankError

_KEY = "failed"
_STORE_SECONDS = 2.0


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is the consequence of another rank's failure.

    An error of a collective means that a rank has exited or is late; a ``RankError``, that another
    rank has failed.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        is_gloo = isinstance(link, RuntimeError) and "gloo" in str(link).lower()
        if is_gloo or isinstance(link, RankError | dist.DistError):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def note_failure(store: Any) -> None:
    """Tell the ranks that share a store that this one ends with an error."""
    _ask(lambda: store.set(_KEY, ""))


def has_failure(store: Any) -> bool:
    """Return whether a rank has noted a failure in a store, or the store is gone.

    Rank 0 may be the server of the store, and be the rank that has failed.
    """
    return _ask(lambda: store.check([_KEY]))


def _ask(work: Callable[[], bool | None]) -> bool:
    """Return the answer of a store; True if it is gone, False if it does not answer in time."""
    found = []

    def ask() -> None:
        try:
            found.append(bool(work()))
        except RuntimeError:
            found.append(True)

    thread = threading.Thread(target=ask, name="helios-store", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return any(found)
