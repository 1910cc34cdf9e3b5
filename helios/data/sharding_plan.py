"""Shards an order over V replicas: replica r gets positions r, r + V, r + 2V and so on.

Each iteration consumes the next window of the order, which has a batch for each of the V replicas.
So the samples of a replica depend only on its number, not on the number of processes, and seeking
is as fast as for one replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch.utils.data import BatchSampler, DistributedSampler

from helios.data.loader import Keyed, KeyedLoader, ask_twice, split_into_batches
from helios.data.order import GlobalOrder, Order, Position, samplers_in
from helios.data.samplers import has_whole_order
from helios.data.source import Shard
from helios.errors import ArgumentError


class ReplicaIndices(NamedTuple):
    """The indices of one iteration for the replicas of a process.

    Attributes:
        hands: the indices for each replica with a batch; these are the first of the block.
        num_samples: positions that all replicas of the run consume.
        skipped: how many batches are skipped right before, and positions in them.
        repeats: for each of the hands, the number of samples at its end that occur a second time in
            the pass; empty if none does.
    """

    hands: list[Any]
    num_samples: int
    skipped: tuple[int, int] = (0, 0)
    repeats: Sequence[int] = ()


class ShardedIteration(NamedTuple):
    """An iteration whose batches are being fetched.

    Attributes:
        turn: its indices.
        is_last: whether it ends the pass.
    """

    turn: ReplicaIndices
    is_last: bool


@final
class ShardingPlan:
    """The iterations of a pass, from any position.

    Args:
        order: the order of all samples; with ``is_own``, that of this replica's samples.
        share: the part of this process.
        batch_size: samples per batch of a replica; ``None`` if samples are not collated.
        drop_last: whether to drop an incomplete last batch of a replica.
        is_cut: in training, whether to truncate the end of the order instead of padding it.
        is_split: whether replicas get different samples; otherwise each gets the whole order.
        is_own: whether a user's sampler has already sharded the order.

    Attributes:
        skipped: numbers of the batches to skip, by epoch.
        is_flat: whether an item of the order is the index of one sample, not of a batch.
    """

    def __init__(
        self,
        order: Order,
        share: Shard,
        *,
        batch_size: int | None,
        drop_last: bool = False,
        is_cut: bool = False,
        is_split: bool = True,
        is_own: bool = False,
    ) -> None:
        self.order = order
        self.share = share
        self.is_split = is_split
        self.is_own = is_own
        self.skipped: dict[int, frozenset[int]] = {}
        self._is_listed = order.yields_batches
        self._is_single = batch_size is None or self._is_listed
        self.is_flat = batch_size is None and not self._is_listed
        self._size = 1 if batch_size is None or self._is_listed else batch_size
        self._drop_last = drop_last
        self._is_cut = is_cut
        # The distance between two samples of a replica in the order, and how many samples of the
        # run one position of the order represents.
        self._stride = share.num_replicas if is_split else 1
        self._weight = share.num_replicas // self._stride
        # A single replica gets the window unchanged.
        self._is_whole = share.num_replicas == 1 and not self._is_single

    def turns(self, position: Position, replicas: range | None = None) -> Iterator[ReplicaIndices]:
        """Iterate over the iterations of a pass, without those to skip.

        Args:
            position: where it starts; its sample is a multiple of the number of replicas.
            replicas: whose indices to return; the replicas of this process by default.
        """
        turns = self._all_turns(position, replicas)
        skipped = self.skipped.get(position.epoch)
        return turns if skipped is None else _skip(turns, position.batch, skipped)

    def _all_turns(self, position: Position, replicas: range | None) -> Iterator[ReplicaIndices]:
        replicas = self.share.block if replicas is None else replicas
        for windows, num_padded in self._windows(position):
            for window in windows:
                if self._is_whole:
                    yield ReplicaIndices([window], len(window))
                    continue
                num_items = sum(map(len, window)) if self._is_listed else len(window)
                hands = self._hand_out(window, replicas)
                turn = ReplicaIndices(hands, num_items * self._weight)
                yield turn if not num_padded else self._count_padding(turn, replicas, num_padded)

    def _count_padding(
        self, turn: ReplicaIndices, replicas: range, num_padded: int
    ) -> ReplicaIndices:
        """Return a turn that says which samples pad the order: the last ones of the last replicas.

        A replica gets at most one of the items that pad it.
        """
        first = self._stride - num_padded
        sizes = [len(hand) if self._is_listed else 1 for hand in turn.hands]
        pairs = zip(replicas, sizes, strict=False)
        return turn._replace(repeats=[size * (replica >= first) for replica, size in pairs])

    def walk(
        self, position: Position, under_way: deque[ShardedIteration], *, reads_content: bool = False
    ) -> Iterator[Keyed]:
        """Iterate over the batches of this process, iteration by iteration, each with its key.

        An iteration without a batch for this process is only listed as under way, by the step that
        raises ``StopIteration``.

        Args:
            position: where the pass starts.
            under_way: gets each iteration before its batches.
            reads_content: whether the content of the batches is read where they are fetched.
        """
        keys = [replace(position, replica=replica).fetch_keys() for replica in self.share.block]
        turns, batch = self.turns(position), position.batch
        following = next(turns, None)
        while following is not None:
            turn, following = following, next(turns, None)
            under_way.append(ShardedIteration(turn, following is None))
            batch += turn.skipped[0]
            for series, indices in zip(keys, turn.hands, strict=False):
                yield Keyed(series.at(batch), indices, reads_content)
            batch += 1

    def leave(self, position: Position) -> None:
        """End a pass early, at the position of the next iteration."""
        self.order.leave(self._position_in_order(position))

    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the iterations of a whole pass that continues at a position.

        These are the batches of the first replica, which has the most.
        """
        length = self.order.length
        if length is None:
            return None
        total, first = length, sample // self._weight
        if self._is_listed:
            first, batch = 0, 0
        if self.share.pads and self._is_cut:
            total -= total % self._stride
        num_left = -(-max(total - first, 0) // self._stride)
        return batch + (num_left // self._size if self._drop_last else -(-num_left // self._size))

    def first_sample(self, batch: int) -> int:
        """Return the position of the first sample of an iteration."""
        return batch * self._size * self.share.num_replicas

    def hands_at(self, position: Position, dataset: Any) -> list[Any] | None:
        """Return the indices of one iteration for each of the V replicas.

        Nothing is fetched, and no state changes.

        Returns:
            The indices; ``None`` if they are unknown, if a user's sampler has sharded the order,
            or if there is no such iteration.
        """
        order = None if self.is_own else self.order.twin(dataset)
        if order is None:
            return None
        twin = ShardingPlan(
            order,
            self.share,
            batch_size=None if self._is_single else self._size,
            drop_last=self._drop_last,
            is_cut=self._is_cut,
            is_split=self.is_split,
        )
        everybody = range(self.share.num_replicas)
        turn: ReplicaIndices | None = ask_twice(
            position, lambda: next(twin.turns(position, everybody), None)
        )
        return None if turn is None else turn.hands

    def _position_in_order(self, position: Position) -> Position:
        """Return the position in terms of the order."""
        return replace(
            position, batch=position.batch * self._stride, sample=position.sample // self._weight
        )

    def _windows(self, position: Position) -> Iterator[tuple[list[list[Any]], int]]:
        """Split the order into windows of one iteration for all replicas, several at once.

        Beside them is how many items pad the last window.
        """
        width = self._size * self._stride
        num_head = 0 if self._is_cut or not self.share.pads or self._stride == 1 else self._stride
        blocks, head = self.order.blocks_and_head(self._position_in_order(position), num_head)
        # With this many samples or fewer, even the first replica's batch is incomplete.
        too_few = width - self._stride if self._drop_last else 0
        for windows in split_into_batches(blocks, width):
            if len(windows[0]) == width:
                yield windows, 0
            elif len(rest := self._even_out(windows[0], head)) > too_few:
                yield [rest], max(len(rest) - len(windows[0]), 0)

    def _even_out(self, window: list[Any], head: Iterable[Any]) -> list[Any]:
        """Pad or truncate the end of the order, so that all replicas get equally many samples."""
        surplus = len(window) % self._stride
        if not self.share.pads or not surplus:
            return window
        if self._is_cut:
            return window[: len(window) - surplus]
        first = list(head)
        return window + [first[i % len(first)] for i in range(self._stride - surplus)]

    def _hand_out(self, window: list[Any], replicas: range) -> list[Any]:
        stride = self._stride
        if self._is_single:
            items = [window[r % stride] for r in replicas if r % stride < len(window)]
            # Copied, because several replicas, or the padding, may get the same list and modify it.
            is_copied = self._is_listed and self.share.num_replicas > 1
            return list(map(list, items)) if is_copied else items
        least = self._size if self._drop_last else 1
        hands = []
        for replica in replicas:
            hand = window[replica % stride :: stride]
            if len(hand) >= least:
                hands.append(hand)
        return hands


def _skip(
    turns: Iterator[ReplicaIndices], first: int, skipped: frozenset[int]
) -> Iterator[ReplicaIndices]:
    """Leave out iterations by number; the one after them says what is left out."""
    count = positions = 0
    for batch, turn in enumerate(turns, first):
        if batch in skipped:
            count, positions = count + 1, positions + turn.num_samples
            continue
        yield turn._replace(skipped=(count, positions)) if count else turn
        count = positions = 0


def make_sharding_plan(loader: KeyedLoader, share: Shard) -> ShardingPlan:
    """Return the sharding plan of a loader.

    Raises:
        ArgumentError: if a sampler that shards the order itself does not match the run's replicas.
    """
    params, order = loader.params, loader.batches.order
    drop_last = params.drop_last
    sampler, is_cut = order.sampler, drop_last
    is_split, is_own = not (share.pads and params.is_distributed is False), False
    if share.num_replicas == 1:
        # A single replica uses its sampler as it is, even if it returns only a part of the data.
        is_split = True
    elif has_whole_order(sampler):
        if params.sampler is not None:
            _check_number(sampler, share)
        order, is_split, is_cut = GlobalOrder(sampler), True, sampler.drop_last
    elif split := [part for part in samplers_in(sampler) if isinstance(part, DistributedSampler)]:
        for part in split:
            _check_own(part, share)
        is_split, is_own = False, True
    elif isinstance(sampler, BatchSampler):
        is_cut = sampler.drop_last
    return ShardingPlan(
        order,
        share,
        batch_size=params.batch_size,
        drop_last=drop_last,
        is_cut=is_cut,
        is_split=is_split,
        is_own=is_own,
    )


def _check_number(sampler: DistributedSampler[Any], share: Shard) -> None:
    if sampler.num_replicas != share.num_replicas:
        raise ArgumentError(
            f"{type(sampler).__name__}(num_replicas=...) must be the number of replicas of the "
            f"run, {share.num_replicas}, got {sampler.num_replicas}. Remove the sampler: with "
            "is_distributed=None, all replicas share the data."
        )


def _check_own(sampler: DistributedSampler[Any], share: Shard) -> None:
    """Check a user's sampler that returns the samples of one replica only."""
    _check_number(sampler, share)
    if len(share.block) != 1 or sampler.rank != share.block.start:
        raise ArgumentError(
            f"{type(sampler).__name__}, which splits the data by rank, must be the sampler of the "
            f"only replica of its process, got rank {sampler.rank}, but the process runs replicas "
            f"{list(share.block)}. Derive it from ResumableSampler and return the order of all "
            "samples, which Helios shards; or start as many processes as replicas, each with its "
            "own rank."
        )
