"""Restores a captured state into the objects of ``setup``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from helios.core.utils import parameters_of
from helios.errors import StateError
from helios.state.anchors import Anchors, Rules, each_named, name_of_group, path_of
from helios.state.networks import Network, fill, is_odd, load_flags, load_grads, pieces_of
from helios.state.optimizers import (
    FINE_TUNING,
    TRAINING_ONLY,
    Tables,
    arrange,
    collecting,
    load_into,
)
from helios.state.values import parts_of
from helios.state.walk import GONE, PARTS, Snapshot, Walk, form_of, kind_of
from helios.storage.building import Builder
from helios.storage.codes import HOLE, TAG
from helios.storage.plain_objects import delete_attribute, refill, set_attribute, table_of

_LOGGER = logging.getLogger(__name__)

UNLINKED = (
    "it refers to {}, which loading has replaced, and cannot be made to refer to the new one: let "
    "load_state_dict() fill what is there"
)

NOT_BUILT = "setup() does not build it. Build it for any value of fast_init."
"""Why saved state is not restored for inference."""


Registered: TypeAlias = list[tuple[dict[str, Any], str, Tensor]]
"""Tables of parameters and buffers, each with a key and the tensor under it."""


@final
class Restoring:
    """Restores a captured state.

    Args:
        look: returns what the owner holds now.
        name: the name of the owner in messages.
        rules: which attributes of the owner never count, and what is declared.
        types: classes that may be built besides those of the values that are there.
        of_setup: the anchors that setup made, by name, also those that nothing leads to now.
        links: codes of what refers to others after setup; ``None`` for those of now.
        is_data: whether what a data set no longer has is passed over.

    Attributes:
        unrestored: in inference, what does not have its saved state, with the reason, by path.
        unlinked: what refers to something that loading has replaced, with the reason, by path.
    """

    def __init__(
        self,
        look: Callable[[], Snapshot],
        *,
        name: str,
        rules: Rules,
        types: Iterable[type],
        of_setup: Mapping[str, Any],
        links: Links | None,
        is_data: bool,
    ) -> None:
        self._look, self._name, self._rules = look, name, rules
        self._types, self._of_setup, self._is_data = types, of_setup, is_data
        self._links = links
        self._registered: Registered = []
        self._tables: Tables | None = None
        self.unrestored: dict[str, str] = {}
        self.unlinked: dict[str, str] = {}

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Reorder the parameters of optimizers as saved, and record where everything is.

        The owner's own ``load_state_dict`` may replace objects.
        """
        now = self._look()
        anchors = now.anchors
        arrange(anchors, state, is_loaded_next=True)
        networks = anchors.of_kind(nn.Module).values()
        self._registered = [each for part in networks for each in _registrations(anchors, part)]
        self._tables = Tables(now.optimizers)

    def _put_back(self, tables: Tables) -> None:
        """Undo that the owner's own ``load_state_dict`` has assigned other tensors and tables."""
        tables.put_back()
        optimizers = self._look().anchors.of_kind(Optimizer).values()
        moved = {id(tensor) for part in optimizers for tensor in parameters_of(part)}
        _put_back(
            self._registered, lambda now, tensor: id(now) not in moved and id(tensor) in moved
        )

    def run(self, state: Mapping[str, Any], *, is_inference: bool) -> Snapshot:
        """Restore everything, and return the owner's content.

        Args:
            state: the saved state.
            is_inference: whether to restore what exists on both sides.
        """
        if self._tables is not None:
            self._put_back(self._tables)
        now = self._look()
        links = links_in(now.walk.codes) if self._links is None else self._links
        values = self._values_to_set(state)
        _restore_parts(now.anchors, state)
        now = self._look()
        unfit = None
        if is_inference:
            self._warn_of_untrained(now.anchors.objects, state["objects"])
            unfit = self.unrestored = self._find_unfit(now, state)
        arrange(now.anchors, state, unfit)
        self._load(now, state, unfit)
        now = self._look()
        if is_inference or self._is_data:
            values = {name: v for name, v in values.items() if now.walk.find(name) is not None}
        builder = self._builder(now.walk)
        set_values(now.walk, values, builder)
        self._link(now.walk, builder, severed(links, self._look().walk.codes, values))
        # A restored value may be another tensor than before.
        last = self._look()
        self._find_unlinked(severed(links, last.walk.codes, values))
        load_flags(state["flags"], last.anchors)
        load_grads(state["grads"], last.anchors)
        return last

    def _link(self, walk: Walk, builder: Builder, links: Links) -> None:
        """Let values refer again to what has the name of what they referred to after setup."""
        known = {
            name: {
                key: code
                for key, code in table.items()
                if all(self._find(walk, each) is not None for each in names_in(code))
            }
            for name, table in links.items()
        }
        set_values(walk, known, builder)

    def _find_unlinked(self, links: Links) -> None:
        for name, table in links.items():
            for key, code in table.items():
                path = path_of(name, key)
                if not self._rules.is_declared(path):
                    held = ", ".join(sorted(names_in(code)))
                    self.unlinked[path] = UNLINKED.format(held)

    def _load(self, now: Snapshot, state: Mapping[str, Any], unfit: dict[str, str] | None) -> None:
        """Load the states of objects, what these leave out, and parameters in no network."""
        objects, states = now.objects, {**state["objects"], **state["inner"]}
        self._warn_of_casts(now, state)
        # Networks first: an object that tracks one may read its weights.
        for path in sorted(objects, key=lambda path: not isinstance(objects[path], nn.Module)):
            part = objects[path]
            if path in states and path not in (unfit or {}):
                tables = Tables(now.optimizers)
                is_network = isinstance(part, nn.Module)
                registered = _registrations(now.anchors, part) if is_network else []
                with collecting(unfit if isinstance(part, TRAINING_ONLY) else None, path):
                    load_into(path, part, states[path])
                tables.put_back()
                _put_back(registered)
        anchors = now.anchors
        _restore_omitted(anchors, state["omitted"])
        for name, tensor in {**anchors.leaves, **anchors.loose}.items():
            if name in state["parameters"]:
                fill(name, tensor, state["parameters"][name])

    def _builder(self, walk: Walk, later: Mapping[str, Any] | None = None) -> Builder:
        def find(name: str) -> Any:
            found = self._find(walk, name)
            return (later or {}).get(name) if found is None else found

        return Builder({*walk.kinds, *self._types}, walk, find, walk.name_of_key)

    def _find(self, walk: Walk, name: str) -> Any:
        found = walk.find(name)
        return self._of_setup.get(name) if found is None else found

    def _values_to_set(self, state: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
        """Return the codes of values, without those that are declared by now."""
        return {
            name: {
                key: code
                for key, code in table.items()
                if not self._rules.is_declared(path_of(name, key))
                and not (name == "" and key in self._rules.exclude)
            }
            for name, table in state["values"].items()
        }

    # ---- before anything is changed

    def check(self, state: Mapping[str, Any], later: Mapping[str, Any] | None = None) -> Snapshot:
        """Reject a state of other objects before anything is changed.

        Args:
            state: the saved state.
            later: what does not exist before other owners are restored, by name.

        Returns:
            What the owner holds now.

        Raises:
            StateError: naming what does not fit.
        """
        now, values = self._look(), self._values_to_set(state)
        anchors, states = now.anchors, {**state["objects"], **state["inner"]}
        for path, part in now.objects.items():
            if isinstance(part, TRAINING_ONLY):
                _check_kind(path, part, state)
            elif isinstance(part, nn.Module) and path in states:
                _check_sizes(path, part, states[path], state["forms"])
        present = {*anchors.objects, *anchors.loose}
        saved = {*state["objects"], *state["parameters"]}
        lacking = state["inner"].keys() - anchors.inner.keys() - present
        if not self._is_data:
            lacking |= {name for name in values if now.walk.find(name) is None}
        missing = set() if state["is_partial"] else present - self._undeclared(saved)
        left_over = self._undeclared((saved - present) | lacking)
        if missing or left_over:
            shown = [", ".join(sorted(each)) or "nothing" for each in (missing, left_over)]
            raise StateError(
                f"The saved state is not that of this {self._name}. Without saved state: "
                f"{shown[0]}. Saved, but missing now: {shown[1]}. Create all networks, optimizers "
                "and schedulers in setup(), under the names that they had when the state was saved."
            )
        codes = {
            path_of(name, key): code
            for name, table in values.items()
            for key, code in table.items()
            if key != PARTS and code not in (HOLE, GONE)
        }
        self._builder(now.walk, {**(later or {}), **made_by_loading(state)}).check(codes)
        return now

    def _undeclared(self, paths: Iterable[str]) -> set[str]:
        """Return the paths that are not declared as unsaved, directly or by a parent."""
        return {path for path in paths if not self._rules.is_declared(path)}

    def _find_unfit(self, now: Snapshot, state: Mapping[str, Any]) -> dict[str, str]:
        """Return what inference lacks, and what training objects cannot load, with the reason."""
        saved = {**state["objects"], **state["inner"]}
        gone = self._undeclared(saved.keys() - now.objects.keys())
        unfit = dict.fromkeys(sorted(gone), NOT_BUILT)
        for path, part in now.objects.items():
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

    def _warn_of_casts(self, now: Snapshot, state: Mapping[str, Any]) -> None:
        """Name the tensors for which setup has built another type than was saved."""
        saved = dict(state["parameters"])
        for path, each in state["objects"].items():
            saved |= {f"{path}.{name}": part for name, part in each.items()}
        names: dict[str, list[str]] = {}
        for name, part in saved.items():
            live = now.anchors.find(name)
            if isinstance(live, Tensor) and isinstance(part, Tensor) and live.dtype != part.dtype:
                names.setdefault(f"{part.dtype}, now {live.dtype}", []).append(name)
        if names:
            _LOGGER.warning(
                "setup() of the %s builds tensors of another type than was saved, and the saved "
                "values are cast to it: %s. Build them as they were to resume with the same bits.",
                self._name,
                "; ".join(f"{', '.join(each)} ({types})" for types, each in names.items()),
            )


def _registrations(anchors: Anchors, module: nn.Module) -> Registered:
    """Return where the tensors of a network are registered."""
    return [
        (vars(part)[table], key, tensor)
        for _, part, key, tensor in anchors.network(module).tensors
        for table in ("_parameters", "_buffers")
        if vars(part).get(table, {}).get(key) is tensor
    ]


def _put_back(
    registered: Registered, is_replaced: Callable[[Tensor, Tensor], bool] = lambda now, tensor: True
) -> None:
    """Put tensors back that loading has replaced by others, with the values of these.

    Args:
        registered: where they were.
        is_replaced: whether a tensor that is there now only stands for the one that was.
    """
    for table, key, tensor in registered:
        now = table.get(key)
        if now is not None and now is not tensor and is_replaced(now, tensor):
            tensor.data = now.data
            table[key] = tensor


def _check_kind(path: str, part: object, state: Mapping[str, Any]) -> None:
    kind = state["kinds"].get(path, kind_of(part))
    if kind != kind_of(part):
        raise StateError(
            f"{path} was saved by {kind}, but is {kind_of(part)} now, which cannot load that "
            "state. Build it in setup() as it was when the state was saved."
        )


def _check_sizes(
    path: str, module: nn.Module, state: Mapping[str, Any], forms: Mapping[str, Any]
) -> None:
    """Refuse tensors of other sizes, unless user code loads them, or ``forms`` come first."""
    network = Network(module)
    for name, tensor in {} if is_odd(network) else pieces_of(network).items():
        saved = state.get(name)
        is_same = not isinstance(saved, Tensor) or saved.shape == tensor.shape
        if not is_same and f"{path}.{name}" not in forms:
            raise StateError(
                f"{path} ({type(module).__name__}) rejected its saved state: size mismatch for "
                f"{name}: {tuple(state[name].shape)} was saved, and it is {tuple(tensor.shape)} "
                f"now. Build it in setup() as it was when the state was saved.{FINE_TUNING}"
            )


def made_by_loading(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what does not exist before objects have loaded their states, by name."""
    made: dict[str, Any] = {
        name: torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        for name, (dtype, shape, strides) in state["forms"].items()
    }
    for path, each in {**state["objects"], **state["inner"]}.items():
        members = state["members"].get(path, ())
        made |= {name_of_group(path, names): {} for names in members}
        for place, name in enumerate(chain.from_iterable(members)):
            made |= each_named(f"{path}.state.<{name}>", each.get("state", {}).get(place))
    return made


def _restore_parts(anchors: Anchors, state: Mapping[str, Any]) -> None:
    """Give networks the parts, and tensors the form, that they had."""
    made: dict[str, Tensor] = {}
    for name, (dtype, shape, strides) in state["forms"].items():
        tensor = anchors.find_own(name)
        if not isinstance(tensor, Tensor):
            made[name] = torch.empty_strided(shape, strides, dtype=dtype)
        elif not is_lazy(tensor) and form_of(tensor) != [dtype, shape, strides]:
            tensor.data = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
    for name, table in state["values"].items():
        module = anchors.find(name)
        if PARTS in table and isinstance(module, nn.Module):
            _register(anchors, module, table[PARTS], made)
    anchors.forget_networks()


def _register(
    anchors: Anchors, module: nn.Module, parts: list[Any], made: Mapping[str, Tensor]
) -> None:
    """Give a module its submodules, parameters and persistent buffers, in their order.

    Other buffers only get their place: they are among the values.
    """
    tables, device = vars(module), next((each.device for each in module.parameters()), "cpu")
    *tables_of_parts, hidden, order = parts
    kept = {key: tables["_buffers"].get(key) for key in hidden}
    for held, place in zip(tables_of_parts, ("_modules", "_parameters", "_buffers"), strict=True):
        new = {}
        for key, part in held.items():
            found = None if part is None else anchors.find_own(part)
            new[key] = made[part].to(device) if found is None and part in made else found
        tables[place].clear()
        tables[place].update(new)
    tables["_buffers"].update(kept)
    for key in order:
        tables["_buffers"][key] = tables["_buffers"].pop(key)
    tables["_non_persistent_buffers_set"] = set(hidden)


def _restore_omitted(anchors: Anchors, omitted: Mapping[str, Any]) -> None:
    for path, module in anchors.of_kind(nn.Module, with_inner=True).items():
        values = omitted.get(path, {})
        pieces = pieces_of(anchors.network(module)) if values else {}
        for name, saved in values.items():
            if name not in pieces:
                raise StateError(
                    f"{path}.{name} was saved separately from the state_dict of {path}, which has "
                    "no such part now. Build it in setup() as it was when the state was saved."
                )
            fill(f"{path}.{name}", pieces[name], saved)


# ---- values


def set_values(walk: Walk, values: Mapping[str, Mapping[Any, Any]], builder: Builder) -> None:
    """Set what was saved, attribute by attribute.

    Args:
        walk: what is there now.
        values: codes by holder and key.
        builder: builds their values.
    """
    for name, table in values.items():
        holder = walk.holders.get(name)
        holder = walk.find(name) if holder is None else holder
        for key, code in table.items():
            if key == PARTS or code == HOLE:
                continue
            if code == GONE:
                delete_attribute(holder, key)
            else:
                _set(holder, key, builder.build(path_of(name, key), code))


def _set(holder: Any, key: Any, value: Any) -> None:
    """Set what a holder has under a key, without running a method of its class."""
    table = table_of(holder)
    if isinstance(holder, nn.Module):
        buffers = table.get("_buffers", {})
        (buffers if key in buffers else table)[key] = value
    elif isinstance(holder, Optimizer) and key == "state":
        refill(holder.state, list(value.items()))
    elif isinstance(holder, Optimizer) and key == "param_groups":
        for group, saved in zip(holder.param_groups, value, strict=True):
            refill(group, list(saved.items()))
    elif type(holder) is partial and key in ("func", "args", "keywords"):
        called = {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
        holder.__setstate__((*(called | {key: value}).values(), table))  # type: ignore[attr-defined]
    elif isinstance(holder, Tensor) or key in table or not isinstance(holder, MethodType):
        # What a method is bound to was filled in place.
        set_attribute(holder, key, value)


# ---- links: codes that refer to others by name

# A ``load_state_dict`` may replace a tensor, a list or a dict that somebody else holds, too. What
# ``setup`` made of references is therefore made again after everything is loaded.

Links: TypeAlias = Mapping[str, Mapping[Any, Any]]
"""Links of values, by holder and key."""


def links_in(codes: Links) -> dict[str, dict[Any, Any]]:
    """Return the codes with references to what has another name."""
    found: dict[str, dict[Any, Any]] = {}
    for name, table in codes.items():
        for key, code in table.items():
            if key != PARTS and names_in(code):
                found.setdefault(name, {})[key] = code
    return found


def severed(links: Links, codes: Links, saved: Links) -> dict[str, dict[Any, Any]]:
    """Return the links that are no longer as they were.

    Args:
        links: as they were, from :func:`links_in`.
        codes: of everything now.
        saved: of what is restored in any case.
    """
    found: dict[str, dict[Any, Any]] = {}
    for name, table in links.items():
        now = codes.get(name, {})
        for key, code in table.items():
            if key not in now or key in saved.get(name, {}):
                continue
            if not names_in(code) <= names_in(now[key]):
                found.setdefault(name, {})[key] = code
    return found


def names_in(code: Any) -> set[str]:
    """Return the names to which a code refers."""
    found = set()
    for each in parts_of(code):
        if type(each) is dict and TAG in each:
            # Of a reference, or of what a view of memory lies in.
            name = each["name"] if each[TAG] == "ref" else each.get("of")
            if isinstance(name, str):
                found.add(name)
    return found


def types_in(code: Any) -> set[str]:
    """Return the names of the classes in a code."""
    tables = (each for each in parts_of(code) if type(each) is dict)
    return {each["type"] for each in tables if each.get(TAG) in ("object", "enum", "flag", "tuple")}
