"""What an owner holds after setup, before training: whatever changes afterwards is state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helios.state_graph.changes import Made
from helios.state_graph.custom_state_dicts import extra_marks
from helios.state_graph.graph import Graph
from helios.state_graph.layouts import Form, memory_marks
from helios.state_graph.module_state import Shape, shape_of
from helios.state_graph.object_names import References, as_written
from helios.state_graph.optimizers import OptimizerGroups, groups_of_optimizers
from helios.state_graph.scanning import mark_of_state
from helios.state_graph.unsavable import Marks, marks_of_unsavable, user_classes
from helios.state_graph.values import Identities


@dataclass
class Baseline:
    """What setup made.

    Attributes:
        made: the nodes of the graph.
        references: its objects, as far as they are still alive.
        paths: paths of objects and loose parameters.
        tops: paths of objects in attributes.
        inner: paths of objects that only other objects hold.
        shapes: what a state must match, by path of the object.
        forms: types, shapes and strides of tensors, by name.
        optimizer_groups: which parameters optimizers update.
        marks: digests of the states of objects that only other objects hold, or that the owner's
            own ``state_dict`` may leave out.
        kinds: classes of the user.
        unsavable: marks of what no checkpoint can hold.
        extra: marks of what modules return from ``get_extra_state``.
        memory: marks of memory that several tensors or values view.
        started: marks of what start events have created.
    """

    made: Made
    references: References
    paths: frozenset[str]
    tops: frozenset[str]
    inner: frozenset[str]
    shapes: dict[str, Shape]
    forms: dict[str, Form | None]
    optimizer_groups: OptimizerGroups
    marks: dict[str, bytes]
    kinds: list[type]
    unsavable: Marks
    extra: dict[str, bytes]
    memory: dict[str, Any]
    started: dict[str, bytes] = field(default_factory=dict)

    def known(self) -> dict[int, str]:
        """Return the names of the objects of setup that are still alive, by id."""
        return {number: name for number, refer, name in self.references if refer() is not None}

    def late(self, graph: Graph) -> dict[str, Any]:
        """Return the objects and loose parameters that were created after setup, by path."""
        parts = {**graph.found.objects, **graph.found.inner, **graph.parameters.loose}
        known = self.paths | self.inner
        return {path: part for path, part in parts.items() if path not in known}

    def come_or_gone(self, graph: Graph, known: str) -> dict[str, str]:
        """Return the objects that setup did not make or that are gone, unless a text names them."""
        names = {as_written(path, graph.found.objects) for path in graph.paths() ^ self.paths}
        return {name: "" for name in names if name not in known}

    def mark_as_changed(self, state: Mapping[str, Any]) -> None:
        """Treat what was restored as changed: the next checkpoint needs it too."""
        self.made.mark_as_changed(state["values"]["nodes"])
        for anchor, home in state["layouts"]["homes"].items():
            if home["memory"] is not None:
                self.memory.pop(anchor, None)
        for path in state["inner"]:
            self.marks.pop(path, None)


def take_baseline(
    owner: object, graph: Graph, identities: Identities, *, states_too: bool
) -> Baseline:
    """Record what an owner holds. The graph is released.

    Args:
        owner: the owner.
        graph: what it holds.
        identities: numbers for values that cannot be pickled.
        states_too: whether to digest the states of all objects, for an owner whose own
            ``state_dict`` may leave some out.
    """
    found = graph.found
    marked = {**found.inner, **(found.objects if states_too else {})}
    reached = {storage for cell in graph.all_cells for storage in cell.reached}
    kinds = user_classes(owner, found, graph.types)
    known: dict[str, Any] = {
        "references": found.references(),
        "paths": graph.paths(),
        "tops": frozenset(found.objects),
        "inner": frozenset(found.inner),
        "shapes": {path: shape_of(part, found.networks) for path, part in found.objects.items()},
        "forms": graph.layouts.forms,
        "optimizer_groups": groups_of_optimizers(found, graph.parameters),
        "marks": {path: mark_of_object(part, identities) for path, part in marked.items()},
        "kinds": kinds,
        "unsavable": marks_of_unsavable(kinds, graph),
        "extra": extra_marks(found, identities),
        "memory": memory_marks(graph.layouts, lambda: graph.storages, reached),
    }
    return Baseline(Made(graph), **known)


def mark_of_object(part: Any, identities: Identities) -> bytes:
    """Return the mark of an object's state; empty if it cannot return one yet."""
    try:
        state = part.state_dict()
    except Exception:  # user code, which may need a first step
        return b""
    return mark_of_state(state, identities)
