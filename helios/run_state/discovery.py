"""Finds, captures and restores the state of an owner without declarations by the user.

Objects with a ``state_dict`` are always saved. Plain values are saved if training has changed them
since ``setup``; what ``setup`` made is configuration, which may be edited between two starts.
Anything else that has changed is reported, since a resumed run would lack it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import kind_of_generator, state_of_generator
from helios.core.utils import collector_at_rest
from helios.errors import ArgumentTypeError, UsageError
from helios.run_state import unsupported_values
from helios.run_state.aliases import IN_NEW, changed_aliases, changed_orders, homes_of_generators
from helios.run_state.baseline import Baseline, mark_of_object, take_baseline
from helios.run_state.changes import Changes, PlainValues, places_in
from helios.run_state.custom_state_dicts import Omissions
from helios.run_state.dataset_attributes import Grown, keep_data_only, large_members
from helios.run_state.extra_states import leave_to_extra_states
from helios.run_state.missing_state import MissingState
from helios.run_state.module_state import complete, flags_of, grads_of, kind_of, structure_since
from helios.run_state.object_names import as_written
from helios.run_state.optimizer_tables import optimizer_tables
from helios.run_state.optimizers import Members, changes_of_optimizers, optimizers_of, roster_of
from helios.run_state.owner_scan import OwnerScan
from helios.run_state.plain_values import Identities
from helios.run_state.restoring import Restoring, read_state
from helios.run_state.shared_views import find_blocks
from helios.run_state.state_dict_coverage import Coverages
from helios.run_state.step_effects import StepWatch
from helios.run_state.tensor_formats import changed_forms, forms_of
from helios.run_state.tied_tensors import changed_ties
from helios.run_state.unsavable import renew_unsavable, unsavable_changes
from helios.run_state.value_scan import mark_of_state
from helios.run_state.walk import walk
from helios.run_state.walk_result import Rules, WalkResult

_LOGGER = logging.getLogger(__name__)
_Kind = TypeVar("_Kind")


@final
class Discovery:
    """Finds, captures and restores the state of an owner's attributes.

    Args:
        owner: the object whose attributes are searched, usually a model.
        exclude: names of attributes that never count.
        unsaved: names of attributes, or paths such as ``"stuff.count"``, that are neither saved nor
            warned about, whatever they hold.
        name: the name of the owner in messages.
        outside: returns the objects that other owners save, by name.
        is_strict: whether all objects must be created in ``setup``; otherwise an object may also be
            created in a start event, which every start repeats.
        is_data: whether only generators and plain values count, as in a data set, whose other
            attributes are data, caches and open files.

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
        outside: Callable[[], Mapping[str, object]] = dict,
        is_strict: bool = True,
        is_data: bool = False,
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
        self._outside = outside
        self._is_strict = is_strict
        self._is_data = is_data
        self._identities = Identities()
        self.values = PlainValues(self._identities)
        self._baseline: Baseline | None = None
        self._omissions = Omissions(self._identities)
        self._named: set[str] = set()
        self._grown = Grown()

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, each once, including those declared as unsaved."""
        return self._all().modules()

    def saved_modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, without those declared as unsaved."""
        return self._look().found.modules()

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by path, each once, including those declared as unsaved."""
        return self._all_of(Optimizer)

    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers by path, as :meth:`optimizers` does."""
        return self._all_of(LRScheduler)

    def moved(self) -> tuple[dict[str, Tensor], dict[str, Members]]:
        """Return parameters outside of networks, and the parameter names of each optimizer."""
        scene = self._look()
        return scene.parameters.loose, roster_of(scene.found, scene.parameters).members

    def named_objects(self) -> Mapping[str, object]:
        """Return the objects that this owner saves, and parts of networks, by name."""
        return self._look().names.objects()

    def watch(self, *, reads_weights: bool = True, sees_unsaved: bool = False) -> StepWatch:
        """Begin to watch what a step changes, in attributes declared as unsaved only if asked."""
        look = partial(self._look, unsaved=frozenset()) if sees_unsaved else self._look
        return StepWatch(self._owner, look, self._identities, reads_weights=reads_weights)

    @property
    def has_attributes(self) -> bool:
        """Whether there are attributes that count."""
        return bool(vars(self._owner).keys() - self._exclude)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only valid in this process: the baseline compares by identity."""
        identities = Identities()
        values = PlainValues(identities)
        values.limit, values.safe_types = self.values.limit, self.values.safe_types
        renewed = {"values": values, "_omissions": Omissions(identities)}
        return vars(self) | renewed | {"_identities": identities, "_baseline": None}

    @property
    def baseline(self) -> Baseline | None:
        """What the last setup has made; ``None`` before one."""
        return self._baseline

    @collector_at_rest()
    def take_baseline(self, *, states_too: bool = False) -> None:
        """Record what setup made; call it right after setup.

        Args:
            states_too: whether the owner has its own ``state_dict``, which may leave out objects;
                then their states are compared too.
        """
        self._named = set()
        scene = self._look()
        complete(optimizers_of(scene.found).values())
        reached = self.values.remember(scene.found, scene)
        self._omissions.remember(scene.found)
        self._baseline = take_baseline(
            self._owner, scene, self._identities, reached, states_too=states_too
        )

    def begin_training(self) -> None:
        """Forget changes of the start events, which every start repeats.

        Changes that a checkpoint can hold are still saved.
        """
        baseline = self._require_baseline()
        scene = self._look()
        new = baseline.new_containers(scene.found)
        self.values.renew_unsaved(scene.found, scene, new)
        aliases = scene.found.aliases.items()
        baseline.aliases |= {where: name for where, name in aliases if where[0] in new}
        for path, part in baseline.late(scene).items():
            is_tensor = isinstance(part, Tensor)
            baseline.started[path] = (
                self._mark(part.detach()) if is_tensor else mark_of_object(part, self._identities)
            )
        for path, generator in scene.found.generators.items():
            baseline.started[path] = self._mark(state_of_generator(generator))
        renew_unsavable(baseline, self._owner, scene, self._identities)

    def note_named(self, places: Iterable[str]) -> None:
        """Treat paths as already reported to the user in this start."""
        places = set(places)
        self._named |= places
        self._grown.note(places)

    @collector_at_rest()
    def capture(self, own: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state, by reference: nothing is cloned.

        Args:
            own: what the owner's own ``state_dict`` returned, which is not captured twice; ``None``
                for an owner without one.

        Returns:
            ``objects``: state dictionaries by path; ``kinds``: names of their classes;
            ``members``, ``built``, ``drivers``: see :func:`changes_of_optimizers`; ``forms``: see
            :func:`changed_forms`; ``misfits``: what a resume cannot rebuild; ``parameters``:
            tensors that an optimizer updates and no module holds; ``flags``: frozen parameters and
            submodules in evaluation mode, by module; ``grads``: gradients of an open window, by
            module and parameter; ``values``: plain values that training changed, by the path of
            their container (with a slash after that of an object) and by key; ``inner``: states of
            objects that only other objects hold and whose ``state_dict`` leaves them out;
            ``omitted``: see :meth:`Omissions.find`; ``tables``: see :func:`optimizer_tables`;
            ``ties``: see :func:`changed_ties`; ``blocks``: see :func:`find_blocks`; ``generators``:
            states of generators; ``aliases``, ``orders``: references to objects and orders of keys
            that training changed; ``missing``: what training changed and this state lacks, with the
            reason, by path; ``is_partial``: whether objects may be absent. Before
            :meth:`take_baseline` there are no values; ``{}`` if nothing else is there.

        Raises:
            StateError: if an object fails to return its state.
        """
        if self._baseline is None:
            unchanged = copy.copy(self)
            unchanged.take_baseline()
            state = unchanged.capture()
            return state if state["objects"] or state["parameters"] else {}
        baseline, scene = self._baseline, self._look(self._baseline.settled)
        found = scene.found
        moved, misfits = changes_of_optimizers(baseline.roster, found, scene.parameters)
        objects = {path: read_state(path, part) for path, part in found.objects.items()}
        inner = {path: read_state(path, part) for path, part in found.inner.items()}
        omitted = self._omissions.find(found, objects | inner, self.values.times)
        tables, odd = optimizer_tables(found, scene.parameters, objects | inner)
        covered = Coverages(found, objects | inner, own, self._mark)
        covered.leave_out()
        changes = self.values.changes(found, scene)
        ties, untied = changed_ties(baseline.ties, scene.ties, found)
        blocks = find_blocks(scene, changes, baseline.blocks, self.values)
        covered.drop_copies(changes)
        leave_to_extra_states(changes, found, baseline.extra, self._identities)
        misfits |= untied | structure_since(baseline.shapes, found)
        new = baseline.new_containers(found)
        aliases, lost = changed_aliases(baseline.aliases, found, new)
        kept = covered.without(inner, baseline.marks)
        for path in inner.keys() - kept.keys():
            if not covered.has(path, inner[path]):
                # Nothing has used such an optimizer, so setup may build it differently.
                moved["members"].pop(path, None)
        inner = kept
        if own is not None:
            objects = covered.without(objects, baseline.marks)
        if self._is_strict:
            misfits |= baseline.come_or_gone(scene, " ".join(misfits.values()))
        loose = {name: part.detach() for name, part in scene.parameters.loose.items()}
        late = (inner,) if self._is_strict else (inner, objects, loose)
        generators, strays = self._generators(found, new)
        lost |= odd | self._leave_out_late(late, changes, scene) | strays
        for where in changes.leave_out(new):
            lost[found.slots[where].path] = IN_NEW
        losses = self._name_losses(changes, misfits, lost, scene)
        return {
            "objects": objects,
            "kinds": {path: kind_of(part) for path, part in found.objects.items()},
            **moved,
            "forms": changed_forms(baseline.forms, forms_of(found, scene.parameters)),
            "ties": ties,
            "blocks": blocks,
            "parameters": loose,
            "flags": flags_of(found, scene.parameters),
            "grads": grads_of(scene.parameters),
            "omitted": omitted,
            "tables": tables,
            "values": changes.values,
            "inner": inner,
            "generators": generators,
            "aliases": aliases,
            "orders": changed_orders(baseline.orders, found),
            "missing": losses.reasons(),
            "misfits": misfits if self._is_strict and own is None else {},
            "is_partial": own is not None or not self._is_strict,
        }

    def restore(self, state: dict[str, Any], *, is_inference: bool = False) -> None:
        """Restore what :meth:`capture` returned. No part of it is kept.

        Call it on the unchanged result of ``setup``, because unchanged values are not in the state.

        Args:
            state: the state, whose tensors may be on another device.
            is_inference: restore only what inference needs: networks and other objects that exist
                on both sides, and plain values. No optimizer, scheduler, scaler, flag or gradient.

        Raises:
            StateError: if the state is of other objects than those found (then nothing is changed),
                or if an object rejects its state.
        """
        self._restoring().run(state, is_inference=is_inference)
        if not is_inference and self._baseline is not None:
            # A model that was trained before in this process may have had these values before
            # setup(). A new process would not: the next checkpoint needs them too.
            self._omissions.forget(state.get("omitted", {}))
            places = places_in(state["values"])
            self.values.distrust(places)
            self._grown.note(parent or key for parent, key in places)
            self._baseline.distrust(places)
            self._baseline.distrust_blocks(state.get("blocks", {}))
            for parent, members in state.get("aliases", {}).get("set", {}).items():
                for key in members:
                    self._baseline.aliases.pop((parent, key), None)
            for path in state.get("inner", {}):
                self._baseline.marks.pop(path, None)

    def prepare(self, state: dict[str, Any]) -> None:
        """Reorder the parameters of optimizers as they were saved.

        Call it before the owner's own ``load_state_dict``, which loads them by position.

        Args:
            state: what :meth:`capture` returned.
        """
        self._restoring().prepare(state)

    def _restoring(self) -> Restoring:
        return Restoring(self._look, self.values, self._exclude, self._unsaved, self._name)

    def _require_baseline(self) -> Baseline:
        if self._baseline is None:
            raise UsageError(
                f"The state of the {self._name} cannot be captured before take_baseline() is "
                "called: changes by training are found by comparison with what setup() made."
            )
        return self._baseline

    def _all(self) -> WalkResult:
        # What no checkpoint needs still takes part in the training.
        return walk(self._owner, Rules(self._exclude, known=self._known()))

    def _all_of(self, kind: type[_Kind]) -> dict[str, _Kind]:
        return {p: part for p, part in self._all().objects.items() if isinstance(part, kind)}

    def _known(self) -> Mapping[int, str]:
        return {} if self._baseline is None else self._baseline.known()

    def _look(
        self,
        settled: Mapping[str, Mapping[str, Any]] | None = None,
        unsaved: frozenset[str] | None = None,
    ) -> OwnerScan:
        unsaved = self._unsaved if unsaved is None else unsaved
        exclude = self._exclude | (large_members(self._owner) if self._is_data else set())
        earlier = {} if self._baseline is None else self._baseline.earlier()
        rules = Rules(exclude, unsaved, self._known(), self._outside, earlier)
        scene = OwnerScan(self._owner, rules, settled or {})
        if self._is_data:
            keep_data_only(scene.found)
        return scene

    def _mark(self, value: Any) -> bytes:
        return mark_of_state(value, self._identities)

    def _leave_out_late(
        self, tables: Sequence[dict[str, Any]], changes: Changes, scene: OwnerScan
    ) -> dict[str, str]:
        """Leave out what was created after setup, and return what it has changed, with the reason.

        Args:
            tables: states of objects and loose parameters, by path.
            changes: of plain values.
            scene: what the owner holds now.
        """
        baseline, lost = self._require_baseline(), dict[str, str]()
        late = {path for table in tables for path in table} & baseline.late(scene).keys()
        for table in tables:
            for path in late & table.keys():
                if self._mark(table.pop(path)) != baseline.started.get(path):
                    lost[as_written(path, scene.found.objects)] = unsupported_values.LATE
        changes.drop([where for where, slot in scene.found.slots.items() if slot.path in late])
        return lost

    def _generators(self, seen: WalkResult, new: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the states of generators by path, and the reason for those not restorable."""
        baseline = self._require_baseline()
        homes = homes_of_generators(seen, new)
        states, strays = dict[str, Any](), dict[str, str]()
        for path, part in seen.generators.items():
            kind, state = kind_of_generator(part), state_of_generator(part)
            if path in homes or baseline.generators.get(path) == kind:
                states[path] = {"kind": kind, "state": state, "home": homes.get(path)}
            elif self._mark(state) != baseline.started.get(path):
                strays[path] = unsupported_values.STRAY
        return states, strays

    def _name_losses(
        self, changes: Changes, misfits: dict[str, str], lost: dict[str, str], scene: OwnerScan
    ) -> MissingState:
        """Return what a resumed run will lack, and report each path once, in one warning."""
        if self._is_data:
            grown = self._grown.losses(large_members(self._owner) - self._unsaved)
            self._grown.note(parent or key for parent, key in places_in(changes.values))
            losses = MissingState(Changes(changes.values), {}, lost | grown)
        else:
            baseline = self._require_baseline()
            named = unsavable_changes(baseline, self._owner, scene, self._identities)
            losses = MissingState(changes, misfits, lost | named)
        new = losses.without(self._named)
        self._named |= losses.reasons().keys()
        if new:
            _LOGGER.warning(
                "The state of the %s is incomplete. %s", self._name, new.text(self._name)
            )
        self._name_slow()
        return losses

    def _name_slow(self) -> None:
        for place, seconds in self.values.times.end().items():
            _LOGGER.warning(
                "Each save takes %.2g s to inspect %s of the %s. If a resumed run does not need "
                'it, declare that: unsaved = ("%s",).',
                seconds,
                place,
                self._name,
                place,
            )
