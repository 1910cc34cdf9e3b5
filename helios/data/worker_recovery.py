"""Goes on with new workers when one dies, or does not answer, in the middle of a pass.

Every batch is known by its key, so what was dealt and not handed out is fetched again, and then the
rest of the same walk; a sampler is never asked twice. All workers of the pass end, and PyTorch's
iterator with them: nothing of it is known to be whole.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, final

from helios.data.keyed import Keyed, Walk
from helios.data.workers import (
    describe_deaths,
    describe_silence,
    end_workers,
    is_from_worker,
    kill_workers,
)
from helios.distributed.collectives import get_global_rank
from helios.errors import WorkerError

_LOGGER = logging.getLogger(__name__)
_LOOKS = 8
_NUM_SHOWN = 8
MOST_LOSSES = 3
"""How many times in a row workers of other loaders may be lost in the same place."""


class Begin(Protocol):
    """Starts workers."""

    def __call__(self, walk: Walk, timeout: WorkerTimeout, *, one_by_one: bool) -> Iterator[Any]:
        """Return PyTorch's iterator over the items of a walk.

        Args:
            walk: returns what is fetched.
            timeout: ends workers that are waited for too long.
            one_by_one: whether an item is dealt only when the one before it has arrived.
        """
        ...


@final
class WorkerItems(Iterator[Any]):
    """What workers fetch in a pass, in its order, from new workers if some die.

    After a second death, what is owed is fetched one by one. So the batch is known that a new
    worker dies of.

    Args:
        begin: starts workers.
        items: what is fetched; iterated over once.
        timeout: after how many seconds without an item workers are replaced; ``None`` for never.
        caveat: what the line about new workers says besides.
    """

    def __init__(
        self,
        begin: Begin,
        items: Iterator[Keyed],
        *,
        timeout: float | None = None,
        caveat: str = "",
    ) -> None:
        self._begin = begin
        # Not this object: its workers must end when it is dropped, so nothing may lead back to it.
        self._dealt = _Dealt(items)
        self._timeout = WorkerTimeout(timeout)
        self._caveat = caveat
        self._losses: list[str] = []
        # How many items are owed that workers which were lost had, too.
        self._num_suspects = 0
        self._is_careful = False
        self._is_fresh = True
        self._iterator: Iterator[Any] = iter(())
        self._start(one_by_one=False)

    def __next__(self) -> Any:
        while True:
            try:
                with self._timeout.watching(self._iterator):
                    item = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                silence = self._timeout.pop()
                loss = silence or describe_deaths(self._iterator, error)
                if not loss or self._dealt.has_failed:
                    if is_from_worker(error):
                        self._hand_out()
                    else:
                        # Now, not by the garbage collector: it may close the pipes of PyTorch's
                        # queues first, which a thread of theirs then closes once more.
                        self.close()
                    raise
                self._recover(loss, is_late=bool(silence))
            else:
                self._hand_out()
                return item

    def _hand_out(self) -> None:
        self._dealt.owed.popleft()
        self._is_fresh = False
        if self._num_suspects:
            self._num_suspects -= 1
            if not self._num_suspects:
                self._losses.clear()
        if self._is_careful and not self._dealt.owed:
            # Now: who hands out batches knows by what has been dealt whether the pass goes on.
            self._start(one_by_one=False)

    def close(self, *, keeps_workers: bool = False) -> None:
        """End the pass.

        Args:
            keeps_workers: whether those that fetch as usual are left for the next pass.
        """
        self._timeout.close()
        if self._is_careful or not keeps_workers:
            end_workers(self._iterator)

    def _recover(self, loss: str, *, is_late: bool) -> None:
        """Start new workers.

        Raises:
            WorkerError: if a new worker was lost with the first item that it got, alone.
        """
        kill_workers(self._iterator)
        self._losses.append(loss)
        if self._is_careful and self._is_fresh:
            self.close()
            raise self._make_error(is_late=is_late)
        self._num_suspects = count = len(self._dealt.owed)
        one_by_one = len(self._losses) > 1
        who = "One new worker fetches" if one_by_one else "New workers fetch"
        what = "the batch that was" if count == 1 else f"the {count} batches that were"
        how = ", one by one" if one_by_one and count > 1 else ""
        warn_of_workers(f"{loss}. {who} {what} under way{how}.{self._caveat}")
        self._start(one_by_one=one_by_one)

    def _start(self, *, one_by_one: bool) -> None:
        end_workers(self._iterator)
        self._is_careful, self._is_fresh = one_by_one, True
        walk = partial(self._dealt.walk, stops=one_by_one)
        self._iterator = self._begin(walk, self._timeout, one_by_one=one_by_one)

    def _make_error(self, *, is_late: bool) -> WorkerError:
        failing = self._dealt.owed[0]
        indices = failing.indices if isinstance(failing.indices, list) else [failing.indices]
        shown = ", ".join(map(repr, indices[:_NUM_SHOWN]))
        if len(indices) > _NUM_SHOWN:
            shown += f" and {len(indices) - _NUM_SHOWN} more"
        longer = " If it just takes long, raise worker_timeout." if is_late else ""
        return WorkerError(
            "A loader worker must be able to fetch each batch, but workers were lost "
            f"{len(self._losses)} times in a row, the last one with nothing to fetch but the "
            f"samples {shown}. {'; '.join(self._losses)}. To see why, fetch them in one process: "
            f"call helios.core.rng.reseed({failing.key}), then dataset[i] for each, under "
            f"python -X faulthandler.{longer}"
        )


@final
class _Dealt:
    """What has been dealt to workers.

    Args:
        items: everything that is to be dealt.

    Attributes:
        owed: what was dealt, and has not been handed out.
        has_failed: whether the walk raised an error, so that the rest is lost.
    """

    def __init__(self, items: Iterator[Keyed]) -> None:
        self._items = items
        self.owed: deque[Keyed] = deque()
        self.has_failed = False

    def walk(self, *, stops: bool) -> Iterator[Keyed]:
        """Deal again what is owed, and then, unless it stops there, the rest."""
        yield from [*self.owed]
        while not stops:
            try:
                item = next(self._items)
            except StopIteration:
                return
            except BaseException:
                self.has_failed = True
                raise
            self.owed.append(item)
            yield item


def warn_of_workers(text: str) -> None:
    """Log a line about workers; ranks other than 0 show errors only."""
    _LOGGER.log(logging.ERROR if get_global_rank() else logging.WARNING, "%s", text)


class _Wait:
    """A wait for workers.

    Attributes:
        iterator: what is waited for; ``None`` if nothing is.
        number: changes with each wait.
        seen: what was seen of workers that were killed.
    """

    iterator: object = None
    number = 0
    seen = ""


@final
class WorkerTimeout:
    """Ends workers that leave the training process waiting, which then sees that they are gone.

    Only that ends every wait: also one for the memory of a tensor, which PyTorch asks a worker for.

    Args:
        seconds: how long they may; ``None`` for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._wait = _Wait()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, iterator: object) -> Iterator[None]:
        """Wait in the block for workers."""
        if self._seconds is None:
            yield
            return
        if self._thread is None:
            args = (self._wait, self._is_over, self._seconds)
            self._thread = threading.Thread(
                target=_watch, args=args, name="helios-worker-timeout", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._is_over.set)
        self._wait.number += 1
        self._wait.iterator = iterator
        try:
            yield
        finally:
            self._wait.iterator = None

    def pop(self) -> str:
        """Return what was seen of workers that were ended, once."""
        seen, self._wait.seen = self._wait.seen, ""
        return seen

    def close(self) -> None:
        """Watch nothing more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


def _watch(wait: _Wait, is_over: threading.Event, seconds: float) -> None:
    # Looks are counted, not seconds, which go on while the whole job is suspended.
    before, looks = 0, 0
    while not is_over.wait(seconds / _LOOKS):
        iterator, number = wait.iterator, wait.number
        looks = looks + 1 if iterator is not None and number == before else 0
        before = number
        if looks >= _LOOKS:
            # One that has just died is waited for, too.
            wait.seen = describe_deaths(iterator) or describe_silence(iterator, seconds)
            kill_workers(iterator)
            looks = 0
        # Nothing else may keep alive what somebody has dropped.
        del iterator
