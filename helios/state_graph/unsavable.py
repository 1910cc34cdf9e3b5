"""Reports changes that cannot be saved: hooks, attributes of classes, scripts, shared memory.

Shared memory is among them if it belongs to several owners, or to tensors of overlapping storages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helios.state_graph import unsupported_values
from helios.state_graph.baseline import Baseline
from helios.state_graph.class_attributes import class_marks, user_classes
from helios.state_graph.graph import Graph
from helios.state_graph.layouts import crossings
from helios.state_graph.registered_hooks import hooks_of
from helios.state_graph.torchscript import script_marks


def renew_unsavable(baseline: Baseline, owner: object, graph: Graph) -> None:
    """Treat the current values as unchanged: every start creates them again."""
    baseline.hooks = hooks_of(graph.found)
    baseline.scripts = script_marks(graph.found, graph.content)
    baseline.kinds = user_classes(owner, graph.found, {*baseline.kinds, *graph.types})
    baseline.classes = class_marks(baseline.kinds, graph.content)
    baseline.crossings = crossings(graph.layouts, graph.others)


def unsavable_changes(baseline: Baseline, graph: Graph) -> dict[str, str]:
    """Return what has changed, with the reason why no checkpoint can hold it, by name."""
    lost = _changed(baseline.hooks, hooks_of(graph.found), unsupported_values.HOOK)
    marks = class_marks(baseline.kinds, graph.content)
    lost |= _changed(baseline.classes, marks, unsupported_values.OF_CLASS)
    scripts = script_marks(graph.found, graph.content)
    lost |= _changed(baseline.scripts, scripts, unsupported_values.OF_SCRIPT)
    lost |= _shared_otherwise(
        baseline.crossings, crossings(graph.layouts, graph.others), unsupported_values.CROSSING
    )
    return lost | _shared_otherwise(
        baseline.mingled, graph.layouts.mingled, unsupported_values.MINGLED
    )


def _shared_otherwise(
    before: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]], reason: str
) -> dict[str, str]:
    """Return the reason for tensors that share memory differently, with the other one's name."""
    partners = {name: place[0] for name, place in {**before, **now}.items()}
    changed = _changed(before, now, reason)
    return {name: text.format(partners[name]) for name, text in changed.items()}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], reason: str) -> dict[str, str]:
    names = before.keys() | now.keys()
    return {name: reason for name in sorted(names) if before.get(name) != now.get(name)}
