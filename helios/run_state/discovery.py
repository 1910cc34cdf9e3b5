"""What of a model is state, found without a word of the user's (DESIGN section 6).

Objects with a ``state_dict`` are always saved. Of plain values those are saved that training has
changed since ``setup``; what ``setup`` made is configuration and may be edited between two starts.
Whatever else has changed is named loudly, since a resumed run would not have it (DESIGN R5).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.wrappers import BareNames
from helios.errors import ArgumentTypeError, StateError
from helios.protocols import Stateful
from helios.run_state.changes import changes_since, digests_of, places_in, restore_values
from helios.run_state.effects import StepWatch
from helios.run_state.parts import (
    Parameters,
    Shape,
    complete_groups,
    flags_of,
    grads_of,
    kind_of,
    load_flags,
    load_grads,
    load_state,
    parameters_of,
    shape_of,
    state_of,
    storages_of,
    structure_since,
)
from helios.run_state.values import LIMIT, Digest, Identities, storage_of
from helios.run_state.walk import (
    Found,
    Slot,
    SlotKey,
    enter_modules,
    is_declared,
    settled_in,
    walk,
)

_LOGGER = logging.getLogger(__name__)
_TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)
_UNLIKE_ANY = Digest(is_plain=False, mark=b"", size=0)


@final
class _Scene:
    """One look at the owner. What lies around a value is sorted only when a value asks for it."""

    def __init__(
        self,
        owner: object,
        exclude: frozenset[str],
        unsaved: frozenset[str],
        settled: dict[str, dict[str, Any]],
    ) -> None:
        self.found = walk(owner, exclude, unsaved)
        enter_modules(self.found, settled, unsaved)
        self._owner = owner
        self._exclude = exclude

    @cached_property
    def parameters(self) -> Parameters:
        return parameters_of(self.found)

    @cached_property
    def _storages(self) -> dict[int, str]:
        return storages_of(self.found, self.parameters)

    @cached_property
    def _names(self) -> dict[int, str]:
        attributes = vars(self._owner)
        names = {id(attributes[name]): name for name in self._exclude & attributes.keys()}
        names |= {id(part): path for path, part in self.found.objects.items()}
        for path, module in self.found.modules().items():
            bare = BareNames(module)
            for name, part in module.named_modules():
                names.setdefault(id(part), f"{path}.{bare.of(name)}")
        return names | {id(self._owner): "itself"}

    def paths(self) -> frozenset[str]:
        return frozenset((*self.found.objects, *self.parameters.loose))

    def name_of(self, value: object) -> str | None:
        return self._names.get(id(value))

    def name_of_storage(self, tensor: Tensor) -> str | None:
        return self._storages.get(storage_of(tensor))


@dataclass(frozen=True)
class _Baseline:
    """What setup made."""

    paths: frozenset[str]
    shapes: dict[str, Shape]
    digests: dict[SlotKey, Digest]
    settled: dict[str, dict[str, Any]]

    def distrust(self, places: Iterable[SlotKey]) -> None:
        """Take places for changed, whatever they hold; a place that is gone for deleted."""
        for parent, key in places:
            self.digests[parent, key] = _UNLIKE_ANY
            self.settled.get(parent, {}).pop(key, None)


@final
class Discovery:
    """Finds, captures and restores the state of an owner's attributes (DESIGN section 6).

    Args:
        owner: the object whose attributes are looked through, usually a model.
        exclude: names of attributes that never count.
        unsaved: names of attributes, or paths such as ``"stuff.count"``, that are declared as not
            to be saved: neither saved nor warned of, whatever they hold.
        name: how messages call the owner.

    Raises:
        ArgumentTypeError: if ``unsaved`` is a single string.
    """

    def __init__(
        self,
        owner: object,
        *,
        exclude: frozenset[str] = frozenset(),
        unsaved: tuple[str, ...] = (),
        name: str = "model",
    ) -> None:
        if isinstance(unsaved, str):
            raise ArgumentTypeError(
                f"unsaved must be a tuple of names, got the string {unsaved!r}. Write "
                f'unsaved = ("{unsaved}",) with a comma.'
            )
        self._owner = owner
        self._exclude = exclude
        self._unsaved = frozenset(unsaved)
        self._name = name
        self._identities = Identities()
        self._baseline: _Baseline | None = None
        self._named: set[str] = set()

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, each once, with those that are declared as unsaved."""
        return self._all().modules()

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by path, each once, with those that are declared as unsaved."""
        objects = self._all().objects
        return {path: part for path, part in objects.items() if isinstance(part, Optimizer)}

    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers by path, as :meth:`optimizers` does."""
        objects = self._all().objects
        return {path: part for path, part in objects.items() if isinstance(part, LRScheduler)}

    def watch(self, *, reads_weights: bool = True) -> StepWatch:
        """Begin to look for what a step changes."""
        return StepWatch(self._look, self._identities, reads_weights=reads_weights)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what counts in this process only: what setup made, told by identity."""
        return vars(self) | {"_identities": Identities(), "_baseline": None}

    def take_baseline(self) -> None:
        """Remember what setup made; to be called right after it."""
        scene = self._look()
        digests = digests_of(scene.found, scene, self._identities)
        shapes = {path: shape_of(part) for path, part in scene.found.objects.items()}
        self._baseline = _Baseline(scene.paths(), shapes, digests, settled_in(scene.found))

    def capture(self) -> dict[str, Any]:
        """Return the state, by reference: nothing is cloned.

        Returns:
            ``objects``: state dictionaries by path; ``kinds``: names of their classes; ``groups``:
            names of the parameters in groups that optimizers got after setup; ``parameters``:
            tensors that an optimizer moves and no module holds; ``flags``: frozen parameters and
            submodules in evaluation mode, by module; ``grads``: open gradients by module and
            parameter; ``values``: plain values that training changed, by the path of what holds
            them (that of a module ends with a slash) and by key. Before :meth:`take_baseline`,
            where nothing is known to have changed, no value; ``{}`` where nothing else is there.

        Raises:
            StateError: if an object fails to give its state.
        """
        if self._baseline is None:
            unchanged = copy.copy(self)
            unchanged.take_baseline()
            state = unchanged.capture()
            return state if state["objects"] or state["parameters"] else {}
        baseline = self._baseline
        scene = self._look(baseline.settled)
        changes = changes_since(
            baseline.digests, scene.found, scene, self._identities, frozenset(self._named)
        )
        groups, misfits = structure_since(baseline.shapes, scene.found, scene.parameters)
        misfits |= dict.fromkeys(scene.paths() ^ baseline.paths, "")
        self._warn_of_losses(changes.large, changes.others, misfits)
        return {
            "objects": {path: _state_of(path, part) for path, part in scene.found.objects.items()},
            "kinds": {path: kind_of(part) for path, part in scene.found.objects.items()},
            "groups": groups,
            "parameters": {name: part.detach() for name, part in scene.parameters.loose.items()},
            "flags": flags_of(scene.found, scene.parameters),
            "grads": grads_of(scene.parameters),
            "values": changes.values,
        }

    def restore(self, state: dict[str, Any], *, is_inference: bool = False) -> None:
        """Take back what :meth:`capture` returned, of which no part is kept.

        To be called on what ``setup`` has made and nothing has changed since: an unchanged value
        is not in the state.

        Args:
            state: the state; its tensors may lie on another device.
            is_inference: only what inference needs: networks and other objects that exist on both
                sides, and plain values. No optimizer, scheduler, scaler, flag or gradient.

        Raises:
            StateError: if the state is of other objects than those found (then nothing is changed),
                or if an object refuses its state.
        """
        scene = self._look()
        objects = scene.found.objects
        if is_inference:
            objects = {
                path: part for path, part in objects.items() if not isinstance(part, _TRAINING_ONLY)
            }
            self._warn_of_untrained(objects, state["objects"])
        else:
            self._check(scene, state)
            complete_groups(scene.found, state, scene.parameters)
        # Networks first: an object that follows one may look at its weights.
        for path in sorted(objects, key=lambda path: not isinstance(objects[path], nn.Module)):
            if path in state["objects"]:
                _load_state(path, objects[path], state["objects"][path])
        restore_values(
            state["values"],
            scene.found,
            lambda parent, key: self._may_set(parent, key, scene.found),
        )
        # What has its value by now may be another tensor than before.
        parameters = self._look().parameters
        for name, tensor in {**parameters.leaves, **parameters.loose}.items():
            if name in state["parameters"]:
                _fill(name, tensor, state["parameters"][name])
        if not is_inference:
            load_flags(state["flags"], scene.found, parameters)
            load_grads(state["grads"], parameters)
            if self._baseline is not None:
                # A model that was trained before in this process may hold these values since
                # before setup(). A new process would not: the next checkpoint needs them too.
                self._baseline.distrust(places_in(state["values"]))

    def _all(self) -> Found:
        # What needs no checkpoint takes part in the training all the same.
        return walk(self._owner, self._exclude, frozenset())

    def _look(self, settled: dict[str, dict[str, Any]] | None = None) -> _Scene:
        return _Scene(self._owner, self._exclude, self._unsaved, settled or {})

    def _warn_of_losses(
        self, large: Iterable[Slot], others: Iterable[Slot], misfits: dict[str, str]
    ) -> None:
        """Name in one warning, once each, what a resumed run will not have."""
        large = [slot for slot in large if slot.path not in self._named]
        others = [slot for slot in others if slot.path not in self._named]
        objects = sorted(misfits.keys() - self._named)
        texts = []
        if others:
            names = ", ".join(f'"{slot.path}"' for slot in others)
            is_iterator = any(isinstance(slot.value, Iterator) for slot in others)
            reason = " (an iterator: nothing tells how far it has come)" if is_iterator else ""
            texts.append(
                f"Training changed {_listed(others)}, which cannot be saved as plain values"
                f"{reason}: a resumed run finds there what setup() makes. Give such an object "
                "state_dict() and load_state_dict() and make it an attribute of the "
                f"{self._name}, or declare that it need not be saved: unsaved = ({names},)."
            )
        if large:
            texts.append(
                f"Training changed {_listed(large)}, but plain values are saved up to "
                f"{LIMIT >> 20} MiB in all only: a resumed run finds there what setup() makes. "
                "Register large tensors as buffers of a module, or write an object with "
                "state_dict() and load_state_dict()."
            )
        if objects:
            names = ", ".join(
                f"{path}{misfits[path] and f' ({misfits[path]})'}" for path in objects
            )
            texts.append(
                f"Networks, optimizers or parameters came, went or changed their structure after "
                f"setup(): {names}. A resume from this state will be refused, or finds what "
                "setup() makes: create all of them in setup()."
            )
        self._named |= {slot.path for slot in (*large, *others)} | set(objects)
        if texts:
            _LOGGER.warning("The state of the %s is incomplete. %s", self._name, " ".join(texts))

    def _check(self, scene: _Scene, state: dict[str, Any]) -> None:
        """Refuse a state of other objects before anything is changed."""
        for path, part in scene.found.objects.items():
            kind = state["kinds"].get(path, kind_of(part))
            if isinstance(part, _TRAINING_ONLY) and kind != kind_of(part):
                raise StateError(
                    f"{path} was saved by {kind}, now it is {kind_of(part)}, which cannot go on "
                    "from that state. Build it in setup() as it was when the state was saved."
                )
        saved = self._declared({*state["objects"], *state["parameters"]})
        present = scene.paths()
        parents = {*state["values"]["changed"], *state["values"]["deleted"]}
        lacking = self._declared(parents - scene.found.containers.keys())
        saved |= {path.rstrip("/") for path in lacking}
        missing, left_over = sorted(present - saved), sorted(saved - present)
        if missing or left_over:
            raise StateError(
                f"The saved state is not that of this {self._name}. Without saved state: "
                f"{', '.join(missing) or 'nothing'}. Saved, but not there: "
                f"{', '.join(left_over) or 'nothing'}. Create all networks, optimizers and "
                "schedulers in setup(), under the names that they had when the state was saved."
            )

    def _declared(self, paths: set[str]) -> set[str]:
        """Return the paths that are not declared as unsaved, by themselves or by a parent."""
        return {path for path in paths if not is_declared(path, self._unsaved)}

    def _warn_of_untrained(self, objects: dict[str, Stateful], saved: dict[str, Any]) -> None:
        untrained = [
            path
            for path, part in objects.items()
            if path not in saved and isinstance(part, nn.Module) and part.state_dict()
        ]
        if untrained:
            _LOGGER.warning(
                "The %s holds networks without saved state, which stay as setup() made them: %s.",
                self._name,
                ", ".join(untrained),
            )

    def _may_set(self, parent: str, key: Any, found: Found) -> bool:
        if parent not in found.containers:
            return False
        if (parent, key) in found.slots:
            return True
        if not parent and key in self._exclude:
            return False
        path = f"{parent.rstrip('/')}.{key}" if parent else str(key)
        return path not in found.objects and bool(self._declared({path}))


def _state_of(path: str, part: Stateful) -> dict[str, Any]:
    try:
        return state_of(part)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) failed to give its state: {error!r}. Correct its "
            "state_dict()."
        ) from error


def _load_state(path: str, part: Stateful, state: dict[str, Any]) -> None:
    try:
        load_state(part, state)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) refused its saved state: {error} Build it in setup() "
            "as it was when the state was saved."
        ) from error


def _fill(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Fill a loose tensor in place: optimizers know it by identity."""
    if tensor.shape != saved.shape:
        raise StateError(
            f"{name}: the saved tensor has the shape {tuple(saved.shape)}, the present one "
            f"{tuple(tensor.shape)}. Build it in setup() as it was when the state was saved."
        )
    with torch.no_grad():
        tensor.copy_(saved)


def _listed(slots: Iterable[Slot]) -> str:
    return ", ".join(f"{slot.path} ({type(slot.value).__name__})" for slot in slots)
