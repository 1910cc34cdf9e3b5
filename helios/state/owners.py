"""The state of all owners besides the model: plugins, data module, data sets, loops, engine.

Each owner is searched like the model. Its own ``state_dict`` is saved; other attributes that
training has changed are saved here, or reported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from helios.state.anchors import Outside
from helios.state.discovery import Discovery
from helios.state.steps import StepWatch

_LOGGER = logging.getLogger(__name__)


def internals_of(owner: object) -> frozenset[str]:
    """Return the attributes that Helios' own classes declare as internal."""
    declared = (vars(base).get("_internals", "") for base in type(owner).__mro__)
    return frozenset(" ".join(declared).split())


@dataclass(frozen=True)
class Owner:
    """Something that may hold state.

    Attributes:
        name: its name in messages and checkpoints, e.g. ``plugin 'ema'``.
        part: the object.
        unsaved: names of attributes that the user has declared as not to be saved.
        has_own_state: whether it has a ``state_dict`` of its own.
        is_model: whether it is the model, whose objects the others refer to by name.
        is_data: whether it is a data set or a collate function, of which only small plain values
            and generators count.
    """

    name: str
    part: object
    unsaved: Iterable[str] = ()
    has_own_state: bool = False
    is_model: bool = False
    is_data: bool = False


