"""Finds, captures and restores the state of an owner without declarations by the user.

Objects with a ``state_dict`` are always saved. Plain values are saved if training has changed them
since ``setup``; what ``setup`` made is configuration, which may be edited between two starts.
Anything else that has changed is reported, since a resumed run would lack it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.utils import collector_at_rest, parameters_of
from helios.errors import ArgumentTypeError, UsageError
from helios.state_graph import unsupported_values
from helios.state_graph.attribute_rules import PLAIN, OversizedMembers, large_members
from helios.state_graph.baseline import Baseline, mark_of_object, take_baseline
from helios.state_graph.changes import Changes, Comparison
from helios.state_graph.custom_state_dicts import Omissions, leave_to_extra_states
from helios.state_graph.graph import Graph
from helios.state_graph.module_state import complete, flags_of, grads_of, kind_of, structure_since
from helios.state_graph.network_parts import NamedTensor
from helios.state_graph.object_names import ObjectNames, Outside, Rules, as_written
from helios.state_graph.optimizers import (
    Members,
    changes_of_optimizers,
    groups_of_optimizers,
    optimizer_tables,
    optimizers_of,
)
from helios.state_graph.restoring import Restoring, read_state
from helios.state_graph.saved_layouts import changed_layouts, put_back
from helios.state_graph.scanning import mark_of_state
from helios.state_graph.state_dict_coverage import Coverages
from helios.state_graph.step_effects import StepWatch
from helios.state_graph.unsavable import (
    SharedValues,
    marks_of_unsavable,
    unsavable_changes,
    user_classes,
)
from helios.state_graph.values import LIMIT, Identities, attributes_of

_LOGGER = logging.getLogger(__name__)
_Kind = TypeVar("_Kind")

_TRAINED = Identities()
"""The owners that a training of this process has changed."""


@final
@dataclass
class Allowance:
    """What the values of an owner may cost, and which types they may have.

    Attributes:
        limit: maximum bytes of plain values in a state.
        safe_types: types that loading may build besides those of the values that setup made.
    """

    limit: int = LIMIT
    safe_types: tuple[Any, ...] = ()


@final
class Discovery:
    """Finds, captures and restores the state of an owner's attributes.

    Args:
        owner: the object whose attributes are searched, usually a model.
        exclude: names of attributes that never count.
        unsaved: names of attributes, or paths such as ``"stuff.count"``, that are neither saved nor
            warned about, whatever they hold.
        name: the name of the owner in messages.
        outside: returns what other owners save.
        is_strict: whether all objects must be created in ``setup``; otherwise an object may also be
            created in a start event, which every start repeats.
        is_data: whether only generators and plain values count, as in a data set, whose other
            attributes are data, caches and open files.

    Attributes:
        values: what values may cost.
        unrestored: what the last restore for inference has passed over, with the reason, by path.

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
        outside: Callable[[], Outside] = Outside,
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
        self.values = Allowance()
        self.unrestored: dict[str, str] = {}
        self._baseline: Baseline | None = None
        self._omissions = Omissions(self._identities)
        self._shared = SharedValues(self._identities)
        self._named: set[str] = set()
        self._oversized = OversizedMembers()
        self._nodes: Mapping[str, Any] = {}
        self._registered: dict[str, NamedTensor] = {}
        self._keeps_names = False
        self._named_objects: Mapping[str, object] | None = None

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, each once, including those declared as unsaved."""
        return self._all_of(nn.Module)

    def saved_modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, without those declared as unsaved."""
        return ObjectNames(self._owner, self._rules()).modules()

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by path, each once, including those declared as unsaved."""
        return self._all_of(Optimizer)

    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers by path, as :meth:`optimizers` does."""
        return self._all_of(LRScheduler)

    def moved(self) -> tuple[dict[str, Tensor], dict[str, Members]]:
        """Return parameters outside of networks, and the parameter names of each optimizer."""
        graph = self._look()
        return graph.parameters.loose, groups_of_optimizers(
            graph.found, graph.parameters
        ).names_by_group

    def named_objects(self) -> Mapping[str, object]:
        """Return the objects that this owner saves, and parts of networks, by name."""
        kept = self._named_objects
        return ObjectNames(self._owner, self._rules()).named() if kept is None else kept

    @contextmanager
    def keeping_names(self) -> Iterator[None]:
        """Let :meth:`named_objects` return what :meth:`capture` finds within the block."""
        self._keeps_names = True
        try:
            yield
        finally:
            self._keeps_names, self._named_objects = False, None

    def look_at_nodes(self) -> None:
        """Find the values of the owner, for :meth:`pop_nodes`."""
        self._nodes = self._look().nodes()

    def pop_nodes(self) -> Mapping[str, Any]:
        """Return the values that the last call has found, by name, for other owners."""
        nodes, self._nodes = self._nodes, {}
        return nodes

    def watch(self, *, reads_weights: bool = True, sees_unsaved: bool = False) -> StepWatch:
        """Begin to watch what a step changes, in attributes declared as unsaved only if asked."""
        look = partial(self._look, unsaved=frozenset()) if sees_unsaved else self._look
        return StepWatch(self._owner, look, self._identities, reads_weights=reads_weights)

    @property
    def has_attributes(self) -> bool:
        """Whether there are attributes that count."""
        return bool(attributes_of(self._owner).keys() - self._exclude)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only valid in this process: the baseline compares by identity."""
        identities = Identities()
        renewed = {
            "values": copy.copy(self.values),
            "_omissions": Omissions(identities),
            "_nodes": {},
        }
        renewed["_shared"] = SharedValues(identities)
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
        self._named, self._baseline, self.unrestored = set(), None, {}
        found = ObjectNames(self._owner, self._rules())
        if complete(optimizers_of(found).values()):
            # Their attributes are others now.
            found = ObjectNames(self._owner, self._rules())
        graph = Graph(self._owner, found, self._identities)
        self._omissions.remember(graph.found)
        self._shared.remember(graph)
        self._nodes = graph.nodes()
        baseline = take_baseline(self._owner, graph, self._identities, states_too=states_too)
        self._baseline = baseline

    def begin_training(self) -> None:
        """Forget changes of the start events, which every start repeats.

        Changes that a checkpoint can hold are still saved.
        """
        baseline = self._require_baseline()
        _TRAINED.number(self._owner)
        graph = self._look()
        self._nodes = graph.nodes()
        baseline.made.renew(graph, self._compare(graph).lost)
        for path, part in baseline.late(graph).items():
            is_tensor = isinstance(part, Tensor)
            baseline.started[path] = (
                self._mark(part.detach()) if is_tensor else mark_of_object(part, self._identities)
            )
        # What no checkpoint can hold is made again by every start.
        self._shared.remember(graph)
        kinds = user_classes(self._owner, graph.found, {*baseline.kinds, *graph.types})
        baseline.kinds, baseline.unsavable = kinds, marks_of_unsavable(kinds, graph)

    def _compare(self, graph: Graph, covers: Coverages | None = None) -> Changes:
        return Comparison(
            self._require_baseline().made,
            graph,
            limit=self.values.limit,
            safe_types=self.values.safe_types,
            covers=None if covers is None else covers.of,
        ).run()

    def note_named(self, places: Iterable[str]) -> None:
        """Treat paths as already reported to the user in this start."""
        places = set(places)
        self._named |= places
        self._oversized.note(places)

    @collector_at_rest()
    def capture(self, own: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state, by reference: nothing is cloned.

        Args:
            own: what the owner's own ``state_dict`` returned, which is not captured twice; ``None``
                for an owner without one.

        Returns:
            ``objects``: state dictionaries by path; ``kinds``: names of their classes;
            ``members``, ``built``, ``drivers``: see :func:`changes_of_optimizers`; ``layouts``: see
            :func:`changed_layouts`; ``misfits``: what a resume cannot rebuild; ``parameters``:
            tensors that an optimizer updates and no module holds; ``flags``: frozen parameters and
            submodules in evaluation mode, by module; ``grads``: gradients of an open window, by
            module and parameter; ``values``: what training has changed of the graph: ``nodes``,
            ``tensors``, ``devices`` and ``generators`` as in :class:`Changes`; ``inner``: states of
            objects that only other objects hold and whose ``state_dict`` leaves them out;
            ``omitted``: see :meth:`Omissions.find`; ``tables``: see :func:`optimizer_tables`;
            ``missing``: what training changed and this state lacks, with the reason, by path;
            ``is_partial``: whether objects may be absent. Before :meth:`take_baseline` there are no
            values; ``{}`` if nothing else is there.

        Raises:
            StateError: if an object fails to return its state.
        """
        if self._baseline is None:
            unchanged = copy.copy(self)
            unchanged.take_baseline()
            state = unchanged.capture()
            return state if state["objects"] or state["parameters"] else {}
        baseline, graph = self._baseline, self._look()
        found, values = graph.found, self.values
        self._nodes = graph.nodes()
        moved, misfits = changes_of_optimizers(baseline.optimizer_groups, found, graph.parameters)
        objects = {path: read_state(path, part) for path, part in found.objects.items()}
        inner = {path: read_state(path, part) for path, part in found.inner.items()}
        omitted = self._omissions.find(found, objects | inner)
        tables, odd = optimizer_tables(found, objects | inner)
        covered = Coverages(found, objects | inner, own, self._mark)
        changes = self._compare(graph, covered)
        layouts = changed_layouts(
            graph, changes, baseline.forms, baseline.memory, limit=values.limit
        )
        leave_to_extra_states(changes, found, baseline.extra, self._identities)
        misfits |= changes.misfits | structure_since(baseline.shapes, found)
        kept = covered.without(inner, baseline.marks)
        for path in inner.keys() - kept.keys():
            if not covered.has(path, inner[path]):
                # Nothing has used such an optimizer, so setup may build it differently.
                moved["members"].pop(path, None)
        if own is not None:
            objects = covered.without(objects, baseline.marks)
        if self._is_strict:
            misfits |= baseline.come_or_gone(graph, " ".join(misfits.values()))
        loose = {name: part.detach() for name, part in graph.parameters.loose.items()}
        late = (kept,) if self._is_strict else (kept, objects, loose)
        odd |= self._leave_out_late(late, graph)
        losses = self._name_losses(changes, misfits, odd, graph)
        return {
            "objects": objects,
            "kinds": {path: kind_of(part) for path, part in found.objects.items()},
            **moved,
            "layouts": layouts,
            "parameters": loose,
            "flags": flags_of(found, graph.parameters),
            "grads": grads_of(graph.parameters),
            "omitted": omitted,
            "tables": tables,
            "values": {
                "nodes": changes.nodes,
                "tensors": changes.tensors,
                "devices": changes.devices,
                "generators": changes.generators,
            },
            "inner": kept,
            "missing": losses.reasons(),
            "misfits": misfits if self._is_strict and own is None else {},
            "is_partial": own is not None or not self._is_strict,
        }

    def restore(self, state: dict[str, Any], *, is_inference: bool = False) -> None:
        """Restore what :meth:`capture` returned. No part of it is kept.

        Call it on the unchanged result of ``setup``, because unchanged values are not in the state.

        Args:
            state: the state, whose tensors may be on another device.
            is_inference: restore what exists on both sides; :attr:`unrestored` is the rest.

        Raises:
            StateError: if the state is of other objects than those found (then nothing is changed),
                or if an object rejects its state.
        """
        # The owner's own load_state_dict may have assigned other tensors since.
        if self._registered:
            optimizers = self.optimizers().values()
            put_back(
                self._registered, [each for part in optimizers for each in parameters_of(part)]
            )
        self._registered = {}
        restoring = self._restoring()
        self._nodes = restoring.run(state, is_inference=is_inference).nodes()
        self.unrestored = restoring.unrestored
        if is_inference or self._baseline is None:
            return
        self._oversized.note(_attributes_in(state["values"]["nodes"]))
        if _TRAINED.knows(self._owner):
            # setup() may have found what that training has left. A new process would not have it.
            self._omissions.forget(state["omitted"])
            self._baseline.mark_as_changed(state)

    def prepare(self, state: dict[str, Any]) -> None:
        """Reorder the parameters of optimizers as they were saved, and note where tensors are.

        Call it before the owner's own ``load_state_dict``, which loads optimizers by position and
        may assign other tensors to networks.

        Args:
            state: what :meth:`capture` returned.
        """
        self._registered = self._restoring().prepare(state)

    def _restoring(self) -> Restoring:
        return Restoring(
            self._look,
            lambda: self.values.safe_types,
            self._exclude,
            self._unsaved,
            self._name,
            self._is_data,
        )

    def _require_baseline(self) -> Baseline:
        if self._baseline is None:
            raise UsageError(
                f"The state of the {self._name} cannot be captured before take_baseline() is "
                "called: changes by training are found by comparison with what setup() made."
            )
        return self._baseline

    def _all_of(self, kind: type[_Kind]) -> dict[str, _Kind]:
        # What no checkpoint needs still takes part in the training.
        rules = self._rules(unsaved=frozenset(), is_alone=True)
        found = ObjectNames(self._owner, rules)
        return {path: part for path, part in found.objects.items() if isinstance(part, kind)}

    def _rules(self, unsaved: frozenset[str] | None = None, *, is_alone: bool = False) -> Rules:
        return Rules(
            self._exclude | (large_members(self._owner) if self._is_data else set()),
            self._unsaved if unsaved is None else unsaved,
            {} if self._baseline is None else self._baseline.known(),
            None if self._baseline is None else self._baseline.tops,
            Outside() if is_alone else self._outside(),
            PLAIN if self._is_data else (),
        )

    def _look(self, unsaved: frozenset[str] | None = None) -> Graph:
        found = ObjectNames(self._owner, self._rules(unsaved))
        if self._keeps_names:
            self._named_objects = found.named()
        return Graph(self._owner, found, self._identities)

    def _mark(self, value: Any) -> bytes:
        return mark_of_state(value, self._identities)

    def _leave_out_late(self, tables: Sequence[dict[str, Any]], graph: Graph) -> dict[str, str]:
        """Leave out what was created after setup, and return what it has changed, with the reason.

        Args:
            tables: states of objects and loose parameters, by path.
            graph: what the owner holds now.
        """
        baseline, lost = self._require_baseline(), dict[str, str]()
        late = {path for table in tables for path in table} & baseline.late(graph).keys()
        for table in tables:
            for path in late & table.keys():
                if self._mark(table.pop(path)) != baseline.started.get(path):
                    lost[as_written(path, graph.found.objects)] = unsupported_values.LATE
        return lost

    def _name_losses(
        self, changes: Changes, misfits: dict[str, str], lost: dict[str, str], graph: Graph
    ) -> MissingState:
        """Return what a resumed run will lack, and report each path once, in one warning."""
        if self._is_data:
            grown = self._oversized.losses(large_members(self._owner) - self._unsaved)
            self._oversized.note(_attributes_in(changes.nodes))
            losses = MissingState(lost=lost | grown)
        else:
            baseline = self._require_baseline()
            now = marks_of_unsavable(baseline.kinds, graph)
            named = unsavable_changes(baseline.unsavable, now) | self._shared.find(graph)
            losses = MissingState.of(changes, misfits, lost | named)
        new = losses.without(self._named)
        self._named |= losses.reasons().keys()
        if new:
            _LOGGER.warning(
                "The state of the %s is incomplete. %s", self._name, new.text(self._name)
            )
        return losses


