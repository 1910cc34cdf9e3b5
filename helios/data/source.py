"""The interfaces between loops and data: sources, the passes over them, and what a process fetches.

A run is defined over V replicas, and a process runs some of them. The assignment affects only which
process fetches a batch.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch.utils.data import DataLoader

from helios.core.utils import Stateful
from helios.counters import TrainingUnit
from helios.data.workers import WorkersLost
from helios.distributed.collectives import get_global_rank
from helios.errors import ArgumentError, UsageError, WorkerError
from helios.schedule import Schedule
from helios.storage.content_hash import Content, Sums

_LOGGER = logging.getLogger(__name__)
_MOST_LOSSES = 3
NO_BATCH: Final = object()
"""The batch of a replica that has none in the last iteration of an evaluation."""


@dataclass(frozen=True)
class Shard:
    """The part of the data that one process fetches.

    Attributes:
        num_replicas: V, the replicas of the run.
        block: the replicas of this process.
        pads: whether all replicas get the same number of samples, by padding or truncating the
            end as PyTorch's ``DistributedSampler`` does (training). Otherwise each sample occurs
            once, and replicas may have a shorter batch or none in the last iteration (evaluation).

    Example:
        >>> Shard(num_replicas=4, block=range(2, 4), pads=True).block
        range(2, 4)
    """

    num_replicas: int
    block: range
    pads: bool


LONE: Final = Shard(num_replicas=1, block=range(1), pads=True)
"""The shard of a run with one replica: all data."""


@dataclass(frozen=True)
class ByPosition:
    """A pass resumes at its position: Helios computes which samples follow.

    Attributes:
        is_split_by_rank: whether a user's sampler splits the data by rank, so that a run must
            resume on as many processes as before.
    """

    is_split_by_rank: bool = False


@dataclass(frozen=True)
class ByOwnState:
    """A pass resumes from a user's ``state_dict``, which Helios has to trust.

    Attributes:
        holder: the loader or the data set that has it.
    """

    holder: Stateful


@dataclass(frozen=True)
class CannotResume:
    """No pass can start in the middle.

    Attributes:
        remedy: how to change that.
    """

    remedy: str


ResumesBy: TypeAlias = ByPosition | ByOwnState | CannotResume
"""How a resumed run reaches its position in the data."""


class BatchIterator(ABC):
    """The batches of one pass; each item is a list with a batch per replica of the process.

    The entry of a replica without a batch is :data:`NO_BATCH`.

    A fetch that may draw random numbers seeds all generators and does not restore them: training
    seeds them again for the step, and evaluation restores their previous states.

    Attributes:
        num_samples: positions of the order that all replicas of the run consumed in the last
            iteration; 0 if unknown.
        is_last: whether the last iteration ends the pass.
        indices: those of the samples of the last iteration, a list for each replica of the process
            with a batch (a single index if batches are not collated); ``None`` if unknown.
        contents: what was read of each batch of the last iteration in the process that fetched it;
            ``None`` if nothing was.
        skipped: how many batches were skipped right before the last iteration, and positions of
            the order in them.
        repeats: for each replica of the process with a batch, the number of samples at the end of
            its last batch that occur a second time in the pass, so that all replicas get equally
            many; empty if none does.
    """

    num_samples: int = 0
    is_last: bool = False
    indices: Sequence[Any] | None = None
    contents: Sequence[Content | Sums] | None = None
    skipped: tuple[int, int] = (0, 0)
    repeats: Sequence[int] = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def size(self, place: int) -> int | None:
        """Return how many samples a batch of the last iteration has, as the loader gave them.

        Args:
            place: its place among the batches of this process.

        Returns:
            The number; ``None`` if it is unknown.
        """
        return None

    def catch_up(self) -> Iterator[None]:
        """Read the data before the position again, step by step.

        The first iteration does the rest.
        """
        return iter(())

    @abstractmethod
    def __next__(self) -> Any:
        """Return the batches of the next iteration."""

    @abstractmethod
    def close(self) -> None:
        """End the pass and workers that are not persistent; may be called again."""


class WrappedBatches(BatchIterator):
    """Another pass, which may end earlier.

    Args:
        batches: the pass.
    """

    def __init__(self, batches: BatchIterator) -> None:
        self._batches = batches

    def size(self, place: int) -> int | None:
        """As in the other pass."""
        return self._batches.size(place)

    def catch_up(self) -> Iterator[None]:
        """Read again what is before the position."""
        return self._batches.catch_up()

    def _describe(self) -> None:
        """Take over what the other pass says of its last iteration."""
        self.num_samples, self.indices = self._batches.num_samples, self._batches.indices
        self.skipped, self.contents = self._batches.skipped, self._batches.contents
        self.repeats, self.is_last = self._batches.repeats, self._batches.is_last

    def close(self) -> None:
        """End the pass and workers that are not persistent."""
        self._batches.close()


@final
class _LimitedBatches(WrappedBatches):
    """The first batches of a pass."""

    def __init__(self, batches: BatchIterator, num_left: int) -> None:
        super().__init__(batches)
        self._num_left = num_left

    def __next__(self) -> Any:
        if self._num_left <= 0:
            self.close()
            raise StopIteration
        batch = next(self._batches)
        self._num_left -= 1
        self._describe()
        self.is_last |= self._num_left == 0
        return batch

    def close(self) -> None:
        """End the pass and workers that are not persistent."""
        self._num_left = 0
        super().close()


@final
class _HealedBatches(WrappedBatches):
    """A pass that is opened again at its next batch if its workers are lost, as by a resume.

    Where a source can, one worker then fetches some batches, one at a time: so the batch is known
    that a worker dies of, and one that dies after a few batches gets further each time.
    """

    def __init__(
        self,
        source: Source,
        start: Callable[[int, int], BatchIterator],
        place: tuple[int, int, int],
    ) -> None:
        self._source, self._start = source, start
        self._epoch, self._batch, self._sample = place
        self._num_alone = 0
        self._losses: list[str] = []
        super().__init__(self._open())

    def _open(self) -> BatchIterator:
        while True:
            try:
                return self._start(self._batch, self._sample)
            except WorkersLost as loss:  # persistent ones, between two passes
                self._note(loss)

    def catch_up(self) -> Iterator[None]:
        """Read again what is before the position."""
        while True:
            try:
                yield from self._batches.catch_up()
            except WorkersLost as loss:
                self._open_again(loss)
            else:
                return

    def __next__(self) -> Any:
        while True:
            try:
                batch = next(self._batches)
            except WorkersLost as loss:
                self._open_again(loss)
            else:
                break
        self._losses, self._source.has_lost = [], False
        self._describe()
        self._batch += self.skipped[0] + 1
        self._sample += self.skipped[1] + self.num_samples
        if self._num_alone and not self.is_last:
            self._num_alone -= 1
            if not self._num_alone:
                self._start_workers()
        return batch

    def _open_again(self, loss: WorkersLost) -> None:
        """Go on at the next batch after a loss.

        Raises:
            WorkerError: if the pass cannot begin there, or if workers were lost too often.
        """
        source = self._source
        if isinstance(source.resumes_by, CannotResume):
            kind = type(source.loader).__name__
            raise WorkerError(
                f"Workers of a {kind} were lost: {loss}. Helios cannot fetch its batches again, "
                f"because the {kind} has no state; a loader from create_dataloader would continue "
                f"with new workers. {source.resumes_by.remedy}"
            ) from loss
        self._note(loss)
        self._num_alone = source.num_alone
        self._start_workers()

    def _note(self, loss: WorkersLost) -> None:
        """Log that workers were lost.

        Raises:
            WorkerError: for the third time without a batch between.
        """
        self._losses.append(str(loss))
        self._source.has_lost = True
        if len(self._losses) == _MOST_LOSSES:
            epoch, batch = self._epoch, self._batch
            samples = self._source.indices(epoch, batch=batch, sample=self._sample)
            raise WorkerError(
                f"Loader workers were lost {_MOST_LOSSES} times at the same batch: "
                f"{'; '.join(self._losses)}. They did not fetch batch {batch} of epoch {epoch + 1} "
                f"with the samples {samples or '(unknown)'}. Find the cause with num_workers=0 "
                "under python -X faulthandler; if fetching is slow, raise worker_timeout."
            ) from loss
        # Ranks other than 0 show errors only.
        level = logging.ERROR if get_global_rank() else logging.WARNING
        # As text: who keeps the record must not keep the pass that the error leads to.
        _LOGGER.log(level, "%s. New workers take their place.", str(loss))

    def _start_workers(self) -> None:
        # Before the pass is closed: an iterator may hold the state.
        state = self._source.state_dict()
        self._batches.close()
        if state:
            self._source.load_state_dict(state)
        self._batches = self._open()


class Source(ABC):
    """The data of one loader, over all its passes.

    Attributes:
        name: name of the loader among those of its phase; empty if there is only one.
        limit: maximum number of batches of a pass, with skipped ones; ``None`` for all.
        loader: the loader.
        resumes_by: how a pass starts in the middle, if it can.
        has_lost: whether workers were lost, and no batch came since then.
        num_alone: the number of batches that one worker then fetches, one at a time; 0 for none.
    """

    name: str = ""
    limit: int | None = None
    loader: Any
    resumes_by: ResumesBy = ByPosition()
    num_alone: int = 0

    def __init__(self) -> None:
        self.has_lost = False
        self._skipped: dict[int, frozenset[int]] = {}

    @property
    @final
    def description(self) -> dict[str, Any]:
        """A description of the data in plain values; compared when a run is resumed."""
        limit = {} if self.limit is None else {"limit_batches": self.limit}
        return {**self._describe(), **limit}

    @abstractmethod
    def _describe(self) -> dict[str, Any]:
        """Return the description of the data without a limit."""

    @property
    def length(self) -> int | None:
        """The current number of samples; ``None`` if unknown."""
        return None

    @property
    def pass_length(self) -> int | None:
        """The value of :attr:`length` when the last pass started; ``None`` before the first."""
        return None

    @property
    def is_endless(self) -> bool:
        """Whether a pass is known to never end."""
        return False

    @property
    def ends_together(self) -> bool:
        """Whether the passes of all processes always end in the same iteration."""
        return True

    @property
    def state_is_per_process(self) -> bool:
        """Whether :meth:`state_dict` differs between processes."""
        return False

    def gather_state(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return the state of all replicas; all processes call this together.

        Args:
            gather: returns its argument from all processes, by rank.
        """
        return self.state_dict()

    @final
    def batches(
        self, epoch: int, *, batch: int = 0, sample: int = 0, reads_content: bool = False
    ) -> BatchIterator:
        """Start a pass; it is empty if it starts at or after the limit.

        Args:
            epoch: number of the pass, from 0.
            batch: number of the first batch.
            sample: position of its first sample in the order of the epoch; a multiple of the
                number of replicas.
            reads_content: whether to read the content of each batch where it is fetched, if
                possible.
        """
        start = partial(self._start, epoch, reads_content=reads_content)
        if self.description.get("num_workers"):
            batches: BatchIterator = _HealedBatches(self, start, (epoch, batch, sample))
        else:
            batches = start(batch, sample)
        if self.limit is None:
            return batches
        whole = self._count_batches(batch, sample)
        if whole is not None and whole <= self.limit:
            return batches
        num_skipped = self.count_skipped(epoch) - self.count_skipped(epoch, batch)
        return _LimitedBatches(batches, self.limit - batch - num_skipped)

    @abstractmethod
    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        """Start a pass without a limit."""

    @final
    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the batches of a whole pass that continues at a position, or None if unknown.

        If the limit was lowered, batches before the position still count.
        """
        whole = self._count_batches(batch, sample)
        if whole is None or self.limit is None:
            return whole
        return min(whole, max(self.limit, batch))

    @abstractmethod
    def _count_batches(self, batch: int, sample: int) -> int | None:
        """Return the batches of a whole pass without a limit."""

    def measure(self, epoch: int, *, batch: int, sample: int) -> tuple[int | None, int]:
        """Return the batches of a pass and those before a position, both without skipped ones.

        Args:
            epoch: number of the pass, from 0.
            batch: number of the batch at the position.
            sample: the position, as in :meth:`batches`.

        Returns:
            The batches of the whole pass, ``None`` if unknown, and those before the position.
        """
        total = self.num_batches(batch=batch, sample=sample)
        done = batch - self.count_skipped(epoch, batch)
        return None if total is None else total - self.count_skipped(epoch, total), done

    @final
    def indices(self, epoch: int, *, batch: int = 0, sample: int = 0) -> list[Any] | None:
        """Compute the indices of the samples of one iteration; nothing is fetched.

        Returns:
            Those of all replicas of the run, replica by replica; ``None`` if they are unknown, or
            if there is no such batch.
        """
        is_after = self.limit is not None and batch >= self.limit
        return None if is_after else self._find_indices(epoch, batch, sample)

    def _find_indices(self, epoch: int, batch: int, sample: int) -> list[Any] | None:
        """Return the indices of one iteration in a pass without a limit."""
        return None

    def fetch_again(
        self, epoch: int, batch: int, times: int = 1
    ) -> list[tuple[list[Any], list[Content]]] | None:
        """Fetch the batches of one iteration once more, beside any pass.

        Only the data set may change, as by any fetch.

        Args:
            epoch: number of the pass, from 0.
            batch: number of the iteration, from 0.
            times: how often, one right after the other.

        Returns:
            For each time the indices of the samples and what was read, for each replica of this
            process; ``None`` if only a pass from its beginning would fetch them.
        """
        return None

    @final
    def skip_numbers(self, numbers: Sequence[int]) -> None:
        """Skip batches by their numbers in the run.

        Args:
            numbers: numbers of batches, from 1, over all epochs, with skipped ones.

        Raises:
            ArgumentError: if the source cannot skip, or if nothing would be left of an epoch.
        """
        if numbers and self.num_batches() is None and not self.is_endless:
            raise ArgumentError(
                "Trainer(skip_batches=...) must be omitted with data of unknown length: the length "
                "of an epoch says which batch has a number. Give the batch sampler a __len__."
            )
        places = [self.place_of(number) for number in numbers]
        if places:
            self.skip(places)
        for epoch, _ in places:
            if self.count_skipped(epoch) == self.num_batches():
                raise ArgumentError(
                    "Trainer(skip_batches=...) must leave at least one batch of each epoch, but "
                    f"names all of epoch {epoch + 1}. Skip fewer."
                )

    @final
    def place_of(self, number: int) -> tuple[int, int]:
        """Return epoch and number in it, from 0, of a batch that is counted over all epochs."""
        length = self.num_batches()
        return divmod(number - 1, length) if length else (0, number - 1)

    def skip(self, places: Sequence[tuple[int, int]]) -> None:
        """Skip batches in all passes: they are neither fetched nor returned.

        They count towards the limit, and all others keep their numbers.

        Args:
            places: epoch and number of each batch, from 0.

        Raises:
            ArgumentError: if the source cannot skip.
        """
        if not self._can_skip:
            raise ArgumentError(
                "Trainer(skip_batches=...) must be omitted with data whose order Helios does not "
                f"know: a {type(self.loader).__name__}. Create the loader with create_dataloader "
                "and a sampler that returns the order of all samples."
            )
        self._skipped.clear()
        for epoch, batch in places:
            self._skipped[epoch] = self._skipped.get(epoch, frozenset()) | {batch}

    @property
    def _can_skip(self) -> bool:
        return False

    @final
    def count_skipped(self, epoch: int, stop: int | None = None) -> int:
        """Return how many batches of an epoch are skipped, below the limit.

        Args:
            epoch: number of the epoch, from 0.
            stop: count those below this number; ``None`` for all.
        """
        ends = [end for end in (self.limit, stop) if end is not None]
        return sum(all(batch < end for end in ends) for batch in self._skipped.get(epoch, ()))

    @property
    @final
    def skipping_epochs(self) -> list[int]:
        """The epochs of which batches are skipped."""
        return [epoch for epoch in self._skipped if self.count_skipped(epoch)]

    @final
    def count_steps_per_epoch(self, schedule: Schedule, *, is_manual: bool = False) -> int | None:
        """Return the optimizer steps of an epoch; ``None`` if unknown, or if epochs differ.

        Args:
            schedule: the options of the run, before which this is known.
            is_manual: whether the model steps its optimizers itself, once for each batch.
        """
        length = self.num_batches() if self.ends_together else None
        if length is None or self.skipping_epochs:
            return None
        if schedule.unit is TrainingUnit.EPOCH:
            return _count_windows(schedule, length, is_manual=is_manual)
        # Windows go on in the next epoch.
        steps, rest = divmod(length, schedule.accumulation_steps)
        return None if rest else steps

    @final
    def count_steps(self, schedule: Schedule, *, is_manual: bool = False) -> int | None:
        """Return the optimizer steps of the whole run; ``None`` if unknown, or without a limit.

        Args:
            schedule: the options of the run, before which this is known.
            is_manual: as in :meth:`count_steps_per_epoch`.
        """
        if math.isinf(schedule.total_steps):
            return None
        total = int(schedule.total_steps)
        if schedule.unit is TrainingUnit.ITERATION:
            return total
        length = self.num_batches() if self.ends_together else None
        if length is None:
            return None
        steps = total * _count_windows(schedule, length, is_manual=is_manual)
        for epoch in self.skipping_epochs:
            if epoch < total:
                left = length - self.count_skipped(epoch)
                steps -= _count_windows(schedule, length, is_manual=is_manual)
                steps += _count_windows(schedule, left, is_manual=is_manual)
        return steps if schedule.max_steps is None else min(steps, schedule.max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the position; often empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            StateError: if the state is missing, or if it cannot be loaded.
        """

    def close(self) -> None:
        """End persistent workers; may be called again."""


def _count_windows(schedule: Schedule, length: int, *, is_manual: bool) -> int:
    """Return the windows of an epoch, by epochs: the last one ends with it."""
    return -(-length // (1 if is_manual else schedule.accumulation_steps))


def make_cut_error(batch: int) -> UsageError:
    """Return the error for a ``StopIteration`` that would end the pass early."""
    return UsageError(
        f"The data set or collate function must not raise StopIteration, but did in batch {batch}. "
        "This would end the epoch early. Raise IndexError or another error."
    )


def run_on_one_thread(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function with a single intra-op thread, as in loader workers.

    The number of threads changes the bits of sums, so a fetch in the training process would
    differ from one in a worker. With one thread, call the function directly.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(argument)
    finally:
        torch.set_num_threads(num_threads)


def pin(batch: Any) -> Any:
    """Copy a batch to pinned memory with a PyTorch loader, since that function is not public."""
    loader: DataLoader[Any] = DataLoader(
        [batch],  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_return,
        pin_memory=True,
        generator=torch.Generator(),  # in place of the default one, from which it would draw
    )
    return next(iter(loader))


def _return(batch: Any) -> Any:
    return batch
