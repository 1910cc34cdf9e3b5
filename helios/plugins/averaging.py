"""EMA and SWA: averages of the weights, swapped in for evaluations.

They are updated by functions of ``torch.optim.swa_utils``, and have the names of the networks'
tensors. Swapping copies in place, so optimizers, graphs and compiled code keep their parameters.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from helios.core.sharded_tensors import cut_like, local_of, value_of
from helios.core.wrappers import BareNames, bare_state_dict
from helios.counters import Phase, TrainingState
from helios.errors import ArgumentError, StateError, UsageError
from helios.hooks.events import asks_nothing
from helios.model.model import Model
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

Networks: TypeAlias = Mapping[str, nn.Module]
Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
"""Tensors, each with the value that it gets."""

_SWAPPED = "_helios_average"
"""Attribute of a tensor while an average is swapped into it: the id of the plugin."""

EVALUATIONS = (Phase.VALIDATION, Phase.TESTING, Phase.PREDICTION)


class WeightAverage(Plugin, ABC):
    """Base of the averages: which tensors are averaged, when, and in which evaluations.

    Floating-point parameters are averaged, frozen ones too. Everything else keeps the network's own
    value, also during an evaluation; so do buffers, such as BatchNorm's statistics, unless
    ``averages_buffers`` is set. Averages of half-precision weights are kept in float32.

    When an evaluation starts, the averages are swapped into the networks, in place; when it ends,
    or after an exception, the networks' own weights are restored. Before the first update, nothing
    is swapped.

    Args:
        plug_id: unique id of the plugin.
        network: names of the model's attributes, or paths such as ``"nets.0"``; ``None`` for all
            networks of the model.
        start: number of the optimizer step, from 1, whose weights are the first to be averaged.
        every: steps between two updates.
        averages_buffers: average floating-point buffers too, and swap them in.
        swaps_in: the evaluations that use the average.

    Attributes:
        num_updates: number of updates of the average; 0 before the first.
    """

    loads_shards = True
    _internals: ClassVar[str] = (
        "_averages _averages_buffers _decay _every _is_left_out _networks _own _paths _start "
        "_swaps_in _warmup num_updates"
    )

    def __init__(
        self,
        plug_id: str,
        *,
        network: str | Sequence[str] | None,
        start: int,
        every: int,
        averages_buffers: bool,
        swaps_in: Iterable[Phase],
    ) -> None:
        super().__init__(plug_id)
        for option, count in {"every": every, "start": start}.items():
            if type(count) is not int or count < 1:
                raise ArgumentError(
                    f"{type(self).__name__}({option}=...) must be a positive int, got {count!r}. "
                    "It counts optimizer steps."
                )
        self._paths = (network,) if isinstance(network, str) else network
        self._start = start
        self._every = every
        self._averages_buffers = averages_buffers
        self._swaps_in = tuple(swaps_in)
        self._networks: Networks = {}
        self._own: Pairs = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._averages: dict[str, dict[str, Tensor]] = {}
        self.num_updates = 0
        self._is_left_out = False

    @property
    def averaged_networks(self) -> list[str]:
        """Paths of the networks that have an average; none before the first update."""
        return list(self._averages)

    def is_swapped_in(self, phase: Phase) -> bool:
        """Return whether an evaluation uses the average, if there is one."""
        return phase in self._swaps_in and self.num_updates > 0

    def leave_out(self) -> None:
        """Do not swap the average in until the next ``setup``: the weights have changed."""
        self._is_left_out = True

    @abstractmethod
    def _merge(self, averages: list[Tensor], present: list[Tensor], count: int) -> None:
        """Move averages of ``count`` weights to current ones, in place; same device and type."""

    def setup(self) -> None:
        """Start without an average: the model builds new networks; a checkpoint restores it."""
        self._start_anew()

    def on_fit_start(self) -> None:
        """Find the networks; raise an error if the average belongs to other ones."""
        self._networks = self._find_networks(self.context.model)
        if self._averages:
            self._pairs_with({**dict.fromkeys(self._averages), **self._networks})

    @asks_nothing
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Update the average after a step that was not skipped."""
        number = state.global_step + 1
        is_due = number >= self._start and (number - self._start) % self._every == 0
        if committed and is_due:
            self._update()

    def _update(self) -> None:
        for path, network in self._networks.items():
            if not self.num_updates:
                tensors = self._tensors_of(network)
                self._averages[path] = {name: _widen(x.clone()) for name, x in tensors.items()}
                continue
            pairs = [(average, _widen(own)) for own, average in self._pairs_with({path: network})]
            # By shards: a sharded model may hold tensors that are not sharded, too.
            averages, present = zip(*pairs, strict=True)
            self._merge([*map(local_of, averages)], [*map(local_of, present)], self.num_updates)
        self.num_updates += 1

    def on_validation_start(self, validation_cycle: int) -> None:
        """Swap the average in."""
        self._swap_in(Phase.VALIDATION)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Restore the networks' own weights."""
        self._put_back()

    def on_testing_start(self) -> None:
        """Swap the average in."""
        self._swap_in(Phase.TESTING)

    def on_testing_end(self) -> None:
        """Restore the networks' own weights."""
        self._put_back()

    def on_predicting_start(self) -> None:
        """Swap the average in."""
        self._swap_in(Phase.PREDICTION)

    def on_predicting_end(self) -> None:
        """Restore the networks' own weights."""
        self._put_back()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to save a checkpoint that would hold the average under ``model``.

        Raises:
            UsageError: if an evaluation did not emit its end event.
        """
        if self._own:
            raise UsageError(
                f"The average of plugin {self.plug_id!r} is still swapped in: an evaluation has "
                "not emitted its end event. Emit it, also in your own loop."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Restore the networks' own weights."""
        self._put_back()

    def teardown(self) -> None:
        """Release the networks; the average stays, for :meth:`copy_to`."""
        self._put_back()
        self._networks = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the averages by network and name, by reference."""
        averages = {path: dict(averages) for path, averages in self._averages.items()}
        return {"num_updates": self.num_updates, "averages": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what :meth:`state_dict` returned."""
        self._start_anew()
        self.num_updates = state_dict["num_updates"]
        networks = self.context.model.discovery.modules()
        for path, averages in state_dict["averages"].items():
            tensors = self._tensors_of(networks[path]) if path in networks else {}
            self._averages[path] = {
                name: _fit(average, tensors.get(name)).clone() for name, average in averages.items()
            }

    def copy_to(self, model: Model) -> None:
        """Copy the average into the model's networks permanently, e.g. after ``fit``.

        Raises:
            UsageError: without an average.
            StateError: if it belongs to other networks.
        """
        _put_in(self._pairs_with(self._find_averaged(model)))

    def averaged_state_dict(self, model: Model, network: str | None = None) -> dict[str, Any]:
        """Return a network's ``state_dict()`` with the averages in place of its own weights.

        The tensors are copies, and the names have no prefix of ``torch.compile``.

        Args:
            model: the model that was trained.
            network: which of its averaged networks; optional if there is only one.

        Raises:
            UsageError: without an average.
            KeyError: if ``network`` names none of them.
            ValueError: if it is omitted, and there are several.
            StateError: if the average belongs to other networks.
        """
        networks = self._find_averaged(model)
        (path,) = networks if network is None else (network,)
        own = _put_in(self._pairs_with({path: networks[path]}))
        with torch.inference_mode(False):
            state = copy.deepcopy(bare_state_dict(networks[path]))
        _put_in(own)
        return state

    def _tensors_of(self, network: nn.Module) -> dict[str, Tensor]:
        """Return what is averaged in a network, by name without prefixes of wrappers."""
        bare = BareNames(network)
        buffers = network.named_buffers() if self._averages_buffers else ()
        return {
            bare.of(name): tensor
            for name, tensor in chain(network.named_parameters(), buffers)
            if tensor.is_floating_point() or tensor.is_complex()
        }

    def _find_networks(self, model: Model) -> Networks:
        networks = model.discovery.modules()
        paths = networks if self._paths is None else self._paths
        if unknown := sorted(set(paths) - networks.keys()):
            raise ArgumentError(
                f"{type(self).__name__}(network=...) must name networks of the model "
                f"({sorted(networks)}), got {unknown}. Pass some of these names."
            )
        return {path: networks[path] for path in paths if self._tensors_of(networks[path])}

    def _find_averaged(self, model: Model) -> Networks:
        """Return the networks of a model that have an average; it may lack some, or have others."""
        if not self.num_updates:
            raise UsageError(
                f"Plugin {self.plug_id!r} has no average: none was loaded, and step {self._start} "
                "was not reached. Train longer, or start it earlier."
            )
        networks = model.discovery.modules()
        return {path: networks[path] for path in self._averages if path in networks}

    def _pairs_with(self, networks: Mapping[str, nn.Module | None]) -> Pairs:
        """Return the tensors of networks, each with its average.

        Raises:
            StateError: if the average belongs to other networks.
        """
        pairs: Pairs = []
        faults: list[str] = []
        for path, network in networks.items():
            averages = self._averages.get(path, {})
            tensors = {} if network is None else self._tensors_of(network)
            if not self._networks:
                tensors = {name: tensors[name] for name in averages if name in tensors}
            own, known = ({n: t.shape for n, t in part.items()} for part in (tensors, averages))
            faults += [f"{path}.{n}" for n in {**own, **known} if own.get(n) != known.get(n)]
            pairs += [(tensors[name], averages[name]) for name in averages if name in tensors]
        if faults or not pairs:
            raise self._misfit(f"they differ in {', '.join(faults) or 'all names'}")
        return pairs

    def _misfit(self, what: str) -> StateError:
        return StateError(
            f"The average of plugin {self.plug_id!r} does not match the model's networks: {what}. "
            "Build all networks in setup(), and pass the same options to the plugin, or give it "
            "another plug_id to start a new average."
        )

    def _swap_in(self, phase: Phase) -> None:
        if not self.is_swapped_in(phase) or self._is_left_out:
            return
        self._put_back()
        networks = self._networks or self._find_averaged(self.context.model)
        if self._networks and self._find_networks(self.context.model) != networks:
            raise self._misfit("networks were replaced, added or removed during the run")
        pairs = self._pairs_with(networks)
        for tensor, _ in pairs:
            if other := vars(tensor).get(_SWAPPED):
                raise UsageError(
                    f"Plugins {other!r} and {self.plug_id!r} must not both swap an average into "
                    f"a network for a {phase.value}. Pass swaps_in=() to one of them."
                )
        self._own = _put_in(pairs)
        for tensor, _ in pairs:
            vars(tensor)[_SWAPPED] = self.plug_id

    def _put_back(self) -> None:
        """Restore the networks' own weights, if the average is swapped in."""
        for tensor, _ in _put_in(self._own):
            vars(tensor).pop(_SWAPPED, None)
        self._own = []


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor at least in float32.

    In half precision, 1 - 0.999 is less than half a unit in the last place, and updates would be
    lost.
    """
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _fit(average: Tensor, tensor: Tensor | None) -> Tensor:
    """Return an average of a checkpoint with the device and the shards of its tensor, if it fits.

    Those of a sharded checkpoint are read here, of which each process needs its rows only.
    """
    if tensor is None or tensor.shape != average.shape:
        return value_of(average)
    return value_of(cut_like(average, tensor)).to(tensor.device)


@torch.inference_mode(False)
@torch.no_grad()
def _put_in(pairs: Pairs) -> Pairs:
    """Copy values into tensors, also inside inference mode; returns them with what they held."""
    # All values first: networks may share tensors.
    own = [(tensor, tensor.clone()) for tensor, _ in pairs]
    for tensor, value in pairs:
        tensor.copy_(value)
    return own


@PLUGIN_REGISTRY.register
class EMA(WeightAverage):
    """An exponential moving average of weights.

    The first update copies the weights; each later one sets the average ``a``, given the weights
    ``w``, to ``decay * a + (1 - decay) * w``.

    Args:
        decay: the share of the average that is kept, in (0, 1).
        network: which networks; see :class:`WeightAverage`.
        every: update after each optimizer step whose number is a multiple of this.
        warmup: start with smaller decays: after ``t`` updates ``min(decay, (1 + t) / (10 + t))``.
        averages_buffers: average floating-point buffers too, instead of using the network's.
        swaps_in: the evaluations that use the average.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a value outside its range (a ``ValueError``).

    Example:
        >>> EMA(decay=0.99, network="net").num_updates
        0
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        network: str | Sequence[str] | None = None,
        every: int = 1,
        warmup: bool = False,
        averages_buffers: bool = False,
        swaps_in: Iterable[Phase] = EVALUATIONS,
        plug_id: str = "ema",
    ) -> None:
        super().__init__(
            plug_id,
            network=network,
            start=every,
            every=every,
            averages_buffers=averages_buffers,
            swaps_in=swaps_in,
        )
        if not isinstance(decay, float) or not 0 < decay < 1:
            raise ArgumentError(
                f"EMA(decay=...) must be a number in (0, 1), got {decay!r}. Pass e.g. 0.999."
            )
        self._decay = decay
        self._warmup = bool(warmup)

    def _merge(self, averages: list[Tensor], present: list[Tensor], count: int) -> None:
        decay = self._decay
        if self._warmup:
            decay = min(decay, (1 + count) / (10 + count))
        get_ema_multi_avg_fn(decay)(averages, present, count)  # type: ignore[no-untyped-call]


