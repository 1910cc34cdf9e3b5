"""Prepares the tensors of a payload for a file: without unused memory, and copied to the host.

Training continues while the copies are written. Their memory is reused: writing to a new page takes
several times as long as to one in use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from helios.core.memory import memory_in, span_of, tensor_on


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
                tensor.data = _look_at(target, tensor)
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


def _look_at(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    view = torch.empty(0, dtype=like.dtype)
    return view.set_(storage, like.storage_offset(), like.size(), like.stride())


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
