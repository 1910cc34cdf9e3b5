"""The tensors of a payload on their way to a file: copied to the host, and written by a thread.

Training continues while the copies are written. Their memory is reused: writing to a new page takes
several times as long as to one in use.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from helios.core.memory import memory_in, span_of, tensor_on

_LOGGER = logging.getLogger(__name__)
Result = TypeVar("Result")


class HostBuffers:
    """One set of copies of storages in host memory.

    Args:
        pins: whether the memory is page-locked, for copies from CUDA devices.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins
        self._kept: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def num_bytes(self) -> int:
        """The allocated memory in bytes."""
        return sum(size * len(storages) for size, storages in self._kept.items())

    def copy(self, groups: Iterable[Sequence[Tensor]]) -> None:
        """Copy storages to host memory, and make their tensors views of the copies.

        The copies of the previous call become invalid. Memory that is not needed is freed.

        Args:
            groups: detached tensors; those of a group share a storage, and still do afterwards.

        Raises:
            MemoryError: if there is not enough; some of the tensors are views of copies then.
        """
        free, self._kept = self._kept, {}
        taken: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        devices: set[torch.device] = set()
        for group in groups:
            source = group[0].untyped_storage()
            size = source.nbytes()
            own = free.get(size)
            target = own.pop() if own else self._allocate(size)
            target.copy_(source, non_blocking=self._pins)
            taken[size].append(target)
            devices.add(source.device)
            for tensor in group:
                offset = int(tensor.storage_offset())
                tensor.data = tensor_on(target, tensor.dtype, tensor.shape, tensor.stride(), offset)
        self._kept = dict(taken)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def release(self) -> None:
        """Free all memory."""
        self._kept = {}

    def _allocate(self, size: int) -> torch.UntypedStorage:
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:
            raise MemoryError(f"{size} bytes of host memory could not be allocated") from error
        # Touch the pages now: the first write to a page is slow.
        memory.zero_()
        return memory.untyped_storage()


def compact(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Move tensors away from storages that would be written for a small part only, in place.

    A storage that several tensors use stays whole, as torch writes it once.

    Args:
        tensors: detached tensors.

    Returns:
        The tensors, grouped by their storages.
    """
    found: dict[tuple[str, int, torch.dtype], list[Tensor]] = {}
    for part in tensors:
        storage = part.untyped_storage()
        if storage.nbytes():
            found.setdefault((str(part.device), storage.data_ptr(), part.dtype), []).append(part)
    taken: set[tuple[str, int]] = set()
    for (device, address, dtype), group in found.items():
        size = group[0].untyped_storage().nbytes()
        is_small = len(group) == 1 and size > group[0].nbytes
        # torch writes a storage with elements of one type, and reads whole elements only.
        if is_small or size % dtype.itemsize or (device, address) in taken:
            _move(group)
        taken.add((device, address))
    return [*found.values()]


def _move(group: Sequence[Tensor]) -> None:
    if len(group) == 1:
        group[0].data = group[0].detach().clone()
        return
    spans = [span_of(part) for part in group]
    begin, end = min(spans)[0], max(span[1] for span in spans)
    storage = memory_in((begin, end), group).clone().untyped_storage()
    for part in group:
        first = (part.data_ptr() - begin) // part.element_size()
        part.data = tensor_on(storage, part.dtype, part.shape, part.stride(), first)


@final
class WriterThread:
    """Runs work in a thread; the work must not raise.

    Args:
        name: the name of the thread.
        content: what it writes, in messages.
        copies: whether the work may have copies; otherwise nothing is copied.
        pins: whether what it writes is on CUDA devices.

    Attributes:
        buffers: the memory of the copies; ``None`` if nothing is copied.
    """

    def __init__(
        self, name: str, *, content: str = "", copies: bool = False, pins: bool = False
    ) -> None:
        self.buffers = HostBuffers(pins=pins) if copies else None
        self._name = name
        self._content = content
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def copying(self, make: Callable[[HostBuffers | None], Result]) -> Result:
        """Return the result of a function, which gets buffers, or ``None`` if memory is short."""
        if self.buffers is not None:
            try:
                return make(self.buffers)
            except MemoryError as error:
                self.buffers = None
                _LOGGER.warning(
                    "There is too little memory for a copy of %s (%s), so training waits from now "
                    "on until each checkpoint is on the disk, as with "
                    "CheckpointStore(is_async=False).",
                    self._content,
                    error,
                )
        return make(None)

    def start(self, work: Callable[[], None]) -> None:
        """Begin with the next work; the one before must have ended."""

        def run() -> None:
            try:
                work()
            finally:
                self._is_idle.set()

        thread = threading.Thread(target=run, name=self._name)
        self._is_idle.clear()
        try:
            thread.start()
        except RuntimeError:
            self._is_idle.set()
            raise
        self._thread = thread

    def wait(self) -> None:
        """Wait until no work is in progress."""
        if os.getpid() != self._pid:
            # A forked process has no such thread, and would wait forever.
            self._thread = None
            return
        # Before Python 3.13, an interrupted join takes the thread for ended.
        self._is_idle.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until no work is in progress, and release the memory.

        An interruption is raised afterwards. It does not shorten the wait: the thread must stop
        writing to the folder before another run may use it.
        """
        interruption: KeyboardInterrupt | None = None
        has_waited = False
        try:
            while not has_waited:
                try:
                    self.wait()
                    has_waited = True
                except KeyboardInterrupt as error:
                    interruption = error
            if interruption is not None:
                raise interruption
        finally:
            if self.buffers is not None:
                self.buffers.release()
