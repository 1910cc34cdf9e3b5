"""Finds changes that cannot be saved: hooks, attributes of classes, scripts, shared memory.

Shared memory is among them if it belongs to several owners, or to tensors of overlapping storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from helios.core.memory import span_of
from helios.state_graph import unsupported_values as reasons
from helios.state_graph.class_attributes import class_marks
from helios.state_graph.graph import Graph
from helios.state_graph.memory_groups import layout_of
from helios.state_graph.object_names import Outside
from helios.state_graph.registered_hooks import hooks_of
from helios.state_graph.torchscript import script_marks

Marks: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What is compared, by name, for each reason why it cannot be saved."""

_SHARED = (reasons.CROSSING, reasons.MINGLED)


def marks_of_unsavable(kinds: Collection[type], graph: Graph) -> Marks:
    """Return marks of what no checkpoint can hold, by reason and name.

    Args:
        kinds: classes of the user.
        graph: what the owner holds.
    """
    own = {**graph.layouts.tensors, **graph.views}
    return {
        reasons.HOOK: hooks_of(graph.found),
        reasons.OF_CLASS: class_marks(kinds, graph.content),
        reasons.OF_SCRIPT: script_marks(graph.found, graph.content),
        reasons.CROSSING: _crossings(own, graph.rules.outside),
        reasons.MINGLED: graph.layouts.mingled,
    }


def unsavable_changes(before: Marks, now: Marks) -> dict[str, str]:
    """Return what has changed, with the reason why no checkpoint can hold it, by name."""
    lost: dict[str, str] = {}
    for reason, marks in now.items():
        old = before[reason]
        for name in sorted(old.keys() | marks.keys()):
            if old.get(name) != marks.get(name):
                partner = {**old, **marks}[name][0].partition("#")[0] if reason in _SHARED else ""
                lost[name.partition("#")[0]] = reason.format(partner)
    return lost


def _crossings(own: Mapping[str, Any], outside: Outside) -> dict[str, tuple[Any, ...]]:
    """Return the tensors and arrays that overlap one of another owner, with its name and layout."""
    crossings: dict[str, tuple[Any, ...]] = {}
    for name, part in own.items() if outside.parts else ():
        begin, end = span_of(part)
        if found := outside.find_overlap(begin, end):
            first, _, other = found
            crossings[name] = other, begin - first, layout_of(part)
    return crossings
