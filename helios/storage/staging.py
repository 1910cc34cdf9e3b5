"""Host memory into which tensors are copied, so that a training may go on while they are written.

The memory is kept from one copy to the next: a fresh page costs several times as much as the copy
into one that was touched before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class HostBuffers:
    """Copies of storages in host memory, one set of them.

    Args:
        pins: whether the memory is page-locked, for copies from CUDA devices.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins
        self._kept: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def num_bytes(self) -> int:
        """How much memory is kept."""
        return sum(size * len(storages) for size, storages in self._kept.items())

    def prepare(self, sizes: Iterable[int]) -> None:
        """Make ready for storages of these sizes, in bytes; what is there already counts.

        Raises:
            MemoryError: if there is too little.
        """
        free = {size: len(storages) for size, storages in self._kept.items()}
        for size in sizes:
            if free.get(size, 0):
                free[size] -= 1
            else:
                self._kept.setdefault(size, []).append(self._allocate(size))

    def copy(self, groups: Iterable[Sequence[Tensor]]) -> None:
        """Let tensors look at copies of their storages from now on.

        The copies of the time before are given up: nobody may look at them any more. Memory that
        is no longer needed is returned.

        Args:
            groups: detached tensors; those of a group share a storage, and do so afterwards.

        Raises:
            MemoryError: if there is too little; some of the tensors look at copies then.
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
        """Return all memory."""
        self._kept = {}

    def _allocate(self, size: int) -> torch.UntypedStorage:
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:
            raise MemoryError(f"{size} bytes of host memory are not to be had") from error
        # The first write to a page is what costs time.
        memory.zero_()
        return memory.untyped_storage()


def _look_at(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    view = torch.empty(0, dtype=like.dtype)
    return view.set_(storage, like.storage_offset(), like.size(), like.stride())
