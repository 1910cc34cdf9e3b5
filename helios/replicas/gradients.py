"""Accumulates the gradients of micro-batches and sums them over all replicas.

A replica's gradients of an accumulation window are added in the order of its micro-batches. The
result is a leaf of the summation tree and is added at once, so that few buffers are alive. With a
single replica the gradients stay where backward has put them.

The norm of sharded gradients is a sum over rows, whose order does not depend on who holds which
row: each is a row of a parameter's first dimension. Its squares are added by halving, element by
element, in float32; the rows are then added at once, in float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from helios.core.sharded_tensors import is_sharded, local_of
from helios.core.utils import foreach, parameters_of
from helios.distributed.process_groups import collective
from helios.errors import UsageError
from helios.replicas.flat_gradients import Bucket, FlatBuffer, FlatGradients
from helios.replicas.reduction_tree import TreeStack
from helios.replicas.replicas import Replicas
from helios.state.networks import has_hooks

FindNetworks: TypeAlias = Callable[[], Mapping[str, nn.Module]]


class Gradients:
    """The gradients of a single replica: ``.grad`` always holds their sum over the window.

    Attributes:
        is_open: whether gradients were collected in this window.
        sends_early: whether gradients may be sent during backward.
        has_idle_turn: whether a turn of each iteration has no replica for this process, which must
            compute along.
        is_in_backward: whether a backward is running, in which forwards are those of activations
            that are computed again.
    """

    is_open: bool = False
    sends_early: bool = False
    has_idle_turn: bool = False
    is_in_backward: bool = False

    def __init__(self) -> None:
        self._earlier: dict[Tensor, Tensor] = {}

    def set_aside(self, parameters: Iterable[Tensor]) -> None:
        """Set aside the gradients of earlier micro-batches, so that ``.grad`` is that of one."""
        self._earlier = {each: each.grad for each in parameters if each.grad is not None}
        for parameter in self._earlier:
            parameter.grad = None

    def add_back(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients that were set aside to the current ones."""
        for parameter in parameters:
            earlier = self._earlier.pop(parameter, None)
            if earlier is not None:
                found = parameter.grad
                parameter.grad = earlier if found is None else earlier.add_(found)

    def end_turn(self) -> None:
        """End the turn of a replica, before one in which this process has none."""

    def compare_calls(self) -> None:
        """Compare which parts of a sharded model the processes have called, at the end of a pass.

        Raises:
            UsageError: if they differ.
        """

    def drop_old(self, optimizer: Optimizer) -> None:
        """Drop the gradients that parameters had when a run begins or the optimizer received them.

        Each process has summed them over the replicas that it runs, so they would depend on the
        number of processes.
        """

    def sending(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks
    ) -> AbstractContextManager[None]:
        """Return a context manager that sends gradients during the last backward of a window.

        Args:
            optimizer: the optimizer of the parameters.
            replica: number of the last replica of this process.
            find_networks: as in :meth:`collect`.
        """
        return nullcontext()

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Take the gradients of a replica's backward, so that the next one starts from zero.

        Args:
            optimizer: the optimizer of the parameters.
            replica: number of the replica.
            find_networks: returns the networks by path, to name parameters in messages.
            ends_window: whether this is the replica's last micro-batch of the window.

        Raises:
            UsageError: if parameters were added to or removed from the optimizer within the window.
        """

    def finish(self, optimizer: Optimizer) -> None:
        """Add over all replicas. ``.grad`` then holds the sum, the same on all processes."""

    def drop_unused(self) -> None:
        """Drop unused gradients, at the end of a window."""


@final
class SharedGradients(Gradients):
    """The gradients of several replicas, added along the tree.

    Args:
        replicas: the replicas to sum over.
        bucket_bytes: the minimum size of a bucket that is sent during backward; ``None`` to send
            all gradients after it.
    """

    def __init__(self, replicas: Replicas, bucket_bytes: int | None = None) -> None:
        super().__init__()
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        self.sends_early = bucket_bytes is not None and not (
            replicas.has_single_process or replicas.is_sharded_over_processes
        )
        self._sums: dict[int, GradientSum] = {}
        self._num_parameters: dict[int, int] = {}

    def drop_old(self, optimizer: Optimizer) -> None:
        """Set the gradients to None if the optimizer has new parameters."""
        size = len(parameters_of(optimizer))
        if size != self._num_parameters.get(id(optimizer)):
            self._num_parameters[id(optimizer)] = size
            optimizer.zero_grad()

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Move the gradients into the replica's leaf."""
        self._sum_of(optimizer, find_networks).add_micro_batch(replica, ends_window=ends_window)

    def sending(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks
    ) -> AbstractContextManager[None]:
        """Send them in buckets."""
        assert self._bucket_bytes is not None
        return self._sum_of(optimizer, find_networks).sending(replica, self._bucket_bytes)

    def _sum_of(self, optimizer: Optimizer, find_networks: FindNetworks) -> GradientSum:
        self.is_open = True
        known, present = self._sums.get(id(optimizer)), parameters_of(optimizer)
        held = [] if known is None else known.parameters
        if known is None or len(held) != len(present) or not all(map(operator.is_, held, present)):
            if known is not None and known.is_open:
                raise UsageError(
                    f"{type(optimizer).__name__} gained or lost parameters within an accumulation "
                    "window. Call add_param_group in on_training_step_start."
                )
            known = GradientSum(optimizer, self._replicas, find_networks())
            self._sums[id(optimizer)] = known
        return known

    def finish(self, optimizer: Optimizer) -> None:
        """Finish the tree over all processes."""
        known = self._sums.get(id(optimizer))
        if known is not None and known.is_open:
            known.finish()

    def drop_unused(self) -> None:
        """Drop the sums of a window that ended without an update."""
        self.is_open = False
        for key, known in [*self._sums.items()]:
            if known.is_open:
                del self._sums[key]


