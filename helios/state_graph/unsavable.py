"""Finds changes that cannot be saved: hooks, attributes of classes, scripts, shared memory.

Shared memory is among them if it belongs to several owners, or to tensors of overlapping storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias, final

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

    What setup shares is named once training lets it be shared otherwise. What training shares is
    named once it is written to in place: most is only kept to be read, such as a loss, and a
    resumed run has an equal copy of that. Of an array, which counts no writes, this is seen at the
    second save at which the same one is shared.

    Args:
        identities: numbers for what is compared by identity.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._made: _Crossings = {}
        self._seen: dict[int, _Seen] = {}

    def remember(self, graph: Graph) -> None:
        """Record what is shared now as what each start shares again."""
        self._made, self._seen = _crossings(graph.views, graph.rules.outside), {}

    def find(self, graph: Graph) -> dict[str, str]:
        """Return what is shared otherwise, with the reason why no checkpoint can hold it."""
        outside = graph.rules.outside
        made, now = self._made, _crossings(graph.views, outside)
        partners = {
            name: made[name][0]
            for name in made.keys() & graph.views.keys()
            if made[name] != now.get(name)
        }
        seen: dict[int, _Seen] = {}
        for name, mark in now.items():
            if mark != made.get(name):
                part = graph.views[name]
                who = (self._identities.number(outside.parts[mark[0]]), *mark[1:])
                number = self._identities.number(part)
                seen[number] = found = self._seen.get(number, _Seen()).after(part, who)
                partners |= {name: mark[0]} if found.is_written else {}
        self._seen = seen
        return {
            _without_number(name): reasons.CROSSING.format(_without_number(partners[name]))
            for name in sorted(partners)
        }


class _Seen(NamedTuple):
    """A tensor or array that shares memory with another owner's, as a save has found it.

    Attributes:
        who: the other one, and how they overlap.
        content: a checksum.
        is_written: whether it was written to in place.
    """

    who: tuple[Any, ...] = ()
    content: Any = None
    is_written: bool = False

    def after(self, part: Any, who: tuple[Any, ...]) -> _Seen:
        """Return how it is found now."""
        if isinstance(part, Tensor):
            content: Any = tensor_sum(part)
            is_written = not part.is_inference() and part._version > 0  # noqa: SLF001 - torch has no public counter
        else:
            content, is_written = array_sum(part), False
        if who == self.who:
            is_written |= self.is_written or content != self.content
        return _Seen(who, content, is_written)


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
