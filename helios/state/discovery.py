"""Captures and restores the state of one owner, such as the model or a plugin.

Anchors are always saved, by their own ``state_dict``. A value is saved if its digest differs from
that after ``setup``; what cannot be saved and has changed is named.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Size, Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.sharded_tensors import is_sharded
from helios.core.utils import collector_at_rest, parameters_of
from helios.core.wrappers import BareNames, class_of, unwrap
from helios.errors import ArgumentTypeError, StateError, UsageError
from helios.protocols import Stateful
from helios.state import reasons
from helios.state.anchors import Anchors, Outside, References, Rules, as_written, path_of
from helios.state.build import GONE, Build, types_in
from helios.state.named import Named, OversizedMembers, classes_of, large_members, marks_of
from helios.state.networks import (
    fill,
    flags_of,
    grads_of,
    is_odd,
    lacking_in,
    load_flags,
    load_grads,
    pieces_of,
    state_of,
)
from helios.state.optimizers import (
    arrange,
    collecting,
    complete,
    drivers_of,
    load_state,
    members_of,
    misfits_of,
)
from helios.state.steps import StepWatch
from helios.state.walk import HOLE, PARTS, Identities, Walk, digest_of, mark_of
from helios.state.values import LIMIT, PLAIN, attributes_of
from helios.storage.type_converters import in_every_process, type_name
from helios.text import size_text

_LOGGER = logging.getLogger(__name__)
TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)
"""Objects that weights do without, and that an evaluation may lack."""

NOT_BUILT = "setup() does not build it. Build it for any value of fast_init."
"""Why something that is saved is not restored for inference."""

_MAX_LAYERS = 3
_PLAINEST = frozenset((int, bool, type(None)))
_TRAINED = Identities()
"""The owners that a training of this process has changed."""


@dataclass
class Allowance:
    """What the values of an owner may cost, and which types they may have."""

    limit: int = LIMIT
    safe_types: tuple[Any, ...] = ()
    made_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that a state will have if training changes everything that setup made."""
        return min(self.made_bytes, self.limit)


@final
class Look:
    """What an owner holds at one time: anchors, codes of values, digests of both."""

    def __init__(self, owner: object, rules: Rules, identities: Identities) -> None:
        self.anchors = Anchors(owner, rules)
        self.walk = Walk(owner, self.anchors)
        for path, part in self.anchors.of_kind(Optimizer, with_inner=True).items():
            if path in self.anchors.inner:
                self.anchors.name_updated(path, part)
        self._identities, self.number = identities, identities.number
        self._names: dict[int, str] | None = None

    def digests(self) -> dict[str, dict[Any, tuple[Any, int]]]:
        """Return the digest and the size of each value, by holder and key."""
        number = self._identities
        return {
            name: {
                # Most modules hold nothing else.
                key: ((kind, code), 8)
                if (kind := type(code)) in _PLAINEST
                else digest_of(code, number)
                for key, code in table.items()
            }
            for name, table in self.walk.codes.items()
        }

    def mark(self, value: Any) -> bytes:
        """Return what is equal for equal content, with anchors and values by their names."""
        if self._names is None:
            self._names = {**self.walk.names, **self.anchors.names}
        # A name says nothing of the content of what has it.
        own = self._names.pop(id(value), None)
        mark = mark_of(value, self._identities, self._names)
        if own is not None:
            self._names[id(value)] = own
        return mark

    def forms(self) -> dict[str, list[Any]]:
        """Return dtype, shape and strides of parameters and persistent buffers, by name."""
        found = [
            (self.anchors.names.get(id(tensor)), tensor)
            for module in self.anchors.of_kind(nn.Module, with_inner=True).values()
            for tensor in pieces_of(self.anchors.network(module)).values()
        ]
        return {
            name: [tensor.dtype, [*tensor.shape], [*tensor.stride()]]
            for name, tensor in (*found, *self.anchors.loose.items())
            if name and not is_sharded(tensor) and tensor.layout is torch.strided
        }

    def shapes(self) -> dict[str, dict[str, str]]:
        """Return the classes of objects and modules, and the names of parameters, by holder."""
        holders, found = self.walk.holders, dict[str, dict[str, str]]()
        for name, table in self.walk.codes.items():
            if PARTS in table or name in self.anchors.objects:
                kind = class_of(holders[name]) if PARTS in table else type(holders[name])
                keys = [key for key, part in table.get(PARTS, ((), {}))[1].items() if part]
                name_of_kind = "" if issubclass(kind, LazyModuleMixin) else kind.__name__
                found[name] = {"class": name_of_kind, **dict.fromkeys(keys, "parameter")}
        return found

    def nodes(self) -> dict[str, Any]:
        """Return what has a name here, for other owners."""
        return dict(self.walk.parts)