def make_gradients(replicas: Replicas, bucket_bytes: int | None = None) -> Gradients:
    """Return the gradients of a run, chosen once, when it starts.

    Args:
        replicas: the replicas to sum over.
        bucket_bytes: as in :class:`SharedGradients`.
    """
    if replicas.has_single_replica:
        return Gradients()
    return SharedGradients(replicas, bucket_bytes)


@final
class GradientSum:
    """Adds the gradients of an optimizer's parameters over micro-batches and replicas.

    Args:
        optimizer: the optimizer of the parameters.
        replicas: the replicas to sum over.
        networks: by path, to name their parameters in messages.

    Attributes:
        parameters: the parameters whose gradients are summed.
        is_open: whether gradients are collected that are not summed yet.
    """

    def __init__(
        self, optimizer: Optimizer, replicas: Replicas, networks: Mapping[str, nn.Module]
    ) -> None:
        names = {
            id(parameter): f"{path}.{name}"
            for path, network in networks.items()
            for name, parameter in network.named_parameters()
        }
        self.parameters = parameters_of(optimizer)
        self._replicas = replicas
        self._flat = FlatGradients(
            (names.get(id(parameter), f"parameter {place} of the optimizer"), parameter)
            for place, parameter in enumerate(self.parameters)
        )
        self._leaves: dict[int, FlatBuffer] = {}
        self._stack = TreeStack(replicas.local_replicas, replicas.num_replicas, self._flat.add)
        self.is_open = False
        self._sending: GradientBuckets | None = None
        self._total: FlatBuffer | None = None
        self._may_send: dict[tuple[int, ...], bool] = {}

    def add_micro_batch(self, replica: int, *, ends_window: bool) -> None:
        """Take the gradients of a replica's micro-batch. ``.grad`` is None afterwards.

        Args:
            replica: number of the replica.
            ends_window: whether this is the replica's last micro-batch of the window.
        """
        self.is_open = True
        if self._sending is not None:
            self._stack.push(self._sending.finish(), partial(self._flat.add, only_marks=True))
            return
        leaf = self._flat.move_all(self._leaves.pop(replica, None))
        if self._replicas.is_sharded:
            self._stack.push(leaf)
            if replica == self._replicas.local_replicas[-1]:
                self._add_to_window()
        elif ends_window:
            self._stack.push(leaf)
        else:
            self._leaves[replica] = leaf

    def _add_to_window(self) -> None:
        """Add the sum of a micro-batch over all replicas to that of the window.

        Processes that hold shards must do so, because they scatter the gradients of each backward.
        """
        (total,) = self._stack.take().values()
        self._total = total if self._total is None else self._flat.add(self._total, total)

    @contextmanager
    def sending(self, replica: int, num_bytes: int) -> Iterator[None]:
        """Send gradients during the last backward of a window, in a ``with`` statement.

        Args:
            replica: the last replica of this process.
            num_bytes: the minimum size of a bucket.

        Raises:
            UsageError: if backward reaches a parameter twice.
        """
        self.is_open = True
        buckets = self._flat.buckets(num_bytes)
        if not buckets or not self._agree_on_hooks():
            yield
            return
        self._flat.agree(self._replicas.reducer)
        leaf = self._leaves.pop(replica, None)
        sending = GradientBuckets(self._flat, buckets, leaf, self._add_slice)
        with sending.hooked():
            self._sending = sending
            yield

    def _agree_on_hooks(self) -> bool:
        """Return whether no parameter has other hooks; agreed once for each set of parameters."""
        trained = self._flat.trained()
        known = tuple(number for number, _ in trained)
        if known not in self._may_send:
            (are_there,) = self._replicas.agree(any(has_hooks(part) for _, part in trained))
            self._may_send[known] = not are_there
        return self._may_send[known]

    def _add_slice(self, group: int, part: slice) -> None:
        """Add a slice of the leaf being filled, over the replicas and processes."""
        assert self._sending is not None
        reducer = self._replicas.reducer
        left, beside = self._stack.preview()
        total = self._sending.leaf.flats[group][part]
        for buffer in left:
            total = buffer.flats[group][part].add_(total)
        sums = {node: buffer.flats[group][part] for node, buffer in beside.items()}
        reducer.all_reduce({**sums, reducer.nodes[-1]: total})

    def finish(self) -> None:
        """Add over all replicas. ``.grad`` then holds the sum, the same on all processes."""
        is_sent, self._sending = self._sending is not None, None
        reducer = self._replicas.reducer
        if self._total is None:
            sums = self._stack.take()
        else:
            sums, self._total = {reducer.nodes[0]: self._total}, None
        total = self._flat.reduce(sums, reducer, only_marks=is_sent)
        self._flat.set_gradients(total)
        self.is_open = False


