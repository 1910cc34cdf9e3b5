"""Finds changes that cannot be saved: hooks, attributes of classes, scripts, shared memory.

Shared memory is among them if it belongs to several owners, or to tensors of overlapping storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, final

from torch import Tensor

from helios.core.memory import span_of
from helios.state_graph import unsupported_values as reasons
from helios.state_graph.class_attributes import class_marks
from helios.state_graph.graph import Graph
from helios.state_graph.memory_groups import layout_of
from helios.state_graph.object_names import Outside
from helios.state_graph.registered_hooks import hooks_of
from helios.state_graph.torchscript import script_marks
from helios.state_graph.values import Identities
from helios.storage.checksums import array_sum, tensor_sum

Marks: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What is compared, by name, for each reason why it cannot be saved."""

_Crossings: TypeAlias = dict[str, tuple[Any, ...]]
"""By the name of a tensor or array, that of the one which it overlaps, and how."""

_SHARED = (reasons.CROSSING, reasons.MINGLED)


def marks_of_unsavable(kinds: Collection[type], graph: Graph) -> Marks:
    """Return marks of what no checkpoint can hold, by reason and name.

    Args:
        kinds: classes of the user.
        graph: what the owner holds.
    """
    return {
        reasons.HOOK: hooks_of(graph.found),
        reasons.OF_CLASS: class_marks(kinds, graph.content),
        reasons.OF_SCRIPT: script_marks(graph.found, graph.content),
        reasons.CROSSING: _crossings(graph.layouts.tensors, graph.rules.outside),
        reasons.MINGLED: graph.layouts.mingled,
    }


def unsavable_changes(before: Marks, now: Marks) -> dict[str, str]:
    """Return what has changed, with the reason why no checkpoint can hold it, by name."""
    lost: dict[str, str] = {}
    for reason, marks in now.items():
        old = before[reason]
        for name in sorted(old.keys() | marks.keys()):
            if old.get(name) != marks.get(name):
                partner = {**old, **marks}[name][0] if reason in _SHARED else ""
                lost[name] = reason.format(_without_number(partner))
    return lost


@final
class SharedValues:
    """Memory that values of an owner share with those of another one, which no checkpoint keeps.

    What setup shares is named once training has let it be shared otherwise. What training shares is
    named once the same tensor or array is found to be written to while it is shared: most are
    only kept to be read, such as a loss, and a resumed run has an equal copy of those.

    Args:
        identities: numbers for what is compared by identity.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._made: _Crossings = {}
        self._seen: dict[str, tuple[tuple[Any, ...], bytes | int, bool]] = {}

    def remember(self, graph: Graph) -> None:
        """Record what is shared now as what each start shares again."""
        self._made, self._seen = _crossings(graph.views, graph.rules.outside), {}

    def find(self, graph: Graph) -> dict[str, str]:
        """Return what is shared otherwise, with the reason why no checkpoint can hold it."""
        made, now = self._made, _crossings(graph.views, graph.rules.outside)
        partners = {name: mark[0] for name, mark in {**made, **now}.items()}
        seen = {
            name: self._compare(name, mark, graph.views[name])
            for name, mark in now.items()
            if mark != made.get(name)
        }
        gone = [name for name, mark in made.items() if mark != now.get(name)]
        lost = {*gone, *(name for name, (_, _, is_written) in seen.items() if is_written)}
        self._seen = seen
        return {
            _without_number(name): reasons.CROSSING.format(_without_number(partners[name]))
            for name in sorted(lost)
        }

    def _compare(self, name: str, mark: tuple[Any, ...], part: Any) -> tuple[Any, Any, bool]:
        who = (self._identities.number(part), *mark)
        content = tensor_sum(part) if isinstance(part, Tensor) else array_sum(part)
        known, before, was_written = self._seen.get(name, (None, content, False))
        return who, content, known == who and (was_written or before != content)


def _without_number(name: str) -> str:
    """Return the path of a value; several views in it have numbers."""
    return name.partition("#")[0]


def _crossings(own: Mapping[str, Any], outside: Outside) -> _Crossings:
    """Return the tensors and arrays that overlap one of another owner."""
    crossings: _Crossings = {}
    for name, part in own.items() if outside.parts else ():
        begin, end = span_of(part)
        if found := outside.find_overlap(begin, end):
            first, _, other = found
            crossings[name] = other, begin - first, layout_of(part)
    return crossings