@dataclass
class Baseline:
    """What setup made.

    Attributes:
        digests: of values, by holder and key.
        marks: of what no checkpoint can hold, by reason and name.
        references: the anchors, as far as they are still alive.
        tops: paths of the objects and of loose parameters.
        forms: types, shapes and strides of tensors.
        members, drivers: see ``optimizers``.
        states: digests of objects that a state may leave out.
        pieces: digests of the tensors of networks whose ``state_dict`` is the user's.
        types: classes that a resume may build.
        shapes: classes of objects and modules, and names of parameters, by holder.
        late: marks of what start events have created.
    """

    digests: dict[str, dict[Any, Any]]
    marks: dict[str, Any]
    references: References
    tops: frozenset[str]
    inner: frozenset[str]
    forms: dict[str, Any]
    members: dict[str, Any]
    drivers: dict[str, str]
    states: dict[str, bytes]
    pieces: dict[str, dict[str, bytes]]
    types: set[type]
    classes: list[type]
    shapes: dict[str, dict[str, str]]
    late: dict[str, bytes] = field(default_factory=dict)

    def known(self) -> dict[int, str]:
        """Return the names of the anchors of setup that are still alive, by id."""
        return {number: name for number, refer, name in self.references if refer() is not None}


@final
class Discovery:
    """Finds, captures and restores the state of an owner's attributes.

    Args:
        owner: the object whose attributes are searched, usually a model.
        exclude: names of attributes that never count.
        unsaved: names of attributes, or paths such as ``"stuff.count"``, that are neither saved nor
            named, whatever they hold.
        name: the name of the owner in messages.
        outside: returns what other owners save.
        is_strict: whether all objects must be created in ``setup``; otherwise an object may also be
            created in a start event, which every start repeats.
        is_data: whether only generators and small plain values count, as in a data set.
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
        self._owner, self._exclude, self._unsaved = owner, exclude, frozenset(unsaved)
        self._name, self._outside = name, outside
        self._is_strict, self._is_data = is_strict, is_data
        self._identities = Identities()
        self.values = Allowance()
        self.baseline: Baseline | None = None
        self.unrestored: dict[str, str] = {}
        self._named = Named(name)
        self._oversized = OversizedMembers()
        self._last: Look | None = None
        self._registered: list[tuple[dict[str, Any], str, Any]] = []
        self._keeps = self._is_lenient = False

    # ---- what is there

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, each once, including those declared as unsaved."""
        return self._all_of(nn.Module)

    def saved_modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, without those declared as unsaved."""
        return Anchors(self._owner, self._rules()).of_kind(nn.Module)

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by path, each once, including those declared as unsaved."""
        return self._all_of(Optimizer)

    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers by path, as :meth:`optimizers` does."""
        return self._all_of(LRScheduler)

    def moved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return parameters outside of networks, and the parameter names of each optimizer."""
        anchors = Anchors(self._owner, self._rules())
        return anchors.loose, members_of(anchors)

    def named_objects(self) -> Mapping[str, object]:
        """Return the anchors that this owner saves, by name."""
        last = self._last if self._keeps else None
        anchors = Anchors(self._owner, self._rules()) if last is None else last.anchors
        return {name: part for name, part in {**anchors.shared, **anchors.parts}.items() if name}

    @contextmanager
    def keeping_names(self) -> Iterator[None]:
        """Let :meth:`named_objects` return what :meth:`capture` finds within the block."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._last = False, None

    def look_at_nodes(self) -> None:
        """Find the values of the owner, for :meth:`pop_nodes`."""
        self._last = self._look()

    def pop_nodes(self) -> Mapping[str, Any]:
        """Return the values that the last call has found, by name, for other owners."""
        last = self._last
        if not self._keeps:
            self._last = None
        return {} if last is None else last.nodes()

    @property
    def has_attributes(self) -> bool:
        """Whether there are attributes that count."""
        return bool(attributes_of(self._owner).keys() - self._exclude)

    def watch(self, *, reads_weights: bool = True, sees_unsaved: bool = False) -> StepWatch:
        """Begin to watch what a step changes, in attributes declared as unsaved only if asked."""
        look = partial(self._look, unsaved=frozenset()) if sees_unsaved else self._look
        return StepWatch(look, reads_weights=reads_weights, classes=self._classes())

    def _classes(self) -> list[type]:
        return [] if self.baseline is None else self.baseline.classes

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only valid in this process: the baseline compares by identity."""
        fresh = {"_identities": Identities(), "baseline": None, "_last": None}
        return vars(self) | fresh

    def _all_of(self, kind: Any) -> dict[str, Any]:
        # What no checkpoint needs still takes part in the training.
        return Anchors(self._owner, self._rules(frozenset(), is_alone=True)).of_kind(kind)

    def _rules(self, unsaved: frozenset[str] | None = None, *, is_alone: bool = False) -> Rules:
        base = self.baseline
        return Rules(
            self._exclude | (large_members(self._owner) if self._is_data else frozenset()),
            self._unsaved if unsaved is None else unsaved,
            {} if base is None else base.known(),
            None if base is None else base.tops,
            Outside() if is_alone else self._outside(),
            PLAIN if self._is_data else (),
        )

    def _look(self, unsaved: frozenset[str] | None = None) -> Look:
        return Look(self._owner, self._rules(unsaved), self._identities)

    # ---- setup and start

    @collector_at_rest()
    def take_baseline(self, *, states_too: bool = False) -> None:
        """Record what setup made; call it right after setup.

        Args:
            states_too: whether the owner has its own ``state_dict``, which may leave out objects.
        """
        self._named.clear()
        self.baseline, self.unrestored = None, {}
        look = self._look()
        if complete(look.anchors.of_kind(Optimizer, with_inner=True).values()):
            look = self._look()
        anchors, walk = look.anchors, look.walk
        digests = look.digests()
        marked = {**anchors.inner, **(anchors.objects if states_too else {})}
        classes = classes_of(self._owner, look)
        self.baseline = Baseline(
            {name: {key: d for key, (d, _) in table.items()} for name, table in digests.items()},
            marks_of(look, classes),
            anchors.references(),
            frozenset((*anchors.objects, *anchors.loose)),
            frozenset(anchors.inner),
            look.forms(),
            members_of(anchors),
            drivers_of(anchors),
            {path: _mark_of_state(look, part) for path, part in marked.items()},
            {
                path: {name: look.mark(tensor.detach()) for name, tensor in pieces_of(net).items()}
                for path, net in _odd_networks(anchors)
            },
            {*walk.kinds},
            classes,
            look.shapes(),
        )
        self.values.made_bytes = sum(s for table in digests.values() for _, s in table.values())
        self._last = look

    def begin_training(self) -> None:
        """Forget changes of the start events that no checkpoint can hold: every start repeats them."""
        base = self._require_baseline()
        _TRAINED.number(self._owner)
        look = self._look()
        self._last = look
        base.classes = classes_of(self._owner, look)
        base.marks = marks_of(look, base.classes)
        for name, part in self._late_in(look).items():
            base.late[name] = _mark_of_state(look, part)
        for name, table in look.walk.codes.items():
            for key, code in table.items():
                if code == HOLE:
                    base.digests.setdefault(name, {})[key] = digest_of(code, self._identities)[0]

    def _late_in(self, look: Look) -> dict[str, Any]:
        """Return objects and loose parameters that were created after setup, by path."""
        base, anchors = self._require_baseline(), look.anchors
        parts = {**anchors.objects, **anchors.inner, **anchors.loose}
        return {p: part for p, part in parts.items() if p not in base.tops | base.inner}

    def note_named(self, places: Iterable[str]) -> None:
        """Treat paths as already reported to the user in this start."""
        places = set(places)
        self._named.known |= places
        self._oversized.note(places)

    def _require_baseline(self) -> Baseline:
        if self.baseline is None:
            raise UsageError(
                f"The state of the {self._name} cannot be captured before take_baseline() is "
                "called: changes by training are found by comparison with what setup() made."
            )
        return self.baseline

    # ---- capture

    @collector_at_rest()
    def capture(self, own: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state, by reference: nothing is cloned.

        Args:
            own: what the owner's own ``state_dict`` returned; ``None`` for an owner without one.

        Returns:
            ``objects`` and ``inner``: states of objects by path; ``kinds``: their classes;
            ``members``, ``built``, ``drivers``: optimizers by names; ``omitted``: what states of
            networks lack; ``parameters``: those in no network; ``flags``, ``grads``; ``forms``:
            types and shapes of tensors that differ from setup; ``values``: codes of changed values
            by holder and key; ``missing``, ``misfits``: what a resume lacks, or cannot rebuild.
        """
        if self.baseline is None:
            unchanged = copy.copy(self)
            unchanged._named = Named(self._name)
            unchanged.take_baseline()
            state = unchanged.capture()
            return state if state["objects"] or state["parameters"] else {}
        base, look = self.baseline, self._look()
        self._last, anchors = look, look.anchors
        late = self._late_in(look)
        objects = {
            p: _read_state(p, part)
            for p, part in anchors.objects.items()
            if self._is_strict or p not in late
        }
        inner = {p: _read_state(p, part) for p, part in anchors.inner.items() if p not in late}
        kept = {p: s for p, s in inner.items() if look.mark(s) != base.states.get(p)}
        if own is not None:
            objects = {p: s for p, s in objects.items() if look.mark(s) != base.states.get(p)}
        values, lost = self._changed(look)
        misfits: dict[str, str] = self._misfits(look, late) if self._is_strict else {}
        if not self._is_strict:
            for path, part in late.items():
                if _mark_of_state(look, part) != base.late.get(path):
                    lost[as_written(path, anchors.objects)] = reasons.LATE
        members = members_of(anchors)
        if self._is_data:
            lost |= self._oversized.losses(large_members(self._owner) - self._unsaved)
            self._oversized.note(values.get("", {}))
        else:
            lost |= Named.changes(base.marks, marks_of(look, base.classes))
        self._named.report(lost, misfits)
        forms = {n: f for n, f in look.forms().items() if f != base.forms.get(n)}
        return {
            "objects": objects,
            "inner": kept,
            "kinds": {path: _kind_of(part) for path, part in anchors.objects.items()},
            "members": members,
            "built": {p: m for p, m in base.members.items() if members.get(p, m) != m},
            "drivers": drivers_of(anchors),
            "omitted": self._omitted(look, objects | inner),
            "parameters": {
                n: p.detach() for n, p in anchors.loose.items() if self._is_strict or n not in late
            },
            "flags": flags_of(anchors),
            "grads": grads_of(anchors),
            "forms": forms,
            "values": values,
            "missing": {**lost, **Named.texts(misfits)},
            "misfits": misfits if self._is_strict and own is None else {},
            "is_partial": own is not None or not self._is_strict,
        }

    def capture_all(self) -> dict[str, Any]:
        """Return everything as changed, to be restored in this process."""
        self.take_baseline()
        base, self._is_lenient = self._require_baseline(), True
        base.digests, base.states, self.values.limit = {}, {}, 1 << 62
        self._named.known |= base.marks.keys()
        self._keeps = True  # What setup has made must live as long.
        state = self.capture()
        # What functions share with the code around them is left alone.
        state["values"] = {
            name: {key: code for key, code in table.items() if not str(key).startswith("closure.")}
            for name, table in state["values"].items()
        }
        return state

    def _changed(self, look: Look) -> tuple[dict[str, dict[Any, Any]], dict[str, str]]:
        """Return the codes of changed values, and what is too large or of an unknown class."""
        base, codes = self._require_baseline(), look.walk.codes
        found: list[tuple[int, str, Any]] = []
        for name, table in look.digests().items():
            known = base.digests.get(name, {})
            found += [(s, name, key) for key, (d, s) in table.items() if known.get(key) != d]
            found += [(0, name, key) for key in known.keys() - table.keys()]
        types = {type_name(kind) for kind in self._types(look, ())} if found else set()
        odd = [kind for kind in look.walk.kinds if type_name(kind) not in types]
        lost: dict[str, str] = {}
        total, chosen = 0, set()
        for size, name, key in sorted(found, key=lambda entry: entry[0]):
            code = codes[name].get(key, GONE)
            unknown = [t for t in odd and types_in(code) if in_every_process(t) not in types]
            total += size
            if unknown:
                lost[path_of(name, key)] = reasons.UNKNOWN.format(unknown[0])
            elif total > self.values.limit:
                lost[path_of(name, key)] = reasons.TOO_LARGE.format(size_text(self.values.limit))
            else:
                chosen.add((name, key))
        values: dict[str, dict[Any, Any]] = {}
        for name in codes:
            keys = [*codes[name], *sorted(base.digests.get(name, {}).keys() - codes[name].keys())]
            table = {key: codes[name].get(key, GONE) for key in keys if (name, key) in chosen}
            if table := {key: code for key, code in table.items() if code != HOLE}:
                values[name] = table
        return values, lost

    def _types(self, look: Look, more: Iterable[Any]) -> set[type]:
        base = self._require_baseline()
        return {*base.types, *(k for k in (*self.values.safe_types, *more) if isinstance(k, type))}

    def _misfits(self, look: Look, late: Collection[str]) -> dict[str, str]:
        """Return the parts that setup did not make, or that are gone."""
        base, anchors = self._require_baseline(), look.anchors
        misfits = misfits_of(anchors, base.members, base.drivers)
        known, shapes = anchors.rules.known, look.shapes()
        for name in shapes:
            before, now = base.shapes.get(name, {}), shapes[name]
            odd = [k for k in {**before, **now} if before.get(k) != now.get(k)]
            if before.get("class") == "":
                continue  # A lazy module gets even its class from the first batch.
            if before and odd:
                each = (f"{k}: {before.get(k, 'none')}, now {now.get(k, 'none')}" for k in odd)
                misfits.setdefault(name, "; ".join(each))
            elif not before and name.partition(".")[0] in anchors.objects:
                misfits.setdefault(name, f"class: none, now {now['class']}")
            part = look.walk.holders[name]
            for key, tensor in vars(part).get("_parameters", {}).items():
                if tensor is not None and id(tensor) not in known:
                    misfits.setdefault(path_of(name, key), f"{key}: none, now parameter")
            if isinstance(part, nn.Module) and id(part) not in known:
                misfits.setdefault(name, "another module than that of setup()")
        now = frozenset((*anchors.objects, *anchors.loose))
        text = " ".join(misfits.values())
        for path in now ^ base.tops:
            shown = as_written(path, anchors.objects)
            if shown not in text:
                misfits.setdefault(shown, "")
        return misfits

    def _omitted(self, look: Look, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return what training changed of networks and their own ``state_dict`` leaves out."""
        omitted: dict[str, Any] = {}
        for path, network in _odd_networks(look.anchors):
            if path not in states:
                continue
            lacked, unknown = lacking_in(network, states[path])
            before = self._require_baseline().pieces.get(path, {})
            values = {
                name: tensor.detach()
                for name, tensor in lacked.items()
                if is_sharded(tensor) or look.mark(tensor.detach()) != before.get(name)
            }
            absent = sorted(name for name in lacked if name not in states[path])
            if values or absent or unknown:
                omitted[path] = {"values": values, "lacked": absent, "unknown": unknown}
        return omitted

    # ---- restore

    def prepare(self, state: dict[str, Any]) -> None:
        """Reorder the parameters of optimizers as they were saved.

        Call it before the owner's own ``load_state_dict``, which loads optimizers by position and
        may assign other tensors to networks.
        """
        look = self._look()
        arrange(look.anchors, state)
        self._registered = [
            (vars(part)[table], key, tensor)
            for module in look.anchors.of_kind(nn.Module).values()
            for _, part, key, tensor in look.anchors.network(module).tensors
            for table in ("_parameters", "_buffers")
            if vars(part)[table].get(key) is tensor
        ]

    def restore(self, state: dict[str, Any], *, is_inference: bool = False) -> None:
        """Restore what :meth:`capture` returned. No part of it is kept.

        Call it on the unchanged result of ``setup``, because unchanged values are not in the state.

        Args:
            state: the state, whose tensors may be on another device.
            is_inference: restore only networks and other objects that exist on both sides, and
                plain values.

        Raises:
            StateError: if the state is of other objects than those found (then nothing is changed),
                or if an object rejects its state.
        """
        self._put_back()
        look = self._look()
        if not (is_inference or self._is_lenient):
            self._check(look, state)
        self._restore_parts(look, state)
        look = self._look()
        anchors = look.anchors
        objects = {**anchors.objects, **anchors.inner}
        unfit: dict[str, str] | None = None
        if is_inference:
            self._warn_of_untrained(anchors.objects, state["objects"])
            unfit = self.unrestored = self._find_unfit(objects, state)
        arrange(anchors, state, unfit)
        states = {**state["objects"], **state["inner"]}
        # Networks first: an object that tracks one may read its weights.
        for path in sorted(objects, key=lambda path: not isinstance(objects[path], nn.Module)):
            part = objects[path]
            if path in states and path not in (unfit or {}):
                with collecting(unfit if isinstance(part, TRAINING_ONLY) else None, path):
                    load_into(path, part, states[path], state["omitted"].get(path))
        self._restore_omitted(anchors, state["omitted"])
        for name, tensor in {**anchors.leaves, **anchors.loose}.items():
            if name in state["parameters"]:
                fill(as_written(name, anchors.objects), tensor, state["parameters"][name])
        live = self._look()
        undeclared = Rules(unsaved=self._unsaved)
        values = {
            name: {
                key: code
                for key, code in table.items()
                if not undeclared.is_declared(path_of(name, key))
                and not (name == "" and key in self._exclude)
            }
            for name, table in state["values"].items()
        }
        if is_inference or self._is_data or self._is_lenient:
            lacking = Build(live.walk, ()).lacking(values)
            values = {name: table for name, table in values.items() if name not in lacking}
        base = self.baseline
        types = live.walk.kinds if base is None else self._types(live, live.walk.kinds)
        others = {} if base is None else {name: refer() for _, refer, name in base.references}
        Build(live.walk, types, others).restore(values)
        self._last = last = self._look()
        if is_inference:
            return
        load_flags(state["flags"], last.anchors)
        load_grads(state["grads"], last.anchors)
        self._oversized.note(state["values"].get("", {}))
        if self.baseline is not None and _TRAINED.knows(self._owner):
            # setup() may have found what that training has left. A new process would not have it.
            for name, table in state["values"].items():
                for key in table:
                    self.baseline.digests.get(name, {}).pop(key, None)
            for path in state["inner"]:
                self.baseline.states.pop(path, None)
            for path, each in state["omitted"].items():
                for name in each["values"]:
                    self.baseline.pieces.get(path, {}).pop(name, None)

    def _put_back(self) -> None:
        """Undo that the owner's own ``load_state_dict`` has assigned other tensors to networks."""
        moved = {id(t) for part in self.optimizers().values() for t in parameters_of(part)}
        for table, key, tensor in self._registered:
            now = table.get(key)
            if (
                now is not None
                and now is not tensor
                and id(now) not in moved
                and id(tensor) in moved
            ):
                tensor.data = now.data
                table[key] = tensor
        self._registered = []

    def _restore_parts(self, look: Look, state: Mapping[str, Any]) -> None:
        """Give networks the parts, and tensors the form, that they had."""
        anchors = look.anchors
        made: dict[str, Tensor] = {}
        for name, (dtype, shape, strides) in state["forms"].items():
            tensor = anchors.find(name)
            if isinstance(tensor, Tensor):
                if (
                    not is_lazy(tensor)
                    and [tensor.dtype, [*tensor.shape], [*tensor.stride()]]
                    != [dtype, shape, strides]
                    and (tensor.dtype == dtype or self.baseline is not None)
                ):
                    tensor.data = torch.empty_strided(
                        shape, strides, dtype=dtype, device=tensor.device
                    )
            else:
                made[name] = torch.empty_strided(shape, strides, dtype=dtype)
        for name, table in state["values"].items():
            module = anchors.find(name)
            if PARTS not in table or not isinstance(module, nn.Module):
                continue
            tables = vars(module)
            for held, place in zip(
                table[PARTS], ("_modules", "_parameters", "_buffers"), strict=True
            ):
                new = {}
                for key, part in held.items():
                    device = next((p.device for p in module.parameters()), "cpu")
                    found = None if part is None else anchors.find(part)
                    new[key] = made[part].to(device) if found is None and part in made else found
                hidden = tables["_non_persistent_buffers_set"] if place == "_buffers" else ()
                kept = {key: tables[place][key] for key in hidden if key in tables[place]}
                tables[place].clear()
                tables[place].update(new | kept)
        anchors.forget_networks()

    def _restore_omitted(self, anchors: Anchors, omitted: Mapping[str, Any]) -> None:
        for path, module in anchors.of_kind(nn.Module, with_inner=True).items():
            values = omitted.get(path, {"values": {}})["values"]
            pieces = pieces_of(anchors.network(module)) if values else {}
            for name, saved in values.items():
                if name not in pieces:
                    raise StateError(
                        f"{path}.{name} was saved separately from the state_dict of {path}, which "
                        "has no such part now. Build it in setup() as it was when the state was "
                        "saved."
                    )
                fill(f"{path}.{name}", pieces[name], saved)

    def _check(self, look: Look, state: Mapping[str, Any]) -> None:
        """Reject a state of other objects before anything is changed."""
        anchors = look.anchors
        for path, part in {**anchors.objects, **anchors.inner}.items():
            if isinstance(part, TRAINING_ONLY):
                _check_kind(path, part, state)
        build = Build(
            look.walk, {*look.walk.kinds, *(self._types(look, ()) if self.baseline else ())}
        )
        rules = Rules(unsaved=self._unsaved)
        present = {*anchors.objects, *anchors.loose}
        saved = {*state["objects"], *state["parameters"]}
        lacking = {
            *build.lacking(state["values"]),
            *(state["inner"].keys() - anchors.inner.keys() - present),
        }
        saved, lacking = (
            {p for p in each if not rules.is_declared(p)} for each in (saved, lacking)
        )
        missing = set() if state["is_partial"] else present - saved
        left_over = (saved - present) | (set() if self._is_data else lacking)
        if missing or left_over:
            shown = [
                ", ".join(sorted(as_written(p, anchors.objects) for p in each)) or "nothing"
                for each in (missing, left_over)
            ]
            raise StateError(
                f"The saved state is not that of this {self._name}. Without saved state: "
                f"{shown[0]}. Saved, but missing now: {shown[1]}. Create all networks, optimizers "
                "and schedulers in setup(), under the names that they had when the state was saved."
            )
        build.check(state["values"])

    def _find_unfit(self, objects: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
        """Return what inference lacks, and what training objects cannot load, with the reason."""
        rules = Rules(unsaved=self._unsaved)
        saved = {**state["objects"], **state["inner"]}
        gone = sorted(path for path in saved.keys() - objects.keys() if not rules.is_declared(path))
        unfit = dict.fromkeys(gone, NOT_BUILT)
        for path, part in objects.items():
            if isinstance(part, TRAINING_ONLY):
                with collecting(unfit, path):
                    _check_kind(path, part, state)
                if path not in {**saved, **state["kinds"]} and not state["is_partial"]:
                    unfit[path] = f"{path} is not in the checkpoint."
        return unfit

    def _warn_of_untrained(self, objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
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


def _odd_networks(anchors: Anchors) -> Iterator[tuple[str, Any]]:
    for path, module in anchors.of_kind(nn.Module, with_inner=True).items():
        network = anchors.network(module)
        if is_odd(network):
            yield path, network


def _mark_of_state(look: Look, part: Any) -> bytes:
    """Return the mark of an object's state; empty if it cannot return one yet."""
    if isinstance(part, Tensor):
        return look.mark(part.detach())
    try:
        return look.mark(state_of(part))
    except Exception:  # user code, which may need a first step
        return b""


def _read_state(path: str, part: Any) -> dict[str, Any]:
    try:
        return state_of(part)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) failed to return its state: {error!r}. Correct its "
            "state_dict()."
        ) from error


def _check_kind(path: str, part: object, state: Mapping[str, Any]) -> None:
    kind = state["kinds"].get(path, _kind_of(part))
    if kind != _kind_of(part):
        raise StateError(
            f"{path} was saved by {kind}, but is {_kind_of(part)} now, which cannot load that "
            "state. Build it in setup() as it was when the state was saved."
        )


def load_into(
    path: str,
    part: Stateful,
    state: dict[str, Any],
    omitted: Mapping[str, Any] | None = None,
    *,
    holder: str = "self",
) -> None:
    """Load the state of an object.

    Args:
        path: its path.
        part: the object.
        state: its state.
        omitted: see :func:`load_state`.
        holder: what weights are loaded into, in code: the owner, or the object itself.

    Raises:
        StateError: if ``load_state_dict`` fails.
    """
    try:
        load_state(part, state, omitted)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) rejected its saved state: {error} Build it in setup() "
            f"as it was when the state was saved.{_describe_replacement(path, part, state, holder)}"
        ) from error