@final
class GradientBuckets:
    """The last backward of a window in a process, whose gradients are sent as they are computed.

    A bucket is a slice of the flat buffers. Each element is added in the same order as without
    buckets, so the bits are the same. All processes send the buckets in one order that follows from
    the parameters: the last ones first, because backward reaches them first.

    Args:
        flat: the flat buffers of the gradients.
        buckets: in the order in which they are sent.
        leaf: what this replica has accumulated in the window; ``None`` for its first micro-batch.
        add: adds a slice of a group over the replicas and processes.
    """

    def __init__(
        self,
        flat: FlatGradients,
        buckets: list[Bucket],
        leaf: FlatBuffer | None,
        add: Callable[[int, slice], None],
    ) -> None:
        self._flat = flat
        self._is_first = leaf is None
        self.leaf = flat.open_leaf(leaf)
        self._add = add
        self._buckets = buckets
        self._bucket_of = {number: bucket for bucket in buckets for number in bucket.numbers}
        self._num_waiting = {id(bucket): len(bucket.numbers) for bucket in buckets}
        self._moved: set[int] = set()
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
            if number in self._moved:
                raise UsageError(
                    f"Engine(bucket_bytes=...) needs one backward for each parameter, but "
                    f"{self._flat.name_of(number)!r} was reached twice, as in checkpointing "
                    "with use_reentrant=True. Pass use_reentrant=False, or omit bucket_bytes."
                )
            self._move(number)

        return hook

    def _move(self, number: int) -> None:
        self._flat.move(number, self.leaf, is_first=self._is_first)
        self._moved.add(number)
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
        """Take parameters that this backward has not reached, send the rest and return the leaf."""
        missing = set()
        for number, parameter in self._flat.trained():
            if number in self._moved:
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


