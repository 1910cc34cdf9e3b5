"""All owners of state beside the model: plugins, the data module, data sets, loops, the engine.

Each is looked through as the model is. What its own ``state_dict`` holds is saved by that; what it
leaves out and training has changed is saved here, or named.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from helios.protocols import Meter
from helios.run_state.discovery import Discovery
from helios.run_state.plain_values import Identities
from helios.run_state.step_effects import StepWatch
from helios.run_state.value_scan import mark_of_state

_LOGGER = logging.getLogger(__name__)


def internals_of(owner: object) -> frozenset[str]:
    """Return the attributes that Helios' own classes declare as theirs."""
    declared = (vars(base).get("_internals", "") for base in type(owner).__mro__)
    return frozenset(" ".join(declared).split())


@dataclass(frozen=True)
class Owner:
    """Something that may hold state.

    Attributes:
        name: what messages and checkpoints call it, e.g. ``plugin 'ema'``.
        part: the object.
        unsaved: names that the user has declared as not to be saved.
        has_own_state: whether it has a ``state_dict`` of its own.
        is_model: whether it is the model, whose objects the others name.
        is_data: whether it is a data set or a collate function, of which only small plain values
            and generators are looked at.
    """

    name: str
    part: object
    unsaved: tuple[str, ...] = ()
    has_own_state: bool = False
    is_model: bool = False
    is_data: bool = False


@final
class Owners:
    """Captures and restores what the owners of a run hold.

    Args:
        owners: all of them; their names differ.
        outside: returns the objects that the model saves, by name.
        safe_types: types that loading may build besides those of the values that setup made.
    """

    def __init__(
        self,
        owners: Iterable[Owner],
        outside: Callable[[], Mapping[str, object]] = dict,
        *,
        safe_types: Sequence[Any] = (),
    ) -> None:
        self._owners = {owner.name: owner for owner in owners}
        self._outside = outside
        self._shared: Mapping[str, object] | None = None
        self._carried: dict[str, dict[str, Any]] = {}
        self._found = {
            owner.name: Discovery(
                owner.part,
                exclude=internals_of(owner.part),
                unsaved=owner.unsaved,
                name=owner.name,
                outside=dict if owner.is_model else self._others,
                is_strict=False,
                is_data=owner.is_data,
            )
            for owner in self._owners.values()
        }

        for found in self._found.values():
            found.values.safe_types = tuple(safe_types)

    def limit(self, num_bytes: int) -> None:
        """Let each owner have at most some bytes of plain values in a checkpoint."""
        for found in self._found.values():
            found.values.limit = num_bytes

    def _others(self) -> Mapping[str, object]:
        # Found once for all owners: a walk through a large model takes its time.
        if self._shared is None:
            parts = {f"<{name}>": owner.part for name, owner in self._owners.items()}
            self._shared = {**self._outside(), **parts}
        return self._shared

    def take_baseline(self) -> None:
        """Remember what the owners hold right after setup."""
        self._shared = None
        for name, found in self._found.items():
            found.take_baseline(states_too=self._owners[name].has_own_state)

    def begin_training(self) -> None:
        """Forget what start events have changed and no checkpoint can hold: every start does so."""
        self._shared = None
        for found in self._found.values():
            found.begin_training()

    @property
    def meters(self) -> dict[int, Meter]:
        """What counts how long values of the last capture take to be encoded, by address."""
        tables = [found.values.meters for found in self._found.values()]
        return {address: meter for table in tables for address, meter in table.items()}

    def too_slow(self) -> dict[str, dict[str, float]]:
        """Return what takes too long to be saved, and how many seconds, by owner and place."""
        return {name: found.values.costs.too_slow() for name, found in self._found.items()}

    def agree_on_costs(self, left_out: Mapping[str, Mapping[str, float]]) -> None:
        """Leave places out of the next capture, by owner, as all processes of the run do."""
        for name, found in self._found.items():
            found.values.costs.agree(left_out.get(name, {}))

    def note_named(self, places: Iterable[str]) -> None:
        """Take places, under the names that :meth:`capture` gives them, as named to the user."""
        for name, found in self._found.items():
            begin = f"{name}: "
            found.note_named(p.removeprefix(begin) for p in places if p.startswith(begin))

    def capture(
        self, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return what training has changed.

        Args:
            own: what the ``state_dict`` of owners returned that have one, by name.

        Returns:
            The states of the owners that have any, by name; and what they lack, with the reason,
            by place.
        """
        self._shared = None
        states = dict(self._carried)
        missing: dict[str, str] = {}
        for name, found in self._found.items():
            has_own = self._owners[name].has_own_state
            state = found.capture(own.get(name, {}) if has_own else None)
            missing |= {f"{name}: {path}": text for path, text in state.pop("missing").items()}
            if is_any(state):
                states[name] = state
        return states, missing

    def prepare(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Make ready for the ``load_state_dict`` of owners: see :meth:`Discovery.prepare`."""
        self._shared = None
        for name in states.keys() & self._found.keys():
            self._found[name].prepare(states[name])

    def restore(self, states: Mapping[str, dict[str, Any]], *, is_inference: bool = False) -> None:
        """Put back what :meth:`capture` returned; in a training, keep that of who is gone."""
        self._shared = None
        for name, state in states.items():
            if name in self._found:
                self._found[name].restore(state, is_inference=is_inference)
            elif not is_inference:
                # Its tensors may lie in the file.
                self._carried[name] = copy.deepcopy(state)
        if self._carried:
            _LOGGER.warning(
                "The checkpoint holds attributes of %s, which is not there now. They are carried "
                "along unread; register it again to use them.",
                ", ".join(self._carried),
            )

    def watch(self) -> list[tuple[str, StepWatch]]:
        """Begin to look for what a step changes; data sets may move with what is fetched."""
        self._shared = None
        return [
            (name, found.watch(reads_weights=False))
            for name, found in self._found.items()
            if not self._owners[name].is_data and found.has_attributes
        ]

    def marks(self, states: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
        """Return what is equal for equal states, by name."""
        return {name: mark_of_state(state, Identities()) for name, state in states.items()}


def is_any(state: Mapping[str, Any]) -> bool:
    """Return whether a captured state holds anything."""
    values, aliases = state["values"], state["aliases"]
    parts = (values["changed"], values["deleted"], aliases["set"], aliases["deleted"])
    # Networks are frozen and set to evaluation mode, too.
    return any(parts) or any(state[name] for name in _TELLING) or any(state["flags"])


_TELLING = (
    *("objects", "inner", "omitted", "generators", "orders", "parameters", "grads"),
    *("members", "tables"),
)
