"""What a loop sees of its data: a source for each phase, and a pass of batches from any place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from helios.errors import UsageError


class BatchIterator(ABC):
    """The batches of one pass: an item is the list of those of one iteration.

    It has an entry for each replica of the process; :data:`helios.data.shard.NO_BATCH` stands for
    that of one which has none.

    A fetch that may draw sets all generators and leaves them set: in training the caller seeds
    again for the step, and evaluation restores what it found.

    Attributes:
        num_samples: positions of the order that all replicas of the run have consumed in the
            iteration that came last; 0 if unknown.
        is_last: whether it ends the pass.
    """

    num_samples: int = 0
    is_last: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the batches of the next iteration."""

    @abstractmethod
    def close(self) -> None:
        """End the pass and the workers that live for it only; may be called again."""


@final
class NoBatches(BatchIterator):
    """Stands where no pass was begun.

    Args:
        what: how the error calls the pass.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __next__(self) -> Any:
        raise UsageError(f"{self._what} is not there: the epoch was not started.")

    def close(self) -> None:
        """Do nothing."""


class Source(ABC):
    """The data of one loader, over all its passes.

    Attributes:
        name: which of several loaders of a phase it is; empty where there is one.
        loader: the loader.
    """

    name: str = ""
    loader: Any

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What the data is, in plain values; compared when a run is resumed (DESIGN section 6)."""

    @property
    def length(self) -> int | None:
        """The samples that the data has now; ``None`` where nobody says."""
        return None

    @property
    def pass_length(self) -> int | None:
        """What :attr:`length` was when the last pass began; ``None`` before there is one."""
        return None

    @property
    @abstractmethod
    def can_resume(self) -> bool:
        """Whether a pass can begin in its middle."""

    @property
    def claimant(self) -> str | None:
        """The class whose own ``state_dict`` a resume rests on; ``None`` where Helios computes."""
        return None

    @property
    def claimed(self) -> tuple[object, ...]:
        """The objects whose state :meth:`state_dict` takes from their own."""
        return ()

    @property
    def missing(self) -> dict[str, str]:
        """What a resume needs and :meth:`state_dict` lacks: place and reason."""
        return {}

    @property
    @abstractmethod
    def level(self) -> str:
        """``"exact"``, ``"restart"`` for a foreign loader with state, else ``"none"``."""

    @property
    def remedy(self) -> str:
        """What would make a source resumable that is not; else empty."""
        return ""

    @property
    def ends_together(self) -> bool:
        """Whether the passes of all processes end in the same iteration, by construction."""
        return True

    @property
    def state_is_per_process(self) -> bool:
        """Whether :meth:`state_dict` holds another state in each process."""
        return False

    @abstractmethod
    def batches(self, epoch: int, *, batch: int = 0, sample: int = 0) -> BatchIterator:
        """Begin a pass.

        Args:
            epoch: number of the pass, from 0.
            batch: number of the first batch.
            sample: position of its first sample in the order of the epoch; a multiple of the
                number of replicas.
        """

    @abstractmethod
    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the batches of a whole pass that goes on at a place; ``None`` if unknown."""

    def indices(self, epoch: int, *, batch: int = 0, sample: int = 0) -> list[Any] | None:
        """Return the indices of the samples of one iteration; ``None`` where nobody knows them.

        Those of all replicas of the run, replica by replica.
        """
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what besides the place is needed to resume; mostly nothing."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned.

        Raises:
            StateError: if the state is missing, or nobody can take it.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers that live from pass to pass; may be called again."""


def make_cut_error(batch: int) -> UsageError:
    """Make the error for what a loop would take for the end of the data."""
    return UsageError(
        f"The data set or collate function must not raise StopIteration, but did in batch {batch}. "
        "It would end the epoch early; raise IndexError or another error."
    )


def run_on_one_thread(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function under one intra-op thread, as workers have, where there are several.

    The number of threads changes the bits of sums, so a fetch in the training process would else
    differ from one in a worker (DESIGN section 1). Who has one thread calls the function itself.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(argument)
    finally:
        torch.set_num_threads(num_threads)
