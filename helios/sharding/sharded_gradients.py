"""The gradients of sharded models: each process keeps its shard of their sum over all replicas.

In each turn the processes train one replica each, and exchange the gradients of a unit in its
backward. The sums of a turn are added to those of earlier turns as far as the tree is complete, so
that each element is added in the order of the tree, whoever has computed it.

The processes gather the parameters of a unit together, and FSDP does not look at which one: two
that call different units of one size would compute with shards of both, and of different sizes
would wait or be aborted. So their calls are compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from helios.core.sharded_tensors import local_of
from helios.core.utils import parameters_of
from helios.errors import UsageError
from helios.replicas.gradients import FindNetworks, Gradients
from helios.replicas.reduction_tree import children, is_power_of_two, subtrees
from helios.replicas.replicas import Replicas
from helios.sharding.fsdp_adapter import ShardedUnit
from helios.sharding.requirements import check_hooks

_COMPARED_AT_ONCE = 1000
_BITS = 64
_FORWARD, _END_OF_FORWARD, _GRADIENTS, _BACKWARD = range(4)
_WORDS = {
    _FORWARD: "the forward of",
    _END_OF_FORWARD: "the end of the forward of",
    _GRADIENTS: "the gradients of",
    _BACKWARD: "the backward of",
}


@final
class ShardedGradients(Gradients):
    """Gradients that FSDP scatters in each turn, added over turns and micro-batches.

    Args:
        replicas: the replicas of the run, in waves.
        units: the units of the networks, by name.
        parameters: all sharded parameters, by name.
    """

    def __init__(
        self, replicas: Replicas, units: Mapping[str, ShardedUnit], parameters: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._waves = Waves(replicas.num_replicas, replicas.num_processes, replicas.rank)
        self.has_idle_turn = self._waves.has_idle_turn
        self._parameters = parameters
        self._trained = _trained(parameters)
        self._sums: dict[str, Tensor] = {}
        self._present: set[str] = set()
        self._calls = calls = UnitCalls(replicas, [*units])
        self._units = {
            name: UnitSum(self._waves, partial(calls.record_sum, number))
            for number, name in enumerate(units)
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        for number, (name, unit) in enumerate(units.items()):
            self._connect(number, unit, self._units[name], names)

    def _connect(
        self, number: int, unit: ShardedUnit, unit_sum: UnitSum, names: Mapping[int, str]
    ) -> None:
        def before_gather() -> None:
            # In forward, the call was recorded.
            if self.is_in_backward:
                self._calls.record_gather(number)

        def before_forward(*_: Any) -> None:
            # In backward, activations are computed again.
            if not self.is_in_backward:
                if torch.is_grad_enabled():
                    unit_sum.count_forward()
                self._calls.record_forward(number)

        def after_forward(*_: Any) -> None:
            if not self.is_in_backward:
                self._calls.record_end(number)

        unit.use(unit_sum)
        unit.watch_gradients(
            {
                id(parameter): partial(self._record_gradient, unit_sum, names[id(parameter)])
                for parameter in unit.parameters()
            }
        )
        unit.before_gather(before_gather)
        unit.before_forward(before_forward)
        unit.after_forward(after_forward)
        unit.watch_values(partial(_refuse_write, names))

    def _record_gradient(self, unit_sum: UnitSum, name: str, gradient: Tensor) -> None:
        unit_sum.record_gradient(gradient)
        if not self._waves.is_idle:
            self._present.add(name)

    def drop_old(self, optimizer: Optimizer) -> None:
        """Set the gradients to None, and check that the same parameters are trained.

        Raises:
            UsageError: if parameters were frozen or unfrozen since ``setup``, or have hooks.
        """
        optimizer.zero_grad()
        check_hooks(self._parameters)
        changed = self._trained ^ _trained(self._parameters)
        if changed:
            raise UsageError(
                f"requires_grad of {', '.join(sorted(changed))} was changed after setup(), but "
                'Trainer(sharding="full") fixes there what is trained. Set it in setup(), or use '
                'sharding="none".'
            )

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Take what the processes have added in this turn."""
        self.end_turn()

    def end_turn(self) -> None:
        """End a turn, in which this process has trained a replica or has only run along.

        Raises:
            UsageError: if a unit took part in some turns of this iteration, but not in all.
        """
        self.is_open = True
        waves = self._waves
        for unit in self._units.values():
            unit.add_late()
        self._calls.compare_forward()
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or not waves.is_last:
                continue
            if name in self._sums:
                with torch.no_grad():
                    local_of(self._sums[name]).add_(local_of(gradient))
            else:
                self._sums[name] = gradient
        for name, unit in self._units.items():
            unit.finish_turn(name)
        waves.turn = 0 if waves.is_last else waves.turn + 1

    def finish(self, optimizer: Optimizer) -> None:
        """Set ``.grad`` to the sums; to None where no replica has a gradient."""
        own = set(map(id, parameters_of(optimizer)))
        names = [name for name in sorted(self._trained) if id(self._parameters[name]) in own]
        there = self._find_present(names)
        for name in names:
            total = self._sums.pop(name, None)
            self._parameters[name].grad = total if name in there else None
        self._present.difference_update(names)

    def _find_present(self, names: Sequence[str]) -> list[str]:
        self._calls.compare()
        flags = self._replicas.agree(*(name in self._present for name in names))
        return [name for name, is_there in zip(names, flags, strict=True) if is_there]

    def compare_calls(self) -> None:
        """Compare the calls of units with those of other processes.

        Raises:
            UsageError: if they differ.
        """
        self._calls.compare()

    def drop_unused(self) -> None:
        self._sums, self._present, self.is_open = {}, set(), False


