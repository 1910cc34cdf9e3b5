"""The training or evaluation data of a :class:`Stream`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, final

from torch import get_num_threads
from torch.utils.data import DataLoader, default_collate, default_convert

from helios.core import rng
from helios.core.utils import Stateful
from helios.data.fingerprint import describe_class, find_fingerprint
from helios.data.order import Position
from helios.data.source import (
    LONE,
    NO_BATCH,
    BatchIterator,
    Shard,
    Source,
    pin,
    run_on_one_thread,
)
from helios.data.stream import Read, StreamLoader, StreamPlan, StreamReader
from helios.data.workers import REMEDY, Failures, Parcel, WorkerItems, WorkersLost
from helios.errors import ArgumentError, StateError

_LOGGER = logging.getLogger(__name__)
_PARTS = "parts"
_FEWEST, _SHARE = 100, 10
_ANY_KEY = 0
"""What generators are seeded from while they are kept: each read seeds them again."""


@final
class StreamSource(Source):
    """The data of a stream, each replica with a part of its own.

    Args:
        loader: the loader.
        run_seed: seed of the run.
        purpose: name of the random streams of fetching.
        share: the part of this process.

    Attributes:
        uses_state: whether a resume restores the states of parts, instead of a replay.

    Raises:
        ArgumentError: if there are fewer shards than replicas.
    """

    loader: StreamLoader

    def __init__(
        self,
        loader: StreamLoader,
        run_seed: int,
        purpose: str,
        share: Shard = LONE,
    ) -> None:
        super().__init__()
        loader.stream.check_shards(share.num_replicas)
        self.loader = loader
        self.share = share
        self.uses_state = False
        self._position = Position(run_seed=run_seed, purpose=purpose)
        self._states: dict[int, Any] = {}
        self._pass: _StreamBatches | None = None
        self._has_counted = False

    def _describe(self) -> dict[str, Any]:
        params, source = self.loader.params, self.loader.stream.source
        return {
            "dataset": f"Stream({describe_class(source)})",
            "fingerprint": find_fingerprint(source),
            "batch_size": params.batch_size,
            "drop_last": params.drop_last,
            "seed": params.random_seed,
            "num_workers": params.num_workers,
        }

    @property
    def ends_together(self) -> bool:
        """Whether this process runs all replicas, so that it sees the end of each part."""
        return len(self.share.block) == self.share.num_replicas

    def find_stateful(self) -> str:
        """Return the class of the parts if they have a state; opens one to find out.

        The result is empty if they have none, or if a replay is asked for.
        """
        stream, share = self.loader.stream, self.share
        if stream.replay:
            return ""
        with rng.stream(self._position.order_key()):
            part = stream.open(share.block.start, share.num_replicas, 0)
        return type(part).__qualname__ if isinstance(part, Stateful) else ""

    @property
    def state_is_per_replica(self) -> bool:
        """Always True."""
        return True

    def for_trial(self) -> StreamSource:
        """Return the data of one replica, read in this process, with the states of its part."""
        params = self.loader.params.without_workers()
        loader = StreamLoader(self.loader.stream, params, {})
        share = replace(self.share, block=self.share.block[:1])
        position = self._position
        source = StreamSource(loader, position.run_seed, position.purpose, share)
        source.uses_state = True
        return source

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        loader, params = self.loader, self.loader.params
        states, self._states = self._states if batch else {}, {}
        collate = params.collate_fn or (default_collate if params.batch_size else default_convert)
        plan = StreamPlan(
            stream=loader.stream,
            seed=params.random_seed,
            num_replicas=self.share.num_replicas,
            batch_size=params.batch_size,
            drop_last=params.drop_last,
            collate=collate,
            position=replace(self._position, epoch=epoch, batch=batch, sample=sample),
            states=states,
            keeps_state=self.uses_state,
        )
        if plan.cut_replay():
            _announce(plan)
        self._pass = _StreamBatches(loader, plan, self.share)
        return self._pass

    def _count_batches(self, batch: int, sample: int) -> int | None:
        """Return ``None``: only reading shows where a stream ends."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part after the last iteration.

        These are the parts of the replicas of this process; :meth:`join_states` joins those of all.
        """
        if self._pass is None:
            return {}
        states = {str(replica): state for replica, state in self._pass.states.items()}
        return {_PARTS: states} if self.uses_state and states else {}

    def holds_states(self, state_dict: dict[str, Any]) -> bool:
        """Whether a resume from a state restores the states of parts."""
        return bool(state_dict.get(_PARTS)) and not self.loader.stream.replay

    def join_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parts."""
        parts = {name: part for state in states for name, part in state.get(_PARTS, {}).items()}
        return {**states[0], _PARTS: parts} if parts else states[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, of all replicas.

        Raises:
            StateError: if it is the state of another loader.
        """
        if not state_dict.keys() <= {_PARTS}:
            raise StateError(
                "The state of the loader in the checkpoint is not that of a Stream: it contains "
                f"{sorted(state_dict)}. Use the data that the run was started with."
            )
        self.uses_state = self.holds_states(state_dict)
        parts = state_dict[_PARTS] if self.uses_state else {}
        self._states = {int(replica): state for replica, state in parts.items()}

    def count_unused(self) -> tuple[int, bool] | None:
        """Count the samples of longer parts, once; reads on for that."""
        is_single = self.share.num_replicas == 1
        if self._has_counted or self._pass is None or is_single or self.limit is not None:
            return None
        self._has_counted = True
        return self._pass.count_unused()

    def close(self) -> None:
        """Do nothing: workers end with their pass."""


def _announce(plan: StreamPlan) -> None:
    _LOGGER.info(
        "The stream has no state to restore: epoch %d is read again up to its position, %d samples "
        "of each replica.",
        plan.position.epoch + 1,
        plan.num_replayed,
    )


@final
class _StreamBatches(BatchIterator):
    """One pass.

    Attributes:
        states: states of the parts after the last iteration, by replica.
    """

    def __init__(self, loader: StreamLoader, plan: StreamPlan, share: Shard) -> None:
        self.num_samples = share.num_replicas * (plan.batch_size or 1)
        self.states = {each: plan.states[each] for each in share.block if each in plan.states}
        self._share = share
        self._num_before = plan.position.batch
        self._is_closed = False
        self._num_workers = min(loader.params.num_workers, len(share.block))
        self._num_readers = max(1, self._num_workers)
        # The replicas of each reader, each of which reads whole parts.
        self._deals = [share.block[each :: self._num_readers] for each in range(self._num_readers)]
        self._dealt = [replica for deal in self._deals for replica in deal]
        self._loader, self._plan = loader, plan
        self._failures = Failures()
        self._items = self._open(plan)
        # States after what was read last, and how many items new workers return that were read.
        self._read_states, self._num_repeated = dict(plan.states), 0
        self._pins = bool(loader.options.get("pin_memory")) and not self._num_workers
        self._replay = deque(plan.cut_replay())
        self._following: list[Read | None] | None = None
        self._cut: list[Read | None] = []
        self._is_begun = False
        self._sizes: list[int] = []
        self._num_read = 0

    @property
    def sizes(self) -> Sequence[int] | None:
        """The samples of each batch."""
        return self._sizes

    @property
    def replay_length(self) -> int:
        """The number of steps of :meth:`catch_up`."""
        return len(self._replay)

    def catch_up(self) -> Iterator[None]:
        """Read the epoch again up to the position."""
        while self._replay:
            # The hooks that follow must draw the same numbers as in a run that was not interrupted.
            with rng.stream(_ANY_KEY):
                self._read_items()
            self._replay.popleft()
            yield

    def __next__(self) -> Any:
        if self._is_closed:
            raise StopIteration
        if self._is_begun:
            return self._advance()
        self._is_begun = True
        deque(self.catch_up(), maxlen=0)
        # A run that resumes at the end of an epoch has nothing left to read, and hooks follow.
        with rng.stream(_ANY_KEY):
            self._begin()
            return self._advance()

    def _advance(self) -> list[Any]:
        found = self._following
        if found is None:
            self.close()
            raise StopIteration
        pairs = list(zip(self._share.block, found, strict=True))
        self.states = {replica: each.state for replica, each in pairs if each is not None}
        self._sizes = [each.size for each in found if each is not None]
        self._following = self._read()
        self.is_last = self._following is None
        return [NO_BATCH if each is None else each.batch for each in found]

    def _open(self, plan: StreamPlan) -> Iterator[Any]:
        """Return the items of all readers in turn."""
        reader, loader = StreamReader(plan, self._deals), self._loader
        if not self._num_workers:
            return iter(reader)
        options = {**loader.options, "num_workers": self._num_workers, "persistent_workers": False}
        workers: DataLoader[Any] = DataLoader(
            reader, batch_size=None, **{**options, "collate_fn": Parcel}
        )
        timeout = loader.params.worker_timeout
        return WorkerItems(lambda: iter(workers), workers, timeout, self._failures)

    def close(self) -> None:
        """End the pass and its workers."""
        self._end_items()
        self._is_closed = True

    def _begin(self) -> None:
        self._following = self._read()
        if self._following is None and self._num_before == 0 and self._share.pads:
            raise ArgumentError(
                "The part of a Stream for each replica must contain at least one batch, but that "
                f"of one of the replicas {list(self._share.block)} contains none. Divide the data "
                f"into at least {self._share.num_replicas} non-empty shards, or reduce "
                "num_replicas or batch_size."
            )

    def _read(self) -> list[Read | None] | None:
        """Read the next iteration; ``None`` after the last one.

        In training it ends with the first part that ends, otherwise with the last one.
        """
        reads = self._in_order(self._read_items())
        ends = [each is None for each in reads]
        if any(ends) if self._share.pads else all(ends):
            self._cut = reads
            return None
        self._num_read += 1
        self._read_states = {
            replica: read.state
            for replica, read in zip(self._share.block, reads, strict=True)
            if read is not None and read.state is not None
        }
        return reads

    def _read_items(self) -> list[Any]:
        """Read an item of each reader, from new workers if one dies."""
        while True:
            try:
                while self._num_repeated:
                    self._read_each()
                    self._num_repeated -= 1
                found = self._read_each()
            except WorkersLost as loss:
                self._recover(loss)
            else:
                self._failures.clear()
                return found

    def _end_items(self) -> None:
        if isinstance(self._items, WorkerItems):
            self._items.close()
        self._items = iter(())

    def _recover(self, loss: WorkersLost) -> None:
        """Start new workers, which go on as those of a resumed run do.

        Raises:
            WorkerError: if workers were lost too often in the same place.
        """
        self._end_items()
        plan, first = self._plan, self._plan.position
        batch = first.batch + self._num_read
        what = f"batch {batch} of epoch {first.epoch + 1} of a Stream"
        remedy = f"They did not read {what}. {REMEDY}"
        self._failures.add(loss, "New workers take their place.", remedy=remedy)
        num_repeated = len(plan.cut_replay()) - len(self._replay)
        if not self._replay:
            sample = first.sample + self._num_read * self.num_samples
            position = replace(first, batch=batch, sample=sample)
            plan = replace(plan, position=position, states=self._read_states)
            num_repeated = len(plan.cut_replay())
        self._num_repeated = num_repeated
        if num_repeated and not plan.states:
            _announce(plan)
        self._items = self._open(plan)

    def _in_order(self, items: list[list[Read | None]]) -> list[Read | None]:
        found = dict(zip(self._dealt, chain.from_iterable(items), strict=True))
        return [found[replica] for replica in self._share.block]

    def count_unused(self) -> tuple[int, bool]:
        """Count what is left of longer parts, up to a tenth of the pass.

        Returns:
            The number of samples, and whether no part has more.
        """
        reads, count = self._following or self._cut, 0
        with rng.stream(_ANY_KEY):
            for _ in range(max(_FEWEST, (self._num_before + self._num_read) // _SHARE)):
                count += sum(each.size for each in reads if each is not None)
                if self._is_closed or all(each is None for each in reads):
                    return count, True
                try:
                    reads = self._in_order(self._read_each())
                except Exception:
                    # What no training reads must not end one.
                    break
        return count, False

    def _read_each(self) -> list[Any]:
        return [self._take() for _ in range(self._num_readers)]

    def _take(self) -> Any:
        if self._num_workers or get_num_threads() == 1:
            if isinstance(self._items, WorkerItems):
                # A step of a replay reads many batches.
                is_replay = self._replay or self._num_repeated
                self._items.timeout = None if is_replay else self._loader.params.worker_timeout
            item = next(self._items)
        else:
            item = run_on_one_thread(next, self._items)
        return pin(item) if self._pins else item
