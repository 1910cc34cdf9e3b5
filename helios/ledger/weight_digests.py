"""Digests of the weights of a run, of the state of its optimizers and of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from helios.ledger.book import EVERY
from helios.ledger.line import write_hash
from helios.storage.content_hash import fingerprint, read_safely


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

    def describe(self) -> dict[str, Any]:
        """Return the entries of a line; a collective call if the weights are sharded.

        Raises:
            Exception: whatever reading a tensor of the user raises.
        """
        weights = self.find_weights()
        names = {id(tensor): name for name, tensor in weights.items()}
        state = {path: _state_of(each, names) for path, each in self.find_optimizers().items()}
        hashes = [write_hash(fingerprint(value)) for value in (weights, state)]
        return {"weights": hashes[0], "optimizer": hashes[1]}

    def describe_buffers(self) -> dict[str, Any]:
        """Return the entry of the buffers; a collective call like :meth:`describe`."""
        table = {name: hash_buffer(buffer) for name, buffer in sorted(self.find_buffers().items())}
        return {"buffers": table}


def hash_buffer(buffer: Tensor) -> str | None:
    """Return the hash of a buffer; ``None`` if its content cannot be read, as of a sparse one."""
    # A checkpoint, on the CPU, must give the same hash, and large ones are read where they are.
    content = read_safely(buffer.cpu())
    return None if content.num_unseen else write_hash(content.fingerprint)


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
