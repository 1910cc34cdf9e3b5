"""Digests of every tensor of an iteration, for ``Trainer(ledger="full")``.

A line then names each tensor of the batch, the generators, the gradients and the parameters, in the
order in which an iteration computes them. What belongs to a replica is collected from the process
that runs it; gradients and parameters are equal on all processes, so one of them is enough. Those
of which each process holds a shard are gathered by all, one after another.

==============  ===========================================================================
key             content
==============  ===========================================================================
``batch``       for each replica the tensors of its batch by path: digest, type and shape
``generators``  for each replica the states of its generators before its step
``initial``     the parameters before the first step, in the first iteration
``gradients``   the gradients of each update by name, the last layer first, as backward
                computes them: averaged over replicas and micro-batches, not yet clipped
``parameters``  the parameters after each step by name
==============  ===========================================================================
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from helios.ledger.book import EVERY
from helios.ledger.line import write_hash
from helios.state import TrainingState
from helios.storage.content_hash import fingerprint, hash_content, look_safely

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST_NESTED = 10


class _Turn(NamedTuple):
    """What a replica reads in an iteration."""

    batch: dict[str, list[str]]
    generators: dict[str, str]


@final
class TensorDigests:
    """Collects the digests of an iteration.

    Args:
        reads_weights: whether this process reads gradients and parameters: it writes the line, or
            holds shards.
        find_weights: returns all parameters by name.
        read_generators: returns the states of the generators that Helios seeds, by name.
        gather: returns a value of every replica, in their order, of a list of those of the replicas
            of this process; a collective call.

    Attributes:
        reads_weights: as given.
    """

    def __init__(
        self,
        *,
        reads_weights: bool,
        find_weights: Callable[[], Mapping[str, Tensor]],
        read_generators: Callable[[], Mapping[str, Any]],
        gather: Callable[[Sequence[_Turn]], list[_Turn]],
    ) -> None:
        self.reads_weights = reads_weights
        self._find_weights = find_weights
        self._read_generators = read_generators
        self._gather = gather
        self._batches: list[dict[str, list[str]]] = []
        self._turns: list[_Turn] = []
        self._exchanged: list[_Turn] = []
        self._initial: dict[str, str] = {}
        self._gradients: dict[str, str] = {}
        self._num_updates = 0
        self._averaged: Optimizer | None = None
        self._hook: Any = None

    def open(self, before_step: Callable[..., None]) -> None:
        """Begin to watch the steps of optimizers that the model makes itself.

        Args:
            before_step: is called before each step of an optimizer; calls :meth:`before_step`.
        """
        if self.reads_weights:
            self._hook = register_optimizer_step_pre_hook(before_step)

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def see(self, batches: Sequence[Any]) -> None:
        """Take the digests of the batches of an iteration, one for each replica of this process."""
        self._batches, self._turns = [{} for _ in batches], []
        self._initial, self._gradients = {}, {}
        self._num_updates, self._averaged = 0, None
        for number, batch in enumerate(batches):
            self._batches[number] = dict(_describe(batch))

    def begin_turn(self, iteration: int) -> None:
        """Take the digests of the generators before the step of the next replica."""
        turn = _Turn(self._batches[len(self._turns)], {})
        # There is one for each replica, also if a state cannot be read.
        self._turns.append(turn)
        for name, state in self._read_generators().items():
            turn.generators[name] = _digest(state)
        if iteration == 1 and self.reads_weights and len(self._turns) == 1:
            self._initial = self._read_weights()

    def take_gradients(self, optimizer: Optimizer) -> None:
        """Take the digests of averaged gradients, before they are clipped."""
        if self.reads_weights:
            self._averaged = optimizer
            self._take(optimizer)

    def exchange(self) -> None:
        """Collect what all replicas have read, at the end of an iteration; a collective call."""
        self._exchanged = self._gather(self._turns)
        self._turns = []

    def describe(self, state: TrainingState) -> str:
        """Return the entries of the line of an iteration, after :meth:`exchange`.

        A collective call if the weights are sharded.
        """
        content: dict[str, Any] = {
            "batch": [turn.batch for turn in self._exchanged],
            "generators": [turn.generators for turn in self._exchanged],
        }
        if self._initial:
            content["initial"] = self._initial
        if self._num_updates:
            content["gradients"] = self._gradients
        if self._num_updates or (state.is_step_boundary and state.is_step_committed):
            content["parameters"] = self._read_weights()
        return f",{json.dumps(content, separators=(',', ':'))[1:-1]}"

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the digests of the gradients of a step that the model makes itself."""
        # The step of an update may call that of an optimizer that it wraps.
        if self._averaged is None and self._turns:
            self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> None:
        members = {id(each) for group in optimizer.param_groups for each in group["params"]}
        weights = list(self._find_weights().items())
        found = [(name, weight) for name, weight in reversed(weights) if id(weight) in members]
        # A step may train something of its own, which is no part of the model.
        self._num_updates += bool(found)
        for name, weight in found:
            if weight.grad is not None:
                place = f"{name}, update {self._num_updates}" if name in self._gradients else name
                self._gradients[place] = _digest(weight.grad)

    def _read_weights(self) -> dict[str, str]:
        weights = self._find_weights().items()
        return {name: _digest(weight) for name, weight in weights if not is_lazy(weight)}


