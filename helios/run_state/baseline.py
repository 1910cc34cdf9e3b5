"""What an owner holds after setup, before training: whatever changes afterwards is state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helios.core.generators import kind_of_generator
from helios.core.wrappers import unwrap
from helios.run_state.class_attributes import class_marks
from helios.run_state.extra_states import extra_marks
from helios.run_state.module_state import Shape, shape_of
from helios.run_state.object_names import as_written
from helios.run_state.optimizers import Roster, roster_of
from helios.run_state.owner_scan import OwnerScan
from helios.run_state.plain_values import Identities
from helios.run_state.registered_hooks import hooks_of
from helios.run_state.shared_views import block_marks, crossings
from helios.run_state.tensor_formats import Forms, forms_of
from helios.run_state.tied_tensors import Ties
from helios.run_state.torchscript import script_marks
from helios.run_state.value_scan import mark_of_state
from helios.run_state.walk import settled_in
from helios.run_state.walk_result import SlotKey, WalkResult


@dataclass
class Baseline:
    """What setup made.

    Attributes:
        paths: paths of objects and loose parameters.
        inner: paths of objects that only other objects hold.
        shapes: what a state must match, by path of the object.
        forms: types, shapes and memory formats of tensors.
        roster: which parameters optimizers update.
        ties: which tensors are the same or share memory.
        settled: members of modules that can only change by being replaced.
        aliases: which object a slot refers to.
        orders: keys of containers that hold objects.
        marks: digests of the states of objects that only other objects hold, or that the owner's
            own ``state_dict`` may leave out.
        hooks: hooks on networks, parameters and optimizers, by name.
        classes: marks of the attributes of classes.
        scripts: marks of the attributes of scripted networks.
        generators: kinds of generators, by path.
        blocks: marks of memory that several tensors or values view.
        crossings: which tensors share memory with those of other owners.
        started: marks of what start events have created.
        extra: marks of what modules return from ``get_extra_state``.
        containers: whether a container is a list, by path.
    """

    paths: frozenset[str]
    inner: frozenset[str]
    shapes: dict[str, Shape]
    forms: dict[str, Forms]
    roster: Roster
    ties: Ties
    settled: dict[str, dict[str, Any]]
    aliases: dict[SlotKey, str]
    orders: dict[str, list[Any]]
    marks: dict[str, bytes]
    hooks: dict[str, frozenset[int]]
    classes: dict[str, bytes]
    scripts: dict[str, bytes]
    generators: dict[str, str]
    extra: dict[str, bytes]
    containers: dict[str, bool]
    blocks: dict[str, Any]
    crossings: dict[str, Any]
    started: dict[str, bytes] = field(default_factory=dict)
    _known: list[tuple[int, Callable[[], object | None], str]] = field(default_factory=list)

    def known(self) -> dict[int, str]:
        """Return the paths of the objects of setup that are still alive, by id."""
        return {number: path for number, refer, path in self._known if refer() is not None}

    def earlier(self) -> dict[str, object]:
        """Return the objects of setup that are still alive, by path, without inner ones."""
        found = ((path, refer()) for _, refer, path in self._known if path in self.paths)
        return {path: part for path, part in found if part is not None}

    def new_containers(self, found: WalkResult) -> set[str]:
        """Return the paths of containers that setup does not create, or not of this kind."""
        return {
            path
            for path, part in found.containers.items()
            if self.containers.get(path) is not isinstance(part, list)
        }

    def late(self, scene: OwnerScan) -> dict[str, Any]:
        """Return the objects and loose parameters that were created after setup, by path."""
        parts = {**scene.found.objects, **scene.found.inner, **scene.parameters.loose}
        known = self.paths | self.inner
        return {path: part for path, part in parts.items() if path not in known}

    def come_or_gone(self, scene: OwnerScan, known: str) -> dict[str, str]:
        """Return the objects that setup did not make or that are gone, unless a text names them."""
        names = {as_written(path, scene.found.objects) for path in scene.paths() ^ self.paths}
        return {name: "" for name in names if name not in known}

    def distrust(self, places: Iterable[SlotKey]) -> None:
        """Compare slots again, even though their values can only change by being replaced."""
        for parent, key in places:
            self.settled.get(parent, {}).pop(key, None)

    def distrust_blocks(self, blocks: Mapping[str, Any]) -> None:
        """Treat memory that was restored as changed."""
        for anchor, block in blocks.items():
            if block["memory"] is not None:
                self.blocks.pop(anchor, None)


def take_baseline(
    owner: object,
    scene: OwnerScan,
    identities: Identities,
    reached: Collection[int],
    *,
    states_too: bool,
) -> Baseline:
    """Record what an owner holds.

    Args:
        owner: the owner.
        scene: a scan of it.
        identities: numbers for values that cannot be pickled.
        reached: storages of which plain values see more than what is saved with a tensor.
        states_too: whether to digest the states of all objects, for an owner whose own
            ``state_dict`` may leave some out.
    """
    found = scene.found
    marked = {**found.inner, **(found.objects if states_too else {})}
    return Baseline(
        paths=scene.paths(),
        inner=frozenset(found.inner),
        shapes={path: shape_of(part, found.networks) for path, part in found.objects.items()},
        forms=forms_of(found, scene.parameters),
        roster=roster_of(found, scene.parameters),
        ties=scene.ties,
        settled=settled_in(found),
        aliases=dict(found.aliases),
        orders=dict(found.orders),
        marks={path: mark_of_object(part, identities) for path, part in marked.items()},
        hooks=hooks_of(found),
        classes=class_marks(owner, found, scene, identities),
        scripts=script_marks(found, scene, identities),
        generators={path: kind_of_generator(part) for path, part in found.generators.items()},
        extra=extra_marks(found, identities),
        containers=_containers_of(found),
        blocks=block_marks(scene, scene.ties.overlapping.union(reached)),
        crossings=crossings(scene),
        _known=_references(found),
    )


def mark_of_object(part: Any, identities: Identities) -> bytes:
    """Return the mark of an object's state; empty if it cannot return one yet."""
    try:
        state = part.state_dict()
    except Exception:  # user code, which may need a first step
        return b""
    return mark_of_state(state, identities)


def _containers_of(found: WalkResult) -> dict[str, bool]:
    plain = {
        slot.path: slot.value
        for slot in found.slots.values()
        if isinstance(slot.value, list | dict)
    }
    return {path: isinstance(part, list) for path, part in {**plain, **found.containers}.items()}


def _references(found: WalkResult) -> list[tuple[int, Callable[[], object | None], str]]:
    references: list[tuple[int, Callable[[], object | None], str]] = []
    tables: Iterable[Mapping[str, Any]] = (found.objects, found.inner, found.generators)
    for table in tables:
        for path, part in table.items():
            inside = unwrap(part)
            try:
                references.append((id(inside), weakref.ref(inside), path))
            except TypeError:
                references.append((id(inside), lambda kept=inside: kept, path))  # type: ignore[misc]
    return references
