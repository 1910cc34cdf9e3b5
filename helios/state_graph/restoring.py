"""Restores a saved state into the objects that ``setup`` has made."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch import Size, Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.wrappers import BareNames
from helios.errors import StateError
from helios.protocols import Stateful
from helios.state_graph.custom_state_dicts import restore_omitted
from helios.state_graph.graph import Graph
from helios.state_graph.layouts import registrations_of
from helios.state_graph.module_state import (
    kind_of,
    load_flags,
    load_grads,
    load_state,
    state_of,
)
from helios.state_graph.network_parts import NamedTensor
from helios.state_graph.nodes import Nodes, link_again, restructure
from helios.state_graph.object_names import Rules, as_written, path_of
from helios.state_graph.optimizers import (
    arrange,
    arrange_covered,
    check_covered,
    collecting,
    restore_tables,
    share_tables,
    shared_tables,
)
from helios.state_graph.saved_layouts import SavedLayouts, casts, fill

_LOGGER = logging.getLogger(__name__)
_MAX_LAYERS = 3

TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)
"""Objects that weights do without, and that an evaluation may lack."""

NOT_BUILT = "setup() does not build it. Build it for any value of fast_init."
"""Why something that is saved is not restored for inference."""


@final
class Restoring:
    """Restores a captured state.

    Args:
        look: returns what the owner holds now.
        find_types: returns types that may be built besides those of the values that setup made.
        exclude: attributes of the owner that never count.
        unsaved: names and paths that are declared as not to be saved.
        name: the name of the owner in messages.
        is_data: whether what a data set no longer has is passed over.

    Attributes:
        unrestored: in inference, what does not have its saved state, with the reason, by path.
    """

    def __init__(
        self,
        look: Callable[[], Graph],
        find_types: Callable[[], Iterable[Any]],
        exclude: frozenset[str],
        unsaved: frozenset[str],
        name: str,
        is_data: bool,
    ) -> None:
        self._look = look
        self._find_types = find_types
        self._exclude = exclude
        self._rules = Rules(unsaved=unsaved)
        self._name = name
        self._is_data = is_data
        self.unrestored: dict[str, str] = {}

    def run(self, state: dict[str, Any], *, is_inference: bool) -> Graph:
        """Restore everything, and return what the owner holds then; see ``Discovery.restore``."""
        live = self._look()
        if not is_inference:
            self._check(live, state)
        if restructure(state["values"]["nodes"], live):
            live = self._look()
        found = live.found
        objects = {**found.objects, **found.inner}
        if is_inference:
            self._warn_of_untrained(found.objects, state["objects"])
            self.unrestored = self._find_unfit(objects, state)
        unfit = self.unrestored if is_inference else None
        arrange(found, state, live.parameters, unfit)
        shared = shared_tables(objects)
        self._load(objects, live, state, unfit)
        share_tables(shared)
        self._restore_nodes(live, state["values"])
        share_tables(shared)
        # A restored value may be another tensor than before.
        last = self._look()
        parameters = last.parameters
        for name, tensor in {**parameters.leaves, **parameters.loose}.items():
            if name in state["parameters"]:
                fill(as_written(name, found.objects), tensor, state["parameters"][name])
        load_flags(state["flags"], found, parameters)
        load_grads(state["grads"], found, parameters)
        return last

    def _load(
        self,
        objects: dict[str, Any],
        live: Graph,
        state: dict[str, Any],
        unfit: dict[str, str] | None,
    ) -> None:
        """Load states into objects whose tensors lie where they lay, and what these leave out."""
        states, passed_over = {**state["objects"], **state["inner"]}, {} if unfit is None else unfit
        layouts = SavedLayouts(state["layouts"], live, state)
        layouts.make()
        if unfit is None:
            self._warn_of_casts(casts(live.found, state))
        # Networks first: an object that tracks one may read its weights.
        for path in sorted(objects, key=lambda path: not isinstance(objects[path], nn.Module)):
            part = objects[path]
            if path in states and path not in passed_over:
                with collecting(unfit if isinstance(part, TRAINING_ONLY) else None, path):
                    load_into(path, part, states[path], state["omitted"].get(path))
        layouts.put_back()
        check_covered(live.found, state, live.parameters, unfit)
        restore_omitted(state["omitted"], live.found)
        layouts.fill()
        tables = {path: saved for path, saved in state["tables"].items() if path not in passed_over}
        restore_tables(tables, live.found)

    def prepare(self, state: dict[str, Any]) -> dict[str, NamedTensor]:
        """Reorder the parameters of optimizers as saved, and return where tensors are."""
        live = self._look()
        arrange_covered(live.found, state, live.parameters)
        return registrations_of(live.found)

    def _restore_nodes(self, before: Graph, values: Mapping[str, Any]) -> None:
        """Restore values, generators and references to objects."""
        live = self._look()
        # Loading may have assigned other lists and dicts to attributes, and other tensors.
        if link_again(before, live):
            live = self._look()
        self._nodes(values, live).restore()

    def _nodes(self, values: Mapping[str, Any], live: Graph) -> Nodes:
        is_declared = self._rules.is_declared
        nodes = {name: record for name, record in values["nodes"].items() if not is_declared(name)}
        generators = {
            name: saved for name, saved in values["generators"].items() if not is_declared(name)
        }
        saved = {**values, "nodes": nodes, "generators": generators}
        types = {*live.types, *self._find_types()}
        return Nodes(saved, live, types, self._may_set)

    def _check(self, live: Graph, state: dict[str, Any]) -> None:
        """Reject a state of other objects before anything is changed."""
        found = live.found
        for path, part in {**found.objects, **found.inner}.items():
            if isinstance(part, TRAINING_ONLY):
                _check_kind(path, part, state)
        present = live.paths()
        saved = self._undeclared({*state["objects"], *state["parameters"]})
        saved |= self._undeclared(state["inner"].keys() - found.inner.keys() - present)
        lacking = self._undeclared(self._nodes(state["values"], live).find_lacking())
        missing = sorted(as_written(path, found.objects) for path in present - saved)
        left_over = sorted(as_written(path, found.objects) for path in (saved - present) | lacking)
        if state["is_partial"]:
            missing = []
        if missing or left_over:
            raise StateError(
                f"The saved state is not that of this {self._name}. Without saved state: "
                f"{', '.join(missing) or 'nothing'}. Saved, but missing now: "
                f"{', '.join(left_over) or 'nothing'}. Create all networks, optimizers and "
                "schedulers in setup(), under the names that they had when the state was saved."
            )

    def _find_unfit(self, objects: Mapping[str, Any], state: dict[str, Any]) -> dict[str, str]:
        """Return what inference lacks, and what training objects cannot load, with the reason."""
        saved = {**state["objects"], **state["inner"]}
        unfit = dict.fromkeys(sorted(self._undeclared(saved.keys() - objects.keys())), NOT_BUILT)
        for path, part in objects.items():
            if isinstance(part, TRAINING_ONLY):
                with collecting(unfit, path):
                    _check_kind(path, part, state)
                if path not in {**saved, **state["kinds"]} and not state["is_partial"]:
                    unfit[path] = f"{path} is not in the checkpoint."
        return unfit

    def _undeclared(self, paths: Iterable[str]) -> set[str]:
        """Return the paths that are not declared as unsaved, directly or by a parent."""
        return {path for path in paths if not self._rules.is_declared(path)}

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

    def _may_set(self, name: str, key: Any) -> bool:
        if not name and key in self._exclude:
            return False
        return not self._rules.is_declared(path_of(name, key))


def _check_kind(path: str, part: object, state: Mapping[str, Any]) -> None:
    kind = state["kinds"].get(path, kind_of(part))
    if kind != kind_of(part):
        raise StateError(
            f"{path} was saved by {kind}, but is {kind_of(part)} now, which cannot load that "
            "state. Build it in setup() as it was when the state was saved."
        )


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