@final
class WindowWeights:
    """The weights of the losses of an open window, added in the order of their gradients.

    Args:
        replicas: the replicas to sum over.

    Attributes:
        is_open: whether weights were added in this window.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.is_open = False
        self._replicas = replicas
        self._sums: dict[Optimizer, dict[int, float]] = {}
        # Whether the losses of an optimizer have weights, and for which all processes know it.
        self._kinds: dict[Optimizer, bool] = {}
        self._agreed: set[Optimizer] = set()

    def add(self, optimizer: Optimizer, replica: int, weight: float | None) -> None:
        """Add the weight of a loss.

        Args:
            optimizer: the optimizer whose parameters get its gradients.
            replica: number of the replica.
            weight: the weight; ``None`` for a plain loss.

        Raises:
            UsageError: for a weight, if all processes know that the losses have none.
        """
        has_weight = weight is not None
        if self._kinds.setdefault(optimizer, has_weight) is not has_weight:
            if has_weight and optimizer in self._agreed:
                raise make_mixed_error()
            # All processes learn of it with the sum.
            weight = math.nan
        if weight is not None:
            self.is_open = True
            sums = self._sums.setdefault(optimizer, {})
            sums[replica] = sums.get(replica, 0.0) + weight

    def pop_sum(self, optimizer: Optimizer) -> float | None:
        """Return the sum of a window over all replicas; ``None`` if the losses have no weights.

        All processes call this together.

        Raises:
            UsageError: in all of them, if only some of the losses have weights.
        """
        sums = self._sums.pop(optimizer, {})
        if optimizer not in self._agreed:
            kind, is_mixed = self._kinds.get(optimizer), any(map(math.isnan, sums.values()))
            flags = (kind is True or is_mixed, kind is False or is_mixed)
            some_have, some_lack = self._replicas.agree(*flags)
            if some_have and some_lack:
                raise make_mixed_error()
            if not some_have and not some_lack:
                return None
            self._kinds[optimizer] = some_have
            self._agreed.add(optimizer)
        if not self._kinds[optimizer]:
            return None
        total = self._replicas.add_up([sums.get(r, 0.0) for r in self._replicas.local_replicas])
        if math.isnan(total):
            raise make_mixed_error()
        return total

    def are_plain(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether all processes know that no loss of these optimizers has a weight."""
        return all(each in self._agreed and not self._kinds[each] for each in optimizers)

    def drop_unused(self) -> None:
        """Drop the weights of a window that ended without an update."""
        self.is_open = False
        self._sums.clear()


def make_mixed_error() -> UsageError:
    """Return the error for losses of one optimizer of which only some have weights."""
    return UsageError(
        "The losses of an optimizer must all be a WeightedLoss, or none of them: its gradients are "
        "divided by the sum of the weights, and a plain loss has none. Return "
        "WeightedLoss(sum=loss, weight=1) instead of a plain one."
    )


def divide(optimizer: Optimizer, count: float) -> None:
    """Divide the gradients of an optimizer by a number, in place."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    foreach("div", gradients, float(count))


def norm_by_rows(
    gradients: Sequence[Tensor], num_processes: int = 1, *, norm_type: float = 2.0
) -> Tensor:
    """Return a norm of all gradients, with the same bits for any number of processes.

    Args:
        gradients: at least one; all are sharded over the processes, or none is.
        num_processes: number of processes that hold shards; all of them call this together.
        norm_type: 2, or ``inf`` for the largest magnitude.

    Returns:
        A float32 tensor without dimensions, on the device of the gradients.

    Raises:
        UsageError: for another norm.
    """
    if norm_type not in (2.0, math.inf):
        raise UsageError(
            f"The norm of sharded gradients must be of type 2 or inf, got {norm_type}: others "
            "depend on the number of processes. Pass norm_type=2.0."
        )
    is_largest = norm_type == math.inf
    measure = _largest_of_rows if is_largest else _row_squares
    with torch.no_grad():
        rows = [measure(local_of(gradient)) for gradient in gradients]
        if is_sharded(gradients[0]):
            counts = [gradient.shape[0] if gradient.dim() else 1 for gradient in gradients]
            rows = _gather_rows(rows, counts, num_processes)
        values = torch.cat(rows)
        return values.max() if is_largest else values.double().sum().sqrt().float()


def _largest_of_rows(local: Tensor) -> Tensor:
    count = local.shape[0] if local.dim() else 1
    if local.numel() == 0:
        return local.new_zeros(count, dtype=torch.float32)
    return local.to(torch.float32).reshape(count, -1).abs().amax(1)


def _row_squares(local: Tensor) -> Tensor:
    """Return the sum of squares of each row; its bits depend on that row only."""
    count = local.shape[0] if local.dim() else 1
    if local.numel() == 0:
        return local.new_zeros(count, dtype=torch.float32)
    squares = local.detach().to(torch.float32).reshape(count, -1).square()
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares[:, 0]


def _gather_rows(rows: list[Tensor], counts: list[int], num_processes: int) -> list[Tensor]:
    """Return the rows of all processes. The first processes have ceil(count / P) of each."""
    sizes = [-(-count // num_processes) for count in counts]
    own = torch.cat(
        [pad(part, (0, size - len(part))) for part, size in zip(rows, sizes, strict=True)]
    )
    found = [torch.empty_like(own) for _ in range(num_processes)]
    with collective("norm_by_rows"):
        dist.all_gather(found, own)
    parts = torch.split(torch.stack(found), sizes, dim=1)
    return [part.reshape(-1)[:count] for part, count in zip(parts, counts, strict=True)]