def _refuse_write(names: Mapping[int, str], parameter: Tensor) -> None:
    raise UsageError(
        f"A forward of a sharded model must not write to parameters, but {names[id(parameter)]} "
        "was changed in place. It is gathered for this forward only, so the change would be lost. "
        'Make it a buffer, or train with sharding="none".'
    )


def _trained(parameters: Mapping[str, Tensor]) -> set[str]:
    return {name for name, parameter in parameters.items() if parameter.requires_grad}


@final
class UnitSum:
    """Adds what the processes compute in each turn, in the order of the tree.

    FSDP reduces after each backward of a module, with zeros for parameters without a gradient. If
    a module is called several times in a forward, autograd yields its gradients at the last one.
    FSDP sees no backward of a call whose inputs need no gradient, or whose result is not used; then
    nobody knows which one is the last, and the sum is made at the end of the turn.

    Args:
        waves: the turns of an iteration.
        before_exchange: called before processes exchange gradients.
    """

    def __init__(self, waves: Waves, before_exchange: Callable[[], None]) -> None:
        self._waves = waves
        self._before_exchange = before_exchange
        self._sums = NodeSums(waves.num_replicas)
        self._num_forwards = 0
        self._num_turns = 0
        self._has_new = False
        self._leaf: Tensor | None = None
        self._late: tuple[Tensor, dist.ProcessGroup] | None = None
        self._has_added = False

    def add_late(self) -> None:
        """Add what no backward of this turn was known to be the last for."""
        if self._late is not None:
            output, group = self._late
            leaf = output.new_zeros(group.size(), output.numel())
            self._add(output, leaf if self._leaf is None else self._leaf, group)

    def finish_turn(self, name: str) -> None:
        """Forget forward passes without a backward, as those of a loss that left out a module.

        :meth:`add_late` has been called, and gradients were taken.

        Args:
            name: of the unit, for the message.

        Raises:
            UsageError: if there was a sum in some turns of the iteration, but not in all.
        """
        self._num_forwards, self._has_new, self._leaf, self._late = 0, False, None, None
        self._has_added = False
        if not self._waves.is_last:
            return
        if self._num_turns not in (0, self._waves.turn + 1):
            raise UsageError(
                f"All replicas must use the sharded network {name!r} in a training step, but it "
                f"took part in {self._num_turns} of {self._waves.turn + 1} turns. Use it in each "
                'step, multiplied by zero if need be, or train with sharding="none".'
            )
        self._num_turns = 0

    def count_forward(self) -> None:
        """Count a call of the module that will have a backward."""
        self._num_forwards += 1

    def record_gradient(self, _: Tensor) -> None:
        """Record that a parameter has got a gradient since the last reduction."""
        self._has_new = True

    def reduce(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        """Add a row for each process; the output is the whole sum after the last turn.

        Args:
            output: this process's shard of the sum.
            chunks: what this process has computed, one row per process.
            group: the processes.

        Raises:
            UsageError: if there was a sum in this turn, by another backward.
        """
        if self._has_whole_leaf(chunks):
            self._add(output, chunks if self._leaf is None else self._leaf, group)
            return
        # FSDP adds the outputs of a turn to the first one, in place: x + -0.0 has the bits of x.
        output.fill_(-0.0)
        if self._late is None:
            self._late = output, group

    def _add(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        if self._has_added:
            raise UsageError(
                "A training step of a sharded model must have one backward, that of the loss that "
                "it returns, but gradients of a unit came twice. Do not call backward() or "
                'torch.autograd.grad() in train_step(), or train with sharding="none".'
            )
        self._has_added = True
        self._before_exchange()
        waves = self._waves
        self._num_turns += 1
        self._leaf = self._late = None
        if waves.is_node:
            self._sums.add(waves.replicas, _halve(chunks, group))
        else:
            received = torch.empty_like(chunks)
            dist.all_to_all_single(received, chunks, group=group)
            # What an idle process has sent is not looked at.
            for replica, row in zip(waves.replicas, received, strict=False):
                self._sums.add(range(replica, replica + 1), row)
            self._sums.release_buffers([received])
        if waves.is_last:
            output.copy_(self._sums.take())

    def _has_whole_leaf(self, chunks: Tensor) -> bool:
        """Return whether all backwards of this turn have been made; adds them up."""
        has_new, self._has_new = self._has_new, False
        self._num_forwards -= 1
        if self._num_forwards <= 0 and self._leaf is None:
            return True
        if has_new:
            # Zeros are not added where there is no gradient: -0.0 would become 0.0.
            self._leaf = chunks.clone() if self._leaf is None else self._leaf.add_(chunks)
        return self._num_forwards <= 0


def _halve(chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the row of this process over all processes, nearest rank first.

    Args:
        chunks: one row per process, of which there are 2^k.
        group: the processes.
    """
    rank, rows = group.rank(), chunks
    for level in range(group.size().bit_length() - 1):
        partner, bit = rank ^ (1 << level), (rank >> level) & 1
        mine, theirs = rows[bit::2], rows[1 - bit :: 2].contiguous()
        received = torch.empty_like(theirs)
        peer = dist.get_global_rank(group, partner)
        exchange = [
            dist.P2POp(dist.irecv, received, peer, group),
            dist.P2POp(dist.isend, theirs, peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        rows = torch.add(received, mine) if bit else torch.add(mine, received)
    return rows.reshape(-1)


@final
class Waves:
    """The turns of an iteration: in turn t, rank r of P trains replica t * P + r.

    Args:
        num_replicas: V.
        num_processes: P, between 1 and V.
        rank: number of this process.

    Attributes:
        turn: number of the current turn.

    Example:
        >>> waves = Waves(num_replicas=5, num_processes=2, rank=1)
        >>> waves.turn = 2
        >>> waves.replicas, waves.is_idle
        (range(4, 5), True)
    """

    def __init__(self, num_replicas: int, num_processes: int, rank: int) -> None:
        self.num_replicas = num_replicas
        self._num_processes = num_processes
        self._rank = rank
        self.turn = 0

    @property
    def replicas(self) -> range:
        """The replicas of this turn, in the order of ranks."""
        begin = self.turn * self._num_processes
        return range(begin, min(begin + self._num_processes, self.num_replicas))

    @property
    def is_last(self) -> bool:
        """Whether this is the last turn of the iteration."""
        return self.replicas.stop == self.num_replicas

    @property
    def is_idle(self) -> bool:
        """Whether this process has no replica in this turn, and only computes along."""
        return self._rank >= len(self.replicas)

    @property
    def has_idle_turn(self) -> bool:
        """Whether it has none in the last turn."""
        rest = self.num_replicas % self._num_processes
        return 0 < rest <= self._rank

    @property
    def is_node(self) -> bool:
        """Whether the replicas of this turn are a node of the tree whose halves are nodes, too.

        Then they can be added by recursive halving.
        """
        replicas = self.replicas
        is_full = len(replicas) == self._num_processes and is_power_of_two(len(replicas))
        return is_full and subtrees(replicas, self.num_replicas) == [replicas]


@final
class NodeSums:
    """Adds the values of nodes as soon as both children of a node are present.

    At most log2(V) + 1 values are alive between two turns.

    Args:
        num_replicas: leaves of the whole tree.
    """

    def __init__(self, num_replicas: int) -> None:
        self._root = range(num_replicas)
        self._values: dict[range, Tensor] = {}
        self._parents: dict[range, range] = {}
        self._add_children(self._root)

    def _add_children(self, node: range) -> None:
        if len(node) > 1:
            for child in children(node):
                self._parents[child] = node
                self._add_children(child)

    def add(self, node: range, value: Tensor) -> None:
        """Add the value of a node; it may be changed in place."""
        self._values[node] = value
        while node != self._root:
            node = self._parents[node]
            left, right = children(node)
            if left not in self._values or right not in self._values:
                return
            self._values[node] = self._values.pop(left).add_(self._values.pop(right))

    def release_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Copy what refers to the memory of any of these buffers, so that they can be freed."""
        owned = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        for node, value in self._values.items():
            if value.untyped_storage().data_ptr() in owned:
                self._values[node] = value.clone()

    def take(self) -> Tensor:
        """Return the sum over all replicas, and begin anew."""
        total = self._values.pop(self._root)
        assert not self._values, "all values have been added"
        return total


@final
class UnitCalls:
    """The calls of this process since the last comparison.

    The first calls are compared one by one, before anything is gathered or summed; later ones
    together, when backward begins, and at the end of a step or of a pass without gradients, so
    that nothing that was computed in between is used.

    Args:
        replicas: the processes.
        names: of the units.
    """

    def __init__(self, replicas: Replicas, names: Sequence[str]) -> None:
        self._replicas = replicas
        self._names = names
        self._end = len(_WORDS) * len(names)
        self._calls = array("L")
        self._num_single = 0
        self._is_forward = False

    def record_forward(self, unit: int) -> None:
        """Record that the forward of a unit begins."""
        self._is_forward = True
        self._record(_FORWARD, unit)

    def record_end(self, unit: int) -> None:
        """Record that the forward of a unit has ended."""
        self._record(_END_OF_FORWARD, unit)

    def record_gather(self, unit: int) -> None:
        """Record that a unit is gathered in backward; compares before the first one."""
        self._record(_BACKWARD, unit)
        self.compare_forward()

    def _number(self, kind: int, unit: int) -> int:
        return kind * len(self._names) + unit

    def _record(self, kind: int, unit: int) -> None:
        call = self._number(kind, unit)
        self._calls.append(call)
        if self._num_single < _COMPARED_AT_ONCE:
            self._num_single += 1
            self._compare_one(call)

    def _compare_one(self, call: int) -> None:
        made = self._replicas.agree(*(call == other for other in range(self._end + 1)))
        found = [self._describe(other) for other, is_made in enumerate(made) if is_made]
        if len(found) > 1:
            raise _make_error(found)

    def record_sum(self, unit: int) -> None:
        """Record that the gradients of a unit are to be added over the processes.

        Compares before the first one after a forward: after different calls, processes would wait
        for sums that others do not make.
        """
        self._record(_GRADIENTS, unit)
        self.compare_forward()

    def compare_forward(self) -> None:
        """Compare the calls, if a forward was among them."""
        if self._is_forward:
            self.compare()

    def compare(self) -> None:
        """Compare the calls since the last comparison; all processes call this together.

        Raises:
            UsageError: if not all processes have made the same calls in the same order.
        """
        if self._num_single < _COMPARED_AT_ONCE:
            # Another process may come to a single one now, with a message of another length.
            self._compare_one(self._end)
        calls, self._calls = self._calls, array("L")
        self._is_forward = False
        digest = hashlib.blake2b(calls.tobytes(), digest_size=_BITS // 8).digest()
        number = int.from_bytes(digest, "big")
        bits = [bool(number >> place & 1) for place in range(_BITS)]
        agreed = self._replicas.agree(*bits, *(not bit for bit in bits))
        if any(one and zero for one, zero in zip(agreed[:_BITS], agreed[_BITS:], strict=True)):
            raise _make_error(self._find_difference(calls))

    def _find_difference(self, calls: array[int]) -> list[str]:
        tables = self._replicas.gather_objects(calls.tolist())
        for place in range(max(map(len, tables))):
            made = {table[place] if place < len(table) else self._end for table in tables}
            if len(made) > 1:
                return sorted(map(self._describe, made))
        raise AssertionError("digests differ, and so do the calls")

    def _describe(self, call: int) -> str:
        if call == self._end:
            return "the end of its calls"
        kind, unit = divmod(call, len(self._names))
        return f"{_WORDS[kind]} {self._names[unit]}"


def _make_error(found: Sequence[str]) -> UsageError:
    return UsageError(
        "All processes must call the units of a sharded model in the same order, because they "
        f"gather them together, but one came to {found[0]} while another came to "
        f"{' and to '.join(found[1:])}. Call a unit for every replica, and use its result in "
        "the loss, multiplied by zero if need be, or make the choice inside of a unit: take its "
        "parts out of Model.shard()."
    )
