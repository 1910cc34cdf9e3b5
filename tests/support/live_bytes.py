"""Counts the bytes of all tensors that are alive, after each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helios.core.sharded_tensors import local_of


class LiveBytes(TorchDispatchMode):
    """Knows the storages that operators of this thread have made, and the most that were alive.

    What an operator allocates and frees itself is not seen; tensors on the meta device have no
    bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.phase = ""
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, found)):
            # A sharded tensor says where it should be, not where its shard is.
            local = local_of(each) if isinstance(each, Tensor) else None
            if local is not None and not local.is_meta:
                storage = local.untyped_storage()
                # An identity is used again after its storage is gone.
                reference = self._storages.get(storage._cdata)
                if reference is None or reference.expired():
                    self._storages[storage._cdata] = StorageWeakRef(storage)
        self.look()
        return found

    def count(self) -> int:
        total = 0
        for place, reference in [*self._storages.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[place]
            else:
                total += storage.nbytes()
        return total

    def look(self) -> None:
        """Note how many bytes are alive in the phase under way."""
        if self.phase:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.count())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count in a phase of this name."""
        before, self.phase = self.phase, phase
        try:
            self.look()
            yield
        finally:
            self.phase = before

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return function(*args, **kwargs)

        return call
