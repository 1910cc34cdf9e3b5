"""Finds, captures and restores the state of one owner, such as the model or a plugin.

Anchors are always saved, by their own ``state_dict``. A value is saved if its digest differs from
that after ``setup``; changes that cannot be saved are reported.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.memory import storage_of
from helios.core.plain_values import qualified_name
from helios.core.sharded_tensors import is_sharded
from helios.core.utils import as_names, collector_at_rest
from helios.errors import UsageError
from helios.state.anchors import Anchors, Outside, References, Rules, above, leads_to, path_of
from helios.state.digests import Identities, digest_of
from helios.state.named import Marks, classes_of, lost_since, marks_of, report
from helios.state.networks import flags_of, grads_of, pieces_of, size_of, state_of
from helios.state.optimizers import (
    TABLES,
    built_differently,
    complete,
    drivers_of,
    members_of,
    misfits_of,
)
from helios.state.restoring import Links, Restoring, links_in, made_by_loading, names_in, types_in
from helios.state.steps import StepWatch
from helios.state.values import ATOMS, LIMIT, PLAIN, SMALL, large_members, parts_of
from helios.state.walk import GONE, LATE, Form, Snapshot, kind_of
from helios.storage.codes import HOLE, Codes
from helios.storage.type_converters import in_every_process
from helios.text import size_text

UNKNOWN = (
    "setup() creates no {}, so that loading cannot know the type: create one in setup(), or return "
    "the type from types_for_safe_load()"
)
TOO_LARGE = (
    "plain values are saved up to a total of {}: register large tensors as buffers of a network, "
    "give their owner state_dict() and load_state_dict(), or raise "
    "CheckpointStore(max_plain_bytes=...)"
)
MISFIT = (
    "{}added, removed or changed in structure after setup(), and a resume from this state fails: "
    "create it in setup()"
)
GROWN = (
    f"an attribute of a data set that has changed and grown beyond {size_text(SMALL)}: keep it in "
    "the data module, or declare it in the class of the data set: unsaved = (...,)"
)


@dataclass
class Baseline:
    """The results of setup.

    Attributes:
        digests: of values, by holder and key.
        marks: of what no checkpoint can hold, by name.
        references: the anchors, as far as they are still alive.
        tops: paths of the objects in attributes, and of loose parameters.
        inner: paths of objects that only other objects hold.
        kinds: classes of objects and modules by name, and which names are parameters.
        forms: types, shapes and strides of tensors, by name.
        members: the names of the parameters of optimizers.
        drivers: the optimizers of schedulers.
        pieces: marks of the tensors of networks whose ``state_dict`` is the user's.
        types: classes that a resume may build.
        classes: classes of the user, whose attributes are compared.
        links: codes of what refers to others by name.
    """

    digests: dict[str, dict[Any, Any]]
    marks: Marks
    references: References
    tops: frozenset[str]
    inner: frozenset[str]
    kinds: dict[str, str]
    forms: dict[str, Form]
    members: dict[str, Any]
    drivers: dict[str, str]
    pieces: dict[str, dict[str, bytes]]
    types: set[type]
    classes: list[type]
    links: Links

    def known(self) -> dict[int, str]:
        """Return the names of the anchors of setup that are still alive, by id."""
        return {number: name for number, refer, name in self.references if refer() is not None}

    def mark_as_changed(self, state: Mapping[str, Any]) -> None:
        """Treat restored values as changed, since the next checkpoint needs them too."""
        for name, table in state["values"].items():
            for key in table:
                self.digests.setdefault(name, {})[key] = None
        for path, each in state["omitted"].items():
            for name in each:
                self.pieces.get(path, {}).pop(name, None)


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
        is_data: whether only generators and small plain values count, as in a data set, whose other
            attributes are data, caches and open files.

    Attributes:
        limit: maximum bytes of values in a state.
        safe_types: types that loading may build besides those of the values that setup made.
        baseline: the results of the last setup; ``None`` before the first.
        unrestored: what the last restore for inference has skipped, with the reason, by path.
    """

    def __init__(
        self,
        owner: object,
        *,
        exclude: frozenset[str] = frozenset(),
        unsaved: Iterable[str] = (),
        name: str = "model",
        outside: Callable[[], Outside] = Outside,
        is_strict: bool = True,
        is_data: bool = False,
    ) -> None:
        self._owner, self._exclude, self._unsaved = owner, exclude, frozenset(as_names(unsaved))
        self._name, self._outside = name, outside
        self._is_strict, self._is_data = is_strict, is_data
        self._identities = Identities()
        self.limit = LIMIT
        self.safe_types: tuple[Any, ...] = ()
        self.baseline: Baseline | None = None
        self.unrestored: dict[str, str] = {}
        self._unlinked: dict[str, str] = {}
        self._named: set[str] = set()
        self._saved_members: set[str] = set()
        self._last: Snapshot | None = None
        self._prepared: Restoring | None = None
        self._checked: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only valid in this process: the baseline compares by identity."""
        return vars(self) | {"_identities": Identities(), "baseline": None, "_last": None}

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
        last = self._last
        anchors = Anchors(self._owner, self._rules()) if last is None else last.anchors
        return {name: part for name, part in {**anchors.shared, **anchors.parts}.items() if name}

    def look_at_values(self) -> None:
        """Find the values of the owner, for :meth:`pop_values`."""
        self._last = self._look()

    def pop_values(self) -> Mapping[str, Any]:
        """Return the values that the last call has found, by name, for other owners."""
        last, self._last = self._last, None
        return {} if last is None else last.walk.parts

    def watch(self, *, reads_weights: bool = True, sees_unsaved: bool = False) -> StepWatch:
        """Begin to watch changes of a step; in attributes declared as unsaved only if asked."""
        look = partial(self._look, unsaved=frozenset()) if sees_unsaved else self._look
        classes = [] if self.baseline is None else self.baseline.classes
        return StepWatch(look, reads_weights=reads_weights, classes=classes)

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
            is_strict=self._is_strict,
        )

    def _look(self, unsaved: frozenset[str] | None = None, lost: Iterable[str] = ()) -> Snapshot:
        rules = replace(self._rules(unsaved), lost=frozenset(lost))
        return Snapshot(self._owner, rules, self._identities)

    # ---- setup and start

    @collector_at_rest()
    def take_baseline(self) -> None:
        """Record the results of setup; call it right after setup."""
        self._named.clear()
        self.baseline, self.unrestored = None, {}
        now = self._look()
        if complete(now.anchors.of_kind(Optimizer, with_inner=True).values()):
            # Their attributes are others now.
            now = self._look()
        anchors = now.anchors
        classes = classes_of(self._owner, now)
        self.baseline = Baseline(
            digests={
                name: {key: digest for key, (digest, _) in table.items()}
                for name, table in now.digests().items()
            },
            marks=marks_of(now, classes),
            references=anchors.references(),
            tops=frozenset((*anchors.objects, *anchors.loose)),
            inner=frozenset(anchors.inner),
            kinds=now.kinds(),
            forms=now.forms(),
            members=members_of(anchors),
            drivers=drivers_of(anchors),
            pieces={
                path: {name: now.mark(tensor.detach()) for name, tensor in pieces_of(net).items()}
                for path, net in now.odd_networks()
            },
            types={*now.walk.kinds},
            classes=classes,
            links=links_in(now.walk.codes),
        )
        self._last = now

    def begin_training(self) -> None:
        """Forget changes of the start events that no checkpoint can hold: every start repeats them.

        Changes that a checkpoint can hold are still saved.
        """
        base = self._require_baseline()
        self._last = now = self._look()
        base.classes = classes_of(self._owner, now)
        base.marks = marks_of(now, base.classes)
        for name, table in now.walk.codes.items():
            for key, code in table.items():
                if code == HOLE:
                    base.digests.setdefault(name, {})[key] = digest_of(HOLE)[0]

    def note_named(self, places: Iterable[str]) -> None:
        """Treat paths as already reported to the user in this start."""
        places = set(places)
        self._named |= places
        self._saved_members |= {place.partition(".")[0] for place in places}

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
            ``members``, ``built``, ``drivers``: optimizers by the names of their parameters;
            ``omitted``: what the states of networks lack; ``parameters``: those in no network;
            ``flags``: frozen parameters and submodules in evaluation mode, by network; ``grads``:
            gradients of an open window; ``forms``: types and shapes of tensors that differ from
            setup; ``values``: codes of changed values by holder and key; ``missing``: what training
            changed and this state lacks, with the reason, by path; ``misfits``: what a resume
            cannot rebuild; ``is_partial``: whether objects may be absent. Before
            :meth:`take_baseline` there are no values; ``{}`` if nothing else is there.
        """
        if self.baseline is None:
            unchanged = copy.copy(self)
            vars(unchanged)["_named"] = set()
            unchanged.take_baseline()
            state = unchanged.capture()
            return state if state["objects"] or state["parameters"] else {}
        base, now = self.baseline, self._look()
        anchors = now.anchors
        objects = {p: state_of(o) for p, o in anchors.objects.items()}
        inner = {p: state_of(o) for p, o in anchors.inner.items() if p in base.inner}
        states = objects | inner
        covers = coverages(now.objects, states, own, now.mark_of_content)
        values, lost = self._changed_values(now, covers)
        while not lost.keys() <= now.anchors.rules.lost:
            # What else refers to their members is saved on its own.
            now = self._look(lost=lost)
            values, more = self._changed_values(now, covers)
            lost = dict(sorted((lost | more).items()))
        self._last = now
        lost |= self._unlinked
        misfits = self._misfits(now) if self._is_strict else {}
        stray = (anchors.loose.keys() - base.tops) | (anchors.inner.keys() - base.inner)
        stray = set() if self._is_strict else stray
        lost |= dict.fromkeys(sorted(stray), LATE)
        if self._is_data:
            grown = self._saved_members & (large_members(self._owner) - self._unsaved)
            lost |= dict.fromkeys(sorted(grown), GROWN)
            self._saved_members |= values.get("", {}).keys()
        else:
            named = lost_since(base.marks, marks_of(now, base.classes))
            lost |= {path: why for path, why in named.items() if not _is_covered(path, now, covers)}
        lost |= {p: MISFIT.format(t and f"{t}: ") for p, t in misfits.items()}
        report(self._name, lost, self._named)
        members = members_of(anchors)
        return {
            "objects": objects,
            "inner": inner,
            "kinds": {path: kind_of(part) for path, part in anchors.objects.items()},
            "members": members,
            "built": built_differently(base.members, members),
            "drivers": drivers_of(anchors),
            "omitted": self._omitted(now, states),
            "parameters": {n: p.detach() for n, p in anchors.loose.items() if n not in stray},
            "flags": flags_of(anchors),
            "grads": grads_of(anchors),
            "forms": {n: form for n, form in now.forms().items() if form != base.forms.get(n)},
            "values": values,
            "missing": lost,
            "misfits": misfits if own is None else {},
            "is_partial": own is not None or not self._is_strict,
        }

    def _changed_values(
        self, now: Snapshot, covers: Mapping[str, Coverage]
    ) -> tuple[Codes, dict[str, str]]:
        """Return the codes of changed values, and what is too large or of an unknown class."""
        codes, base = now.walk.codes, self._require_baseline()
        changed = self._find_changes(now)
        covered = self._find_covered(now, covers, [place for _, place in changed])
        known = (kind for kind in (*base.types, *self.safe_types) if isinstance(kind, type))
        types = set(map(qualified_name, known))
        odd = [kind for kind in now.walk.kinds if qualified_name(kind) not in types]
        lost: dict[str, str] = {}
        total, chosen = 0, set[tuple[str, Any]]()
        for size, (name, key) in sorted(changed, key=lambda entry: entry[0]):
            if (name, key) in covered:
                continue
            named = types_in(codes.get(name, {}).get(key)) if odd else ()
            unknown = sorted(each for each in named if in_every_process(each) not in types)
            total += size
            if unknown:
                lost[path_of(name, key)] = UNKNOWN.format(unknown[0])
            elif total > self.limit:
                lost[path_of(name, key)] = TOO_LARGE.format(size_text(self.limit))
            else:
                chosen.add((name, key))
        values: dict[str, dict[Any, Any]] = {}
        for name, table in codes.items():
            keys = [*table, *sorted(base.digests.get(name, {}).keys() - table.keys())]
            kept = {key: table.get(key, GONE) for key in keys if (name, key) in chosen}
            if saved := {key: code for key, code in kept.items() if code != HOLE}:
                values[name] = saved
        paths = {path_of(name, key) for name, table in values.items() for key in table}
        tensors = [
            each
            for path, held in now.walk.tensors.items()
            if not paths.isdisjoint((path, *above(path)))
            for each in held
        ]
        return Codes(values, tensors), dict(sorted(lost.items()))

    def _find_changes(self, now: Snapshot) -> list[tuple[int, tuple[str, Any]]]:
        """Return the sizes of the values that training has changed, with holder and key."""
        base = self._require_baseline()
        changed: list[tuple[int, tuple[str, Any]]] = []
        for name, table in now.digests().items():
            known = base.digests.get(name, {})
            # The state of an optimizer does not count as plain values, however it is saved.
            for key, (digest, size) in table.items():
                if known.get(key) != digest:
                    is_free = key in TABLES and isinstance(now.walk.holders.get(name), Optimizer)
                    changed.append((0 if is_free else size, (name, key)))
            if not known.keys() <= table.keys():
                # What no longer counts is still there: a member of a data set that has grown.
                gone = known.keys() - table.keys() - now.attributes_of(name).keys()
                changed += [(0, (name, key)) for key in gone]
        return changed

    def _find_covered(
        self, now: Snapshot, covers: Mapping[str, Coverage], changed: Iterable[tuple[str, Any]]
    ) -> set[tuple[str, Any]]:
        """Return which values the states of their holders have already, by holder and key."""
        base, codes = self._require_baseline(), now.walk.codes
        covered = {
            (name, key)
            for name, key in changed
            if name in covers
            and covers[name].has(key, now.attributes_of(name))
            # A copy cannot tell what it has, or had after setup, in common with others.
            and not names_in(codes.get(name, {}).get(key))
            and key not in base.links.get(name, ())
        }
        if covered:
            left = (place for place in changed if place not in covered)
            wanted = {each for name, key in left for each in names_in(codes.get(name, {}).get(key))}
            # What others refer to by name is made again under that name.
            covered -= {place for place in covered if leads_to(path_of(*place), wanted)}
        return covered

    def _misfits(self, now: Snapshot) -> dict[str, str]:
        """Return what no resume can rebuild, by path, with what differs from setup."""
        base, anchors = self._require_baseline(), now.anchors
        misfits = misfits_of(anchors, base.members, base.drivers)
        before, kinds = base.kinds, now.kinds()
        changed = {**before, **kinds} if before != kinds else ()
        for name in sorted(changed):
            was, found = before.get(name, "nothing"), kinds.get(name, "nothing")
            if was and found and was != found and not any(map(misfits.__contains__, above(name))):
                misfits.setdefault(name, f"{was} after setup, {found} now")
        shown = " ".join(misfits.values())
        for path in base.tops ^ frozenset((*anchors.objects, *anchors.loose)):
            if path not in shown:
                misfits.setdefault(path, "")
        return misfits

    def _omitted(self, now: Snapshot, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return what training changed of networks whose ``state_dict`` may leave it out."""
        omitted: dict[str, Any] = {}
        for path, network in now.odd_networks():
            before = self._require_baseline().pieces.get(path, {})
            values = {
                name: tensor.detach()
                for name, tensor in pieces_of(network).items()
                if (
                    name not in states.get(path, {})
                    if is_sharded(tensor)
                    else now.mark(tensor.detach()) != before.get(name)
                )
            }
            if values and path in states:
                omitted[path] = values
        return omitted

    # ---- restore

    def prepare(self, state: dict[str, Any]) -> None:
        """Reorder the parameters of optimizers as they were saved, and note where tensors are.

        Call it before the owner's own ``load_state_dict``, which loads optimizers by position and
        may assign other tensors to networks.
        """
        self._prepared = self._restoring()
        self._prepared.prepare(state)

    def check(
        self, state: Mapping[str, Any], later: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Check that a state fits, before anything is changed; :meth:`restore` need not, then.

        Args:
            state: what :meth:`capture` returned.
            later: what does not exist before other owners are restored, by name.

        Returns:
            What does not exist before this state is restored, by name.

        Raises:
            StateError: naming what does not fit.
        """
        self._last = self._restoring().check(state, later)
        self._checked = state
        return made_by_loading(state)

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
        if not is_inference and self._checked is not state:
            self.check(state)
        self._checked = None
        restoring, self._prepared = self._prepared or self._restoring(), None
        self._last = restoring.run(state, is_inference=is_inference)
        self.unrestored, self._unlinked = restoring.unrestored, restoring.unlinked
        if is_inference or self.baseline is None:
            return
        self._saved_members |= state["values"].get("", {}).keys()
        # After a training in this process, setup() may have found what that has left. A new process
        # would not have it.
        self.baseline.mark_as_changed(state)

    def _restoring(self) -> Restoring:
        base = self.baseline
        return Restoring(
            self._look,
            name=self._name,
            rules=Rules(self._exclude, self._unsaved),
            types=[*(() if base is None else base.types), *self.safe_types],
            of_setup={} if base is None else {name: refer() for _, refer, name in base.references},
            links=None if base is None else base.links,
            is_data=self._is_data,
        )


def _is_covered(path: str, now: Snapshot, covers: Mapping[str, Coverage]) -> bool:
    """Return whether the state of an object holds the attribute that a path leads into."""
    for name in ("", *above(path)):
        key = path[len(name) :].lstrip(".").partition(".")[0]
        if name in covers and covers[name].has(key, now.attributes_of(name)):
            return True
    return False


# ---- what a ``state_dict`` of a user holds already

_EXTRA = "_extra_state"


@final
class Coverage:
    """The content of a state: the objects in it, and copies of attributes under the same key.

    Args:
        state: what ``state_dict`` returned.
        mark: returns marks that are equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._state, self._mark = state, mark

    def has(self, key: Any, attributes: Mapping[Any, Any]) -> bool:
        """Return whether the state holds the value of an attribute, or an equal one.

        Args:
            key: the attribute.
            attributes: all attributes of the object.
        """
        value: Any = attributes.get(key)
        table = self._state if isinstance(self._state, dict) else {}
        # An equal value under another key, or that of another attribute, may be a coincidence.
        public = key.lstrip("_") if isinstance(key, str) else key
        names = {key} if public in attributes else {key, public}
        known = [table[name] for name in names if name in table]
        if type(value) in ATOMS:
            return any(each is value for each in known)
        home = storage_of(value) if isinstance(value, Tensor) else 0
        if id(value) in self._ids or (home and size_of(value) <= self._sizes[home]):
            return True
        return any(self._mark(each) == self._mark(value) for each in known)

    @cached_property
    def _ids(self) -> set[int]:
        return {id(part) for part in parts_of(self._state)}

    @cached_property
    def _sizes(self) -> Counter[int]:
        # A slice does not contain the whole tensor that it was taken from.
        sizes = Counter[int]()
        for part in parts_of(self._state):
            if isinstance(part, Tensor):
                sizes[storage_of(part)] += size_of(part)
        return sizes


def coverages(
    objects: Mapping[str, Any],
    states: Mapping[str, dict[str, Any]],
    own: dict[str, Any] | None,
    mark: Callable[[Any], bytes],
) -> dict[str, Coverage]:
    """Return what the states of objects hold, by the path of the object or module.

    Args:
        objects: the objects, by path.
        states: what their ``state_dict`` returned; of networks, only extra states count.
        own: what the owner's own ``state_dict`` returned; ``None`` for an owner without one.
        mark: returns marks that are equal for equal values.
    """
    found = {} if own is None else {"": Coverage(own, mark)}
    for path, state in states.items():
        if not isinstance(objects[path], nn.Module):
            found[path] = Coverage(state, mark)
            continue
        for name in state:
            if name.endswith(_EXTRA):
                place = f"{path}.{name.removesuffix(_EXTRA)}".rstrip(".")
                found[place] = Coverage(state[name], mark)
    return found
