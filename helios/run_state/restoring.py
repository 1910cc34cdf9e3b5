"""Restores a saved state into the objects that ``setup`` has made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import kind_of_generator, load_generator, make_generator
from helios.errors import StateError
from helios.protocols import Stateful
from helios.run_state.aliases import put, restore_aliases, restore_orders
from helios.run_state.changes import PlainValues
from helios.run_state.custom_state_dicts import restore_omitted
from helios.run_state.module_state import (
    kind_of,
    load_flags,
    load_grads,
    load_state,
    state_of,
)
from helios.run_state.object_names import KeyedByObjects, as_written
from helios.run_state.optimizer_tables import restore_tables, share_tables, shared_tables
from helios.run_state.optimizers import arrange, arrange_covered, check_covered
from helios.run_state.owner_scan import OwnerScan
from helios.run_state.shared_views import part_memory, restore_blocks
from helios.run_state.tensor_formats import casts, fill, restore_forms
from helios.run_state.tied_tensors import restore_ties
from helios.run_state.walk import is_declared
from helios.run_state.walk_result import Container, path_of

_LOGGER = logging.getLogger(__name__)
_TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)


@final
class Restoring:
    """Restores a captured state.

    Args:
        look: returns what the owner holds now.
        values: the plain values, with the types of those that setup made.
        exclude: attributes of the owner that never count.
        unsaved: names and paths that are declared as not to be saved.
        name: the name of the owner in messages.
    """

    def __init__(
        self,
        look: Callable[[], OwnerScan],
        values: PlainValues,
        exclude: frozenset[str],
        unsaved: frozenset[str],
        name: str,
    ) -> None:
        self._look = look
        self._values = values
        self._exclude = exclude
        self._unsaved = unsaved
        self._name = name

    def run(self, state: dict[str, Any], *, is_inference: bool) -> None:
        """Restore everything; see ``Discovery.restore``."""
        scene = self._look()
        objects = {**scene.found.objects, **scene.found.inner}
        states = {**state["objects"], **state.get("inner", {})}
        omitted = state.get("omitted", {})
        if is_inference:
            objects = {
                path: part for path, part in objects.items() if not isinstance(part, _TRAINING_ONLY)
            }
            self._warn_of_untrained(scene.found.objects, state["objects"])
        else:
            self._check(scene, state)
            arrange(scene.found, state, scene.parameters)
        restore_forms(state.get("forms", {}), scene.found, scene.parameters, state)
        restore_ties(state.get("ties", {}), scene.found)
        blocks = state.get("blocks", {})
        # Files from before blocks existed do not say which ones are gone.
        homes = part_memory(scene.found, scene.parameters, blocks) if "blocks" in state else {}
        if not is_inference:
            self._warn_of_casts(casts(scene.found, state))
        shared = shared_tables(objects)
        # Networks first: an object that tracks one may read its weights.
        for path in sorted(objects, key=lambda path: not isinstance(objects[path], nn.Module)):
            if path in states:
                _load_state(path, objects[path], states[path], omitted.get(path))
        share_tables(shared)
        if not is_inference:
            check_covered(scene.found, state, scene.parameters)
        restore_omitted(omitted, scene.found)
        restore_blocks(blocks, scene.found, scene.parameters, homes)
        if not is_inference:
            restore_tables(state.get("tables", {}), scene.found, scene.parameters)
        self._restore_places(scene, state)
        share_tables(shared)
        # A restored value may be another tensor than before.
        parameters = self._look().parameters
        for name, tensor in {**parameters.leaves, **parameters.loose}.items():
            if name in state["parameters"]:
                shown = as_written(name, scene.found.objects)
                fill(shown, tensor, state["parameters"][name])
        if not is_inference:
            load_flags(state["flags"], scene.found, parameters)
            load_grads(state["grads"], scene.found, parameters)

    def prepare(self, state: dict[str, Any]) -> None:
        """Reorder the parameters of optimizers as saved; see ``Discovery.prepare``."""
        scene = self._look()
        arrange_covered(scene.found, state, scene.parameters)

    def _restore_places(self, scene: OwnerScan, state: dict[str, Any]) -> None:
        """Restore values, generators and references to objects."""
        # Loading may have assigned other lists and dicts to attributes.
        containers = _containers_of(self._look())
        scene.found.containers = containers
        self._values.restore(
            state["values"],
            scene.found,
            scene,
            lambda parent, key: self._may_set(parent, key, scene),
        )
        for path, saved in state.get("generators", {}).items():
            self._restore_generator(path, saved, scene)
        if "aliases" in state:
            restore_aliases(state["aliases"], containers, scene.find)
            restore_orders(state["orders"], containers)

    def _restore_generator(self, path: str, saved: Mapping[str, Any], scene: OwnerScan) -> None:
        if is_declared(path, self._unsaved):
            return
        present = scene.found.generators.get(path)
        if present is None or kind_of_generator(present) != saved["kind"]:
            parent, key = saved.get("home") or path.rpartition(".")[::2]
            container = scene.found.containers.get(parent)
            if container is None or isinstance(container, list):
                raise StateError(
                    f"{path} of the {self._name} was a {saved['kind']} when the state was saved, "
                    "and does not exist now. Create it in setup()."
                )
            present = make_generator(saved["kind"])
            put(container, key, present)
            scene.found.generators[path] = present
        load_generator(present, saved["state"])

    def _check(self, scene: OwnerScan, state: dict[str, Any]) -> None:
        """Reject a state of other objects before anything is changed."""
        for path, part in {**scene.found.objects, **scene.found.inner}.items():
            kind = state["kinds"].get(path, kind_of(part))
            if isinstance(part, _TRAINING_ONLY) and kind != kind_of(part):
                raise StateError(
                    f"{path} was saved by {kind}, but is {kind_of(part)} now, which cannot load "
                    "that state. Build it in setup() as it was when the state was saved."
                )
        saved = self._declared({*state["objects"], *state["parameters"]})
        present = scene.paths()
        inner = state.get("inner", {}).keys() - scene.found.inner.keys() - present
        parents = {*state["values"]["changed"], *state["values"]["deleted"]}
        containers = _containers_of(scene)
        lacking = self._declared({path for path in parents if path not in containers})
        saved |= {path.rstrip("/") for path in lacking} | self._declared(inner)
        objects = scene.found.objects
        missing = sorted(as_written(path, objects) for path in present - saved)
        left_over = sorted(as_written(path, objects) for path in saved - present)
        if state.get("is_partial"):
            missing = []
        left_over += self._find_lost_targets(scene, state)
        if missing or left_over:
            raise StateError(
                f"The saved state is not that of this {self._name}. Without saved state: "
                f"{', '.join(missing) or 'nothing'}. Saved, but missing now: "
                f"{', '.join(left_over) or 'nothing'}. Create all networks, optimizers and "
                "schedulers in setup(), under the names that they had when the state was saved."
            )

    def _find_lost_targets(self, scene: OwnerScan, state: dict[str, Any]) -> list[str]:
        """Return the objects that attributes referred to and that do not exist now."""
        tables = state.get("aliases", {}).get("set", {}).values()
        names = {name for members in tables for name in members.values()}
        # A generator is created again before anything refers to it.
        names -= state.get("generators", {}).keys()
        return sorted(name for name in self._declared(names) if scene.find(name) is None)

    def _declared(self, paths: set[str]) -> set[str]:
        """Return the paths that are not declared as unsaved, directly or by a parent."""
        return {path for path in paths if not is_declared(path, self._unsaved)}

    def _warn_of_untrained(self, objects: dict[str, Stateful], saved: dict[str, Any]) -> None:
        untrained = [
            path
            for path, part in objects.items()
            if path not in saved and isinstance(part, nn.Module) and part.state_dict()
        ]
        if untrained:
            _LOGGER.warning(
                "The %s holds networks without saved state, which keep the weights of setup(): %s.",
                self._name,
                ", ".join(untrained),
            )

    def _warn_of_casts(self, texts: list[str]) -> None:
        if texts:
            _LOGGER.warning(
                "setup() of the %s builds tensors of another type than was saved, and the saved "
                "values are cast to it: %s. Build them as they were to resume with the same bits.",
                self._name,
                "; ".join(texts),
            )

    def _may_set(self, parent: str, key: Any, scene: OwnerScan) -> bool:
        found = scene.found
        if parent not in found.containers:
            return False
        if (parent, key) in found.slots or (parent, key) in found.aliases:
            return True
        if not parent and key in self._exclude:
            return False
        path = path_of(parent, key)
        return path not in found.objects and bool(self._declared({path}))


def _containers_of(scene: OwnerScan) -> dict[str, Container]:
    """Return containers by path, including those that held no object after setup."""
    plain: dict[str, Container] = {}
    for slot in scene.found.slots.values():
        if isinstance(slot.value, dict):
            # Its keys may be parameters now.
            plain[slot.path] = KeyedByObjects(slot.value, scene.names)
        elif isinstance(slot.value, list):
            plain[slot.path] = slot.value
    return {**plain, **scene.found.containers}


def read_state(path: str, part: Stateful) -> dict[str, Any]:
    """Return the state of an object.

    Raises:
        StateError: if ``state_dict`` fails.
    """
    try:
        return state_of(part)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) failed to return its state: {error!r}. Correct its "
            "state_dict()."
        ) from error


def _load_state(
    path: str, part: Stateful, state: dict[str, Any], omitted: Mapping[str, Any] | None
) -> None:
    try:
        load_state(part, state, omitted)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) rejected its saved state: {error} Build it in setup() "
            "as it was when the state was saved."
        ) from error