def _describe_replacement(path: str, part: Stateful, state: Mapping[str, Any], holder: str) -> str:
    """Return how to replace the layers whose sizes differ, for fine-tuning; empty for others."""
    if not isinstance(part, nn.Module):
        return ""
    sizes = {name: each.shape for name, each in state_of(part).items() if isinstance(each, Tensor)}
    differing = [
        name
        for name, saved in state.items()
        if isinstance(saved, Tensor) and sizes.get(name, saved.shape) != saved.shape
    ]
    bare = BareNames(part)
    found = {bare.of(name): layer for name, layer in part.named_modules(remove_duplicate=False)}
    codes: dict[str, str] = {}
    for name in differing:
        layer = name.rpartition(".")[0]
        code = _code_of(found[layer])
        # The rest of a larger network stays.
        codes |= {layer: code} if code else {name: _code_of_tensor(part, name, sizes[name])}
    if not 0 < len(codes) <= _MAX_LAYERS:
        return ""
    attribute, *keys = path.split(".")
    names = [key if key.isdigit() else f'"{key}"' for key in keys]
    whole = f"{holder}.{attribute}" if holder == "self" else holder
    whole += "".join(f"[{name}]" for name in names)
    lines = []
    for name, code in sorted(codes.items()):
        keys = name.split(".") if name else []
        place = "".join(
            f".{key}" if key.isidentifier() else f"[{key if key.isdigit() else repr(key)}]"
            for key in keys
        )
        lines.append(f"{whole}{place} = {code}")
    return (
        " To fine-tune with other sizes, in a run with another save_name, build it as it was, load "
        f"first, and replace the layer then: helios.load_weights(path, {holder}); "
        f"{'; '.join(lines)}. Create optimizers after that."
    )


def _code_of(layer: nn.Module) -> str:
    """Return code that builds a layer like this; empty for what holds others."""
    kind = type(layer).__name__
    if [*layer.children()] or isinstance(layer, nn.ParameterList | nn.ParameterDict):
        return ""
    if getattr(nn, kind, None) is not type(layer):
        return f"{kind}(...)"
    quoted = re.sub(r"=([a-z]\w*)", r'="\1"', repr(layer))
    return f"torch.nn.{quoted}"


def _code_of_tensor(part: nn.Module, name: str, size: Size) -> str:
    zeros = f"torch.zeros{tuple(size)}"
    is_parameter = name in dict(part.named_parameters(remove_duplicate=False))
    return f"torch.nn.Parameter({zeros})" if is_parameter else zeros


def _kind_of(part: object) -> str:
    return type(unwrap(part)).__name__
