"""The model that the last call of ``fit`` has trained, which is evaluated as it is.

An evaluation without a ``checkpoint`` then neither sets the model up nor loads anything, so that
what a script has done to it since, such as ``update_bn``, counts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from numpy import ndarray
from torch import Tensor

from helios.checkpoint.record import Record
from helios.model.model import Model
from helios.plugins.averaging import WeightAverage
from helios.plugins.plugin import Plugin
from helios.state.discovery import Baseline
from helios.state.owners import Owners, internals_of
from helios.storage.content_hash import fingerprint

_PLAIN = (bool, int, float, complex, str, bytes, type(None), *(list, tuple, dict, set))
_ARRAYS = (Tensor, ndarray)


@dataclass
class TrainedModel:
    """The model as the last call of ``fit`` has left it.

    Attributes:
        model: the model.
        obstacle: why a checkpoint is loaded all the same; empty if the model counts.
        end: the counters and logs of the end of ``fit``.
        owners: what else held state.
        plugins: the plugins that took part, by id.
    """

    model: Model
    obstacle: str
    end: Record
    owners: Owners
    plugins: Mapping[str, Plugin]
    # Of the plugins before their teardown, by id.
    _attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _contents: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        baseline = self.model.discovery.baseline
        self._baseline: weakref.ref[Baseline] | None = (
            None if baseline is None else weakref.ref(baseline)
        )

    @property
    def reason_to_load(self) -> str:
        """Why a checkpoint is loaded instead of it; empty if it is evaluated as it is."""
        baseline = self.model.discovery.baseline
        if self.obstacle or self._baseline is None:
            return self.obstacle
        # Every call that loads into a model sets it up anew.
        return "" if self._baseline() is baseline else "another call has set the model up since"

    def record_attributes(self) -> None:
        """Record the attributes of plugins at the end of ``fit``, before their teardown."""
        self._attributes = {name: dict(vars(plugin)) for name, plugin in self.plugins.items()}

    @contextmanager
    def keeping_plugins(self) -> Iterator[dict[str, Any]]:
        """Set plugins up in the block; afterwards they have what training has given them.

        Yields:
            Their own states, which they load when the session is there.
        """
        states = copy.deepcopy({name: part.state_dict() for name, part in self.plugins.items()})
        before = {name: dict(vars(plugin)) for name, plugin in self.plugins.items()}
        yield states
        for name, plugin in self.plugins.items():
            attributes, internals = vars(plugin), internals_of(plugin)
            for key, value in self._attributes.get(name, {}).items():
                is_renewed = attributes.get(key, value) is not before[name].get(key, value)
                if is_renewed and key not in internals and isinstance(value, (*_PLAIN, *_ARRAYS)):
                    attributes[key] = value

    def record_contents(self) -> None:
        """Record what the networks hold that have an average."""
        self._contents = _fingerprints_of(self.model, self.plugins.values())

    def leave_out_averages(self, plugins: Collection[Plugin]) -> dict[str, list[str]]:
        """Leave averages of networks that have changed since ``fit`` out of an evaluation.

        Returns:
            These networks, by the id of the plugin.
        """
        now = _fingerprints_of(self.model, plugins)
        left_out: dict[str, list[str]] = {}
        for plugin in plugins:
            if isinstance(plugin, WeightAverage):
                paths = plugin.averaged_networks
                changed = [path for path in paths if now.get(path) != self._contents.get(path)]
                if changed:
                    plugin.leave_out()
                    left_out[plugin.plug_id] = changed
        return left_out


def _fingerprints_of(model: Model, plugins: Collection[Plugin]) -> dict[str, int]:
    """Return fingerprints of the tensors of the networks that plugins have an average of."""
    averages = [plugin for plugin in plugins if isinstance(plugin, WeightAverage)]
    paths = {path for plugin in averages for path in plugin.averaged_networks}
    networks = model.discovery.modules() if paths else {}
    return {
        path: fingerprint({**dict(network.named_parameters()), **dict(network.named_buffers())})
        for path, network in networks.items()
        if path in paths
    }
