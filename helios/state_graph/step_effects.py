"""Finds what a training step changes besides gradients and buffers.

Gradients and buffers are summed and exchanged. Any other change depends on how many replicas a
process runs, so it is searched for in the first step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import state_of_generator
from helios.protocols import Stateful
from helios.state_graph.graph import Cell, Graph, Table
from helios.state_graph.object_names import path_of
from helios.state_graph.scanning import is_iterator
from helios.state_graph.state_dict_coverage import Coverage
from helios.state_graph.unsavable import class_marks, user_classes
from helios.state_graph.values import Identities
from helios.storage.checksums import bit_sum


@final
class StepWatch:
    """Compares what a model holds before and after a step.

    Args:
        owner: the model.
        look: returns what it holds now.
        identities: numbers for values that cannot be pickled.
        reads_weights: whether to notice writes to ``parameter.data`` too, which requires reading
            all weights.
    """

    def __init__(
        self,
        owner: object,
        look: Callable[[], Graph],
        identities: Identities,
        *,
        reads_weights: bool,
    ) -> None:
        self._owner = owner
        self._look = look
        self._identities = identities
        self._reads_weights = reads_weights
        self._kinds: list[type] = []
        self._before = self._take()

    def changed(self, *, counts_parameters: bool = True) -> list[str]:
        """Return the paths of what has changed since this was created, or called before.

        Args:
            counts_parameters: whether to include parameters that were written to.
        """
        now = self._take()
        pairs = list(zip(self._before, now, strict=True))
        self._before = now
        found = {
            path
            for before, after in (pairs if counts_parameters else pairs[:1])
            for path in before | after
            if before.get(path) != after.get(path)
        }
        # The path of an attribute is more precise than that of its object.
        holders = {path[:end] for path in found for end, mark in enumerate(path) if mark == "."}
        return sorted(found - holders)

    def _take(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return marks of values and of parameters, by path."""
        graph = self._look()
        found = graph.found
        # What a step meets first has not changed.
        self._kinds = self._kinds or user_classes(self._owner, found, graph.types)
        marks = class_marks(self._kinds, graph.content)
        # A manual step updates optimizers and schedulers, as it updates parameters.
        moved = {
            name: mark_of_tensor(tensor, reads_bits=self._reads_weights)
            for name, tensor in (graph.parameters.named() | graph.parameters.loose).items()
        }
        covers: dict[str, Coverage] = {}
        for path, part in (*found.objects.items(), *found.inner.items()):
            if not isinstance(part, nn.Module):
                state = _try_state(part)
                # The state of a scheduler is its attributes, so these are reported.
                if not isinstance(part, LRScheduler):
                    covers[path] = Coverage(state, graph.content().mark)
                # The state of an optimizer results from its updates.
                if not isinstance(part, Optimizer):
                    table = moved if isinstance(part, LRScheduler) else marks
                    table[path] = graph.content().mark(state)
        _mark_nodes(graph, covers, marks, moved)
        for path, generator in graph.generators.items():
            mark = graph.content().mark(state_of_generator(generator))
            marks[path] = marks.get(path, b"") + mark
        return marks, moved


def _mark_nodes(
    graph: Graph, covers: Mapping[str, Coverage], marks: dict[str, bytes], moved: dict[str, bytes]
) -> None:
    """Add marks of the nodes of a graph; those of optimizers and schedulers to what is moved."""
    known: set[str] = set()
    found = {**graph.found.objects, **graph.found.inner}
    of_updates = tuple(
        f"{path}." for path, part in found.items() if isinstance(part, Optimizer | LRScheduler)
    )
    for name, table in graph.tables.items():
        for key, slot in table.slots.items():
            path = path_of(name, key)
            value = slot.part if isinstance(slot, Cell) else slot
            if name in covers and covers[name].has(key, value):
                known.add(path)
            # The position of an iterator is unknown: it would differ at every comparison.
            elif not (isinstance(key, tuple) or _is_buffer(table, key) or is_iterator(value)):
                mark = slot.digest if isinstance(slot, Cell) else pickle.dumps(slot)
                target = moved if path.startswith(of_updates) else marks
                target[path] = target.get(path, b"") + mark
    for name, cell in (*graph.cells.items(), *graph.opaque.items()):
        if cell.place not in known and not is_iterator(cell.part):
            target = moved if name.startswith(of_updates) else marks
            target[name] = target.get(name, b"") + cell.digest


def _try_state(part: Stateful) -> dict[str, Any]:
    try:
        return part.state_dict()
    except Exception:  # user code, which may need a first step
        return {}


def _is_buffer(table: Table, key: str) -> bool:
    # named_buffers() leaves out buffers that are None, whose first tensor comes in the step.
    return isinstance(table.part, nn.Module) and key in vars(table.part).get("_buffers", ())


def mark_of_tensor(parameter: Tensor, *, reads_bits: bool) -> bytes:
    """Return a mark that differs after a write; writes to ``.data`` do not change the version.

    Of a sparse tensor, which has no memory of its own, they are not seen.
    """
    is_dense = parameter.layout is torch.strided
    return b"%d %d %d" % (
        parameter._version,  # noqa: SLF001 - torch has no public counter
        parameter.data_ptr() if is_dense else 0,
        int(bit_sum(parameter)) if reads_bits and is_dense else 0,
    )
