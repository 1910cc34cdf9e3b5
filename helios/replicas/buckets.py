"""Adds and sends gradients in buckets during backward, for accelerators.

A bucket is a slice of the flat buffers. Each element is added in the same order as without buckets,
so the bits are the same. All processes send the buckets in one order that follows from the
parameters: the last ones first, because backward reaches them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor

from helios.errors import UsageError
from helios.replicas.flat_gradients import Bucket, FlatBuffer, FlatGradients

Add = Callable[[int, slice], None]


@final
class GradientBuckets:
    """The last backward of a window in a process, whose gradients are sent as they are computed.

    Args:
        flat: the flat buffers of the gradients.
        buckets: in the order in which they are sent.
        leaf: what this replica has accumulated in the window; ``None`` for its first micro-batch.
        add: adds a slice of a group over the replicas and processes.
    """

    def __init__(
        self, flat: FlatGradients, buckets: list[Bucket], leaf: FlatBuffer | None, add: Add
    ) -> None:
        self._flat = flat
        self._is_first = leaf is None
        self.leaf = flat.open_leaf(leaf)
        self._add = add
        self._buckets = buckets
        self._bucket_of = {number: bucket for bucket in buckets for number in bucket.numbers}
        self._num_waiting = {id(bucket): len(bucket.numbers) for bucket in buckets}
        self._taken: set[int] = set()
        self._num_sent = 0
        device = buckets[0].device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Take gradients during a backward in a ``with`` statement, parameter by parameter."""
        with ExitStack() as stack:
            for number, parameter in self._flat.trained():
                hook = self._make_hook(number)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            yield

    def _make_hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if number in self._taken:
                raise UsageError(
                    f"Engine(bucket_bytes=...) needs one backward for each parameter, but "
                    f"{self._flat.name_of(number)!r} was reached twice, as in checkpointing "
                    "with use_reentrant=True. Pass use_reentrant=False, or omit bucket_bytes."
                )
            self._take(number)

        return hook

    def _take(self, number: int) -> None:
        self._flat.move(number, self.leaf, is_first=self._is_first)
        self._taken.add(number)
        bucket = self._bucket_of[number]
        self._num_waiting[id(bucket)] -= 1
        while self._num_sent < len(self._buckets):
            following = self._buckets[self._num_sent]
            if self._num_waiting[id(following)]:
                return
            self._send(following)

    def _send(self, bucket: Bucket) -> None:
        self._num_sent += 1
        if self._stream is None:
            self._add(bucket.group, bucket.part)
            return
        # The device continues with backward meanwhile.
        self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(self._stream):
            self._add(bucket.group, bucket.part)

    def finish(self) -> FlatBuffer:
        """Take what this backward has not reached, send the rest and return the leaf."""
        missing = set()
        for number, parameter in self._flat.trained():
            if number in self._taken:
                continue
            if parameter.grad is None:
                missing.add(number)
            else:
                self._flat.move(number, self.leaf, is_first=self._is_first)
        self._flat.mark(self.leaf, missing, is_first=self._is_first)
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return self.leaf