def _digest(value: Any) -> str:
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        whole = value.coalesce()
        value = (tuple(whole.shape), whole.indices(), whole.values())
    return write_hash(fingerprint(value).value)


def _describe(batch: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield path, digest and form of the tensors of a batch, and of what is no container."""
    for path, leaf in _leaves(batch, "batch"):
        found = fingerprint(leaf)
        form = _form_of(leaf)
        yield path, [write_hash(found.value), f"unseen {form}" if found.num_unseen else form]


def _form_of(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}"
    return type(leaf).__qualname__


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    members = None if depth == _MOST_NESTED else _members_of(value)
    if not members:
        yield path, value
        return
    for name, member in members:
        yield from _leaves(member, f"{path}{name}", depth + 1)


def _members_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the members of a container; ``None`` for a leaf, such as a list of plain values."""
    if isinstance(value, dict | UserDict):
        items = value.data if isinstance(value, UserDict) else value
        if not all(type(key) in _PLAIN for key in dict.keys(items)):
            return None
        # A dictionary may be built in the order of a set, which differs from start to start.
        named = [(f"[{key!r}]", member) for key, member in dict.items(items)]
        return sorted(named, key=lambda pair: pair[0])
    if isinstance(value, tuple):
        return _number(list(tuple.__iter__(value)))
    if isinstance(value, list):
        return _number(list(list.__iter__(value)))
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{each.name}", getattr(value, each.name, None)) for each in fields(value)]
    return None


def _number(members: list[Any]) -> list[tuple[str, Any]] | None:
    if all(type(member) in _PLAIN for member in members):
        return None
    return [(f"[{number}]", member) for number, member in enumerate(members)]


@dataclass(frozen=True)
class WeightDigests:
    """Reads the weights of a run.

    Attributes:
        find_weights: returns all parameters by name.
        find_optimizers: returns the optimizers by path.
        find_buffers: returns the persistent buffers of the networks that are saved, by name.
        is_read: whether this process reads them: it writes the ledger, or holds shards.
        every: the number of steps between two digests.
    """

    find_weights: Callable[[], Mapping[str, Tensor]]
    find_optimizers: Callable[[], Mapping[str, Optimizer]]
    find_buffers: Callable[[], Mapping[str, Tensor]]
    is_read: bool
    every: int = EVERY

    def describe(self) -> str:
        """Return the entries of a line; a collective call if the weights are sharded.

        Raises:
            Exception: whatever reading a tensor of the user raises.
        """
        weights = self.find_weights()
        names = {id(tensor): name for name, tensor in weights.items()}
        state = {path: _state_of(each, names) for path, each in self.find_optimizers().items()}
        hashes = [write_hash(fingerprint(value).value) for value in (weights, state)]
        return f',"weights":"{hashes[0]}","optimizer":"{hashes[1]}"'

    def describe_buffers(self) -> str:
        """Return the entry of the buffers; a collective call like :meth:`describe`."""
        table = {name: hash_buffer(buffer) for name, buffer in sorted(self.find_buffers().items())}
        return f',"buffers":{json.dumps(table, separators=(",", ":"))}'


def hash_buffer(buffer: Tensor) -> str | None:
    """Return the hash of a buffer; ``None`` if its content cannot be read, as of a sparse one."""
    # A checkpoint, on the CPU, must give the same hash, and large ones are read where they are.
    content = look_safely(buffer.cpu())
    return None if content.num_unseen else write_hash(hash_content(content))


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, whose order may differ."""
    groups, state, number = [], {}, 0
    for group in optimizer.param_groups:
        found = []
        for parameter in group["params"]:
            name = names.get(id(parameter), f"?{number}")
            number += 1
            found.append(name)
            if parameter in optimizer.state:
                state[name] = optimizer.state[parameter]
        rest = {name: value for name, value in group.items() if name != "params"}
        groups.append({**rest, "params": sorted(found)})
    return {"groups": groups, "state": state}