def _attributes_in(nodes: Mapping[str, Any]) -> Iterable[str]:
    """Return the attributes of the owner that saved nodes belong to."""
    for name, record in nodes.items():
        yield from (name,) if name else (*record["set"], *record["deleted"])


@final
@dataclass(frozen=True)
class MissingState:
    """State that a resumed run will lack.

    Attributes:
        missing: the reason why a plain value is not saved, by path.
        large: the types of those that are too large, by path.
        others: the types of those that no checkpoint can hold, by path.
        misfits: objects that were added, removed or changed in structure, with what differs.
        lost: other paths, with the reason.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    large: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, changes: Changes, misfits: Mapping[str, str], lost: Mapping[str, str]
    ) -> MissingState:
        """Return what is missing of changes."""
        return cls(changes.missing, changes.large, changes.others, misfits, lost)

    def without(self, known: Collection[str]) -> MissingState:
        """Return what was not reported before."""
        tables = (self.missing, self.large, self.others, self.misfits, self.lost)
        return MissingState(
            *({path: text for path, text in table.items() if path not in known} for table in tables)
        )

    def __bool__(self) -> bool:
        """Return whether anything is missing."""
        return bool(self.missing or self.misfits or self.lost)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each path."""
        return {
            **self.missing,
            **{
                path: "was added, removed or changed in structure after "
                f"setup(){text and f', {text}'}: create it there"
                for path, text in self.misfits.items()
            },
            **self.lost,
        }

    def text(self, name: str) -> str:
        """Return the text of a warning.

        Args:
            name: the name of the owner in the text.
        """
        return " ".join(self._texts(name))

    def _texts(self, name: str) -> Iterator[str]:
        if self.others:
            names = ", ".join(f'"{path}"' for path in self.others)
            yield (
                f"Training changed {_listed(self.others)}, which cannot be saved as plain values "
                f"({self._reasons()}). A resumed run starts with what setup() makes. Declare what "
                f"need not be saved: unsaved = ({names},) of the {name}."
            )
        if self.large:
            yield (
                f"Training changed {_listed(self.large)}, but "
                f"{self.missing[next(iter(self.large))]}. A resumed run starts with what setup() "
                "makes."
            )
        if self.misfits:
            names = ", ".join(
                f"{path}{text and f' ({text})'}" for path, text in sorted(self.misfits.items())
            )
            yield (
                "Networks, optimizers or parameters were added, removed or changed in structure "
                f"after setup(): {names}. A resume from this state fails, or starts with what "
                "setup() makes: create all of them in setup()."
            )
        if self.lost:
            names = "; ".join(f"{path} ({text})" for path, text in self.lost.items())
            yield f"Training changed what no checkpoint can hold: {names}."

    def _reasons(self) -> str:
        """Return the reasons, each once, with the paths of each if there are several reasons."""
        groups: dict[str, list[str]] = {}
        for path in self.others:
            groups.setdefault(self.missing[path], []).append(path)
        if len(groups) == 1:
            return next(iter(groups))
        return "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in groups.items())


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({kind})" for path, kind in types.items())