@final
class Owners:
    """Captures and restores the state of the owners of a run.

    Args:
        owners: all of them, with different names.
        outside: returns the objects that the model saves, by name.
        safe_types: types that loading may build besides those of the values that setup made.

    Attributes:
        unrestored: what a restore for inference has skipped, with the reason, by path.
    """

    def __init__(
        self,
        owners: Iterable[Owner] = (),
        outside: Callable[[], Mapping[str, object]] = dict,
        *,
        safe_types: Sequence[Any] = (),
    ) -> None:
        # The model first: what it shares with others has the name that it has there.
        ordered = sorted(owners, key=lambda owner: not owner.is_model)
        self._owners = {owner.name: owner for owner in ordered}
        self._find_outside = outside
        self._outside: Outside | None = None
        self._carried: dict[str, dict[str, Any]] = {}
        self.unrestored: dict[str, str] = {}
        self._found = {
            owner.name: Discovery(
                owner.part,
                exclude=internals_of(owner.part),
                unsaved=owner.unsaved,
                name=owner.name,
                outside=Outside if owner.is_model else self._others,
                is_strict=False,
                is_data=owner.is_data,
            )
            for owner in self._owners.values()
        }

        for found in self._found.values():
            found.safe_types = tuple(safe_types)

    @property
    def parts(self) -> dict[str, object]:
        """The objects by name, without data sets."""
        return {name: owner.part for name, owner in self._owners.items() if not owner.is_data}

    def limit(self, num_bytes: int) -> None:
        """Limit the bytes of plain values that each owner may have in a checkpoint."""
        for found in self._found.values():
            found.limit = num_bytes

    def _others(self) -> Outside:
        # Computed once for all owners, because walking a large model is slow.
        if self._outside is None:
            parts = {f"<{name}>": owner.part for name, owner in self._owners.items()}
            self._outside = Outside({**self._find_outside(), **parts})
        return self._outside

    def _each(self) -> Iterator[tuple[str, Discovery]]:
        """Go over the owners once; what several of them hold belongs to the first."""
        self._outside = None
        try:
            for name, found in self._found.items():
                yield name, found
                values = found.pop_values()
                self._others().add({f"<{name}>.{path}": part for path, part in values.items()})
        finally:
            # Values are not kept alive any longer.
            self._outside = None

    def take_baseline(self) -> None:
        """Record the state of the owners right after setup."""
        for _, found in self._each():
            found.take_baseline()

    def begin_training(self) -> None:
        """Forget changes of start events that no checkpoint can hold: every start repeats them."""
        for _, found in self._each():
            found.begin_training()

    def note_named(self, places: Iterable[str]) -> None:
        """Treat paths, as named by :meth:`capture`, as already reported to the user."""
        for name, found in self._found.items():
            begin = f"{name}: "
            found.note_named(p.removeprefix(begin) for p in places if p.startswith(begin))

    def capture(
        self, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the state that training has changed.

        Args:
            own: by name, the results of ``state_dict``, for owners that have one.

        Returns:
            The states of the owners that have any, by name, and the changes that they lack, with
            the reason, by path.
        """
        states = dict(self._carried)
        missing: dict[str, str] = {}
        for name, found in self._each():
            has_own = self._owners[name].has_own_state
            state = found.capture(own.get(name, {}) if has_own else None)
            missing |= {f"{name}: {path}": text for path, text in state.pop("missing").items()}
            if is_any(state):
                states[name] = state
        return states, missing

    def capture_one(self, name: str) -> dict[str, dict[str, Any]]:
        """Return a copy of what training has changed of one owner, as :meth:`capture` does."""
        self._outside = None
        state = self._found[name].capture()
        return {name: copy.deepcopy(state)} if is_any(state) else {}

    def prepare(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Prepare for the ``load_state_dict`` of owners; see :meth:`Discovery.prepare`."""
        for name, found in self._each():
            if name in states:
                found.prepare(states[name])

    def check(self, states: Mapping[str, dict[str, Any]], made: Mapping[str, Any]) -> None:
        """Check that states fit, before anything is changed.

        Args:
            states: what :meth:`capture` returned.
            made: what does not exist before the model is restored, by its name there.

        Raises:
            StateError: naming what does not fit.
        """
        later = {f"<model>/{name}": part for name, part in made.items()}
        for name, found in self._each():
            if name in states:
                found.check(states[name], later)
            else:
                found.look_at_values()

    def restore(self, states: Mapping[str, dict[str, Any]], *, is_inference: bool = False) -> None:
        """Restore what :meth:`capture` returned; in training, keep the state of missing owners."""
        for name, found in self._each():
            if name in states:
                found.restore(states[name], is_inference=is_inference)
            else:
                found.look_at_values()
            self.unrestored |= {f"{name}: {p}": text for p, text in found.unrestored.items()}
        gone = [name for name in states if name not in self._found]
        if not is_inference:
            # Their tensors may be mapped from the file.
            self._carried |= {name: copy.deepcopy(states[name]) for name in gone}
        if self._carried:
            _LOGGER.warning(
                "The checkpoint holds attributes of %s, which this run does not have. Later "
                "checkpoints keep them unchanged.",
                ", ".join(self._carried),
            )

    def watch(
        self, *, sees_unsaved: bool = False, sees_data: bool = False
    ) -> list[tuple[str, StepWatch]]:
        """Begin to watch a step of all owners; of data sets, which fetching changes, if asked."""
        self._outside = None
        return [
            (name, found.watch(reads_weights=False, sees_unsaved=sees_unsaved))
            for name, found in self._found.items()
            if (sees_data or not self._owners[name].is_data)
        ]

    def has_own_state(self, name: str) -> bool:
        """Return whether an owner has a ``state_dict`` that user code defines."""
        owner = self._owners.get(name)
        if owner is None or not owner.has_own_state:
            return False
        return not type(owner.part).state_dict.__module__.startswith("helios.")  # type: ignore[attr-defined]


@final
class OwnStates:
    """Saves and restores what the ``state_dict`` of plugins, or of loops, returns.

    Args:
        find: returns those with a state, by name.
        gone: two phrases for the warning: what is missing, and how to restore it.
        carries: whether the state of one that is missing is saved again, unread; outside of
            training it is passed over.
    """

    def __init__(
        self, find: Callable[[], Mapping[str, Any]], gone: tuple[str, str], *, carries: bool
    ) -> None:
        self._find, self._gone, self._carries = find, gone, carries
        self._carried: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        """Return the states by name."""
        return self._carried | {name: part.state_dict() for name, part in self._find().items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states."""
        for name, state in states.items():
            # One that is loaded may connect others.
            part = self._find().get(name)
            if part is not None:
                part.load_state_dict(state)
            elif state and self._carries:
                self._carried[name] = state
        if self._carried:
            what, remedy = self._gone
            _LOGGER.warning(
                "The checkpoint holds the state of a %s: %s. It is kept unread in later "
                "checkpoints; %s again to use it.",
                what,
                ", ".join(self._carried),
                remedy,
            )


def is_any(state: Mapping[str, Any]) -> bool:
    """Return whether a captured state contains anything."""
    parts = [state[name] for name in _TELLING]
    # Flags include frozen networks and networks in evaluation mode.
    return any(parts) or any(state["flags"])


_TELLING = ("values", "objects", "inner", "omitted", "parameters", "grads", "members", "forms")