@PLUGIN_REGISTRY.register
class SWA(WeightAverage):
    """Stochastic weight averaging: the mean of the weights after some steps.

    It averages the weights after optimizer step ``start``, and after every ``every``-th step from
    there on; skipped updates do not count. BatchNorm's statistics are not averaged: average them
    too, or recompute them with ``torch.optim.swa_utils.update_bn``.

    Args:
        start: number of the first step whose weights are averaged, from 1.
        every: steps between two updates.
        network: which networks; see :class:`WeightAverage`.
        averages_buffers: average floating-point buffers too, instead of using the network's.
        swaps_in: the evaluations that use the average.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a value outside its range (a ``ValueError``).
    """

    def __init__(
        self,
        start: int,
        every: int = 1,
        *,
        network: str | Sequence[str] | None = None,
        averages_buffers: bool = False,
        swaps_in: Iterable[Phase] = EVALUATIONS,
        plug_id: str = "swa",
    ) -> None:
        super().__init__(
            plug_id,
            network=network,
            start=start,
            every=every,
            averages_buffers=averages_buffers,
            swaps_in=swaps_in,
        )

    def _merge(self, averages: list[Tensor], present: list[Tensor], count: int) -> None:
        get_swa_multi_avg_fn()(averages, present, count)  # type: ignore[no-untyped-call]
