"""EMA and SWA: averages of the weights, swapped in for evaluations.

The arithmetic is that of ``torch.optim.swa_utils``. Its ``AveragedModel`` is not used, because its
names change with ``torch.compile``, and it pairs tensors by their order alone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from helios.core.wrappers import BareNames
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.events import asks_nothing
from helios.plugins.averaged_weights import Averages, Swap, claim, ordinary, release
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import Phase, TrainingState

if TYPE_CHECKING:
    from helios.model.model import Model

_LOGGER = logging.getLogger(__name__)
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
    """

    loads_shards = True
    _internals: ClassVar[str] = (
        "_averages _decay _every _is_fitting _is_left_out _networks _paths _start _swap _swaps_in "
        "_warmup"
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
        self._paths = self._as_paths(network)
        self._start = start
        self._every = every
        for option, count in {"every": every, "start": start}.items():
            if type(count) is not int or count < 1:
                raise self._fail(option, "a positive int", count, "It counts optimizer steps.")
        self._swaps_in = tuple(swaps_in)
        if not set(self._swaps_in) <= set(EVALUATIONS):
            rule = "out of Phase.VALIDATION, Phase.TESTING and Phase.PREDICTION"
            raise self._fail("swaps_in", rule, swaps_in, "Pass () to swap in nowhere.")
        self._averages = Averages(f"plugin {plug_id!r}", with_buffers=averages_buffers)
        self._networks: dict[str, nn.Module] = {}
        self._swap = Swap()
        self._is_fitting = False
        self._is_left_out = False

    def _fail(self, option: str, rule: str, value: object, remedy: str) -> ArgumentError:
        name = type(self).__name__
        return ArgumentError(f"{name}({option}=...) must be {rule}, got {value!r}. {remedy}")

    def _as_paths(self, network: object) -> tuple[str, ...] | None:
        if network is None:
            return None
        paths = (network,) if isinstance(network, str) else network
        if not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
            raise ArgumentTypeError(
                f"{type(self).__name__}(network=...) must be the name of an attribute of the "
                f'model, several names, or None for all, got {network!r}. Pass e.g. "net".'
            )
        if not paths:
            raise self._fail("network", "at least one name", network, "Pass None for all networks.")
        return tuple(paths)

    @property
    def num_updates(self) -> int:
        """Number of updates of the average; 0 before there is one."""
        return self._averages.num_updates

    @property
    def averaged_networks(self) -> list[str]:
        """Paths of the networks that have an average; none before the first update."""
        return self._averages.paths

    def is_swapped_in(self, phase: Phase) -> bool:
        """Whether an evaluation uses the average: it is asked for, and there is one."""
        return phase in self._swaps_in and self.num_updates > 0

    def leave_out(self) -> None:
        """Do not swap the average in before the next ``setup``: the weights were changed since."""
        self._is_left_out = True

    @abstractmethod
    def _merge(self, averages: list[Tensor], present: list[Tensor], count: int) -> None:
        """Move averages of ``count`` weights to current ones, in place; same device and type."""

    def setup(self) -> None:
        """Start without an average: the model builds new networks; a checkpoint restores it."""
        self._averages.clear()
        self._is_left_out = False

    def on_fit_start(self) -> None:
        """Find the networks; raise an error if the average belongs to other ones."""
        self._is_fitting = True
        self._bind()

    def on_training_resume(self, state: TrainingState) -> None:
        """Warn if the checkpoint holds no average."""
        if not self.num_updates and state.global_step >= self._start:
            _LOGGER.warning(
                "The checkpoint holds no average of plugin %r, which was not registered when it "
                "was written: the average starts after step %d.",
                self.plug_id,
                state.global_step,
            )

    @asks_nothing
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Update the average after a step that was not skipped."""
        number = state.global_step + 1
        is_due = number >= self._start and (number - self._start) % self._every == 0
        if committed and is_due:
            self._refuse_if_swapped_in("update the average")
            self._averages.update(self._networks, self._merge)

    def on_validation_start(self, validation_cycle: int) -> None:
        """Swap the average in."""
        self._swap_in(Phase.VALIDATION)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Restore the networks' own weights."""
        self._swap.put_back()

    def on_testing_start(self) -> None:
        """Swap the average in."""
        self._swap_in(Phase.TESTING)

    def on_testing_end(self) -> None:
        """Restore the networks' own weights."""
        self._swap.put_back()

    def on_predicting_start(self) -> None:
        """Swap the average in."""
        self._swap_in(Phase.PREDICTION)

    def on_predicting_end(self) -> None:
        """Restore the networks' own weights."""
        self._swap.put_back()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to save a checkpoint that would hold the average under ``model``.

        Raises:
            UsageError: if an evaluation did not emit its end event.
        """
        self._refuse_if_swapped_in("save a checkpoint")

    def on_exception(self, exception: BaseException) -> None:
        """Restore the networks' own weights."""
        self._swap.put_back()

    def teardown(self) -> None:
        """Release the networks; the average stays, for :meth:`copy_to`."""
        self._swap.put_back()
        for network in self._networks.values():
            for tensor in self._averages.tensors_of(network).values():
                release(tensor, self.plug_id)
        self._networks = {}
        self._averages.let_go()
        self._is_fitting = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the averages by network and name, by reference."""
        return self._averages.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what :meth:`state_dict` returned."""
        self._averages.load_state_dict(state_dict)

    def copy_to(self, model: Model) -> None:
        """Copy the average into the model's networks permanently, e.g. after ``fit``.

        Raises:
            UsageError: without an average, or during an evaluation that has it swapped in.
            StateError: if it belongs to other networks.
        """
        self._refuse_if_swapped_in("copy the average into the model")
        networks = self._find_averaged(model)
        with ordinary():
            for averages, tensors in self._averages.pairs(networks):
                for name, tensor in tensors.items():
                    tensor.copy_(averages[name])

    def averaged_state_dict(self, model: Model, network: str | None = None) -> dict[str, Any]:
        """Return a network's ``state_dict()`` with the averages in place of its own weights.

        The tensors are copies, and the names have no prefix of ``torch.compile``.

        Args:
            model: the model that was trained.
            network: which of its averaged networks; optional if there is only one.

        Raises:
            UsageError: without an average.
            ArgumentError: if ``network`` names none of them.
            StateError: if the average belongs to other networks.
        """
        networks = self._find_averaged(model)
        path = next(iter(networks)) if network is None and len(networks) == 1 else network
        if path is None or path not in networks:
            raise ArgumentError(
                f"{type(self).__name__}.averaged_state_dict(network=...) must be one of "
                f"{sorted(networks)}, got {network!r}. Pass one of these names."
            )
        return self._averages.state_dict_of(networks[path], path)

    def _find_networks(self, model: Model) -> dict[str, nn.Module]:
        networks = model.discovery.modules()
        if self._paths is not None:
            unknown = sorted(set(self._paths) - networks.keys())
            if unknown:
                raise ArgumentError(
                    f"{type(self).__name__}(network=...) must name networks of the model "
                    f"({sorted(networks)}), got {unknown}. Correct the names."
                )
            networks = {path: networks[path] for path in self._paths}
        tensors_of = self._averages.tensors_of
        networks = {path: part for path, part in networks.items() if tensors_of(part)}
        if not networks:
            raise UsageError(
                f"Plugin {self.plug_id!r} finds no floating-point weights to average in "
                f"{type(model).__name__}. Build networks in setup(), or remove the plugin."
            )
        return networks

    def _find_averaged(self, model: Model) -> dict[str, nn.Module]:
        if not self.num_updates:
            raise UsageError(
                f"Plugin {self.plug_id!r} has no average: none was loaded, and no step with number "
                f"{self._start} or above was made. Train longer, or start it earlier."
            )
        return self._averages.match(self._find_networks(model), is_strict=False)

    def _bind(self) -> dict[str, nn.Module]:
        """Return the networks of the run, and check that they are those of its start."""
        networks = self._find_networks(self.context.model)
        if not self._networks:
            self._networks = networks
            self._claim(networks)
        elif networks != self._networks:
            raise UsageError(
                f"Plugin {self.plug_id!r} averages {sorted(self._networks)}, but since the start "
                f"of the run networks were replaced, added or removed; now there are "
                f"{sorted(networks)}. Build all networks in setup(), and change them in place."
            )
        if self.num_updates:
            networks = self._averages.match(networks, is_strict=self._is_fitting)
        return networks

    def _claim(self, networks: dict[str, nn.Module]) -> None:
        phases = [phase.value for phase in self._swaps_in]
        for path, network in networks.items():
            for tensor in self._averages.tensors_of(network).values():
                if other := claim(tensor, self.plug_id, phases):
                    raise UsageError(
                        f"Plugins {other[1]!r} and {self.plug_id!r} must not both swap an average "
                        f"into {path} for {other[0]}. Pass swaps_in=() to one of them."
                    )

    def _swap_in(self, phase: Phase) -> None:
        if phase not in self._swaps_in or self._is_left_out:
            return
        self._swap.put_back()
        networks = self._bind()
        if self.num_updates:
            self._swap.put_in(self._averages.pairs(networks))
        elif not self._is_fitting:
            _LOGGER.warning(
                "Plugin %r has no average yet: this %s uses the networks' own weights.",
                self.plug_id,
                phase.value,
            )

    def _refuse_if_swapped_in(self, deed: str) -> None:
        if self._swap.is_in:
            raise UsageError(
                f"Cannot {deed} while the average of plugin {self.plug_id!r} is swapped in: the "
                "model would lose its own weights. Do it after the evaluation; if one is "
                "interrupted, end the run or emit its end event."
            )


@final
class StoredAverage(WeightAverage):
    """The average of a checkpoint, in evaluations without the plugin that has made it.

    Args:
        plug_id: id of that plugin.
    """

    def __init__(self, plug_id: str) -> None:
        super().__init__(
            plug_id,
            network=None,
            start=1,
            every=1,
            averages_buffers=False,
            swaps_in=EVALUATIONS,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the plugin, for those of its networks that the model has."""
        networks = self.context.model.discovery.modules()
        averages = state_dict["averages"]
        self._paths = tuple(path for path in averages if path in networks)
        buffers = {
            (path, BareNames(networks[path]).of(name))
            for path in self._paths
            for name, _ in networks[path].named_buffers()
        }
        has_buffers = any((path, name) in buffers for path in averages for name in averages[path])
        self._averages = Averages(f"plugin {self.plug_id!r}", with_buffers=has_buffers)
        super().load_state_dict(state_dict)

    def _merge(self, averages: list[Tensor], present: list[Tensor], count: int) -> None:
        raise UsageError("The average of a checkpoint is not updated.")


@PLUGIN_REGISTRY.register
class EMA(WeightAverage):
    """An exponential moving average of weights.

    The first update copies the weights; each later one sets the average ``a``, given the weights
    ``w``, to ``decay * a + (1 - decay) * w``.

    Args:
        decay: how much of the average is kept, in (0, 1).
        network: which networks; see :class:`WeightAverage`.
        every: update after each optimizer step whose number is a multiple of this.
        warmup: start with smaller decays: after ``t`` updates ``min(decay, (1 + t) / (10 + t))``.
        averages_buffers: average floating-point buffers too, instead of using the network's.
        swaps_in: the evaluations that use the average.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a value outside its range (a ``ValueError``).
        ArgumentTypeError: for networks that are not named by strings.

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
            raise self._fail("decay", "a number in (0, 1)", decay, "Pass e.g. 0.999.")
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
    there on; skipped updates do not count. BatchNorm's statistics stay the network's own: average
    them too, or recompute them with ``torch.optim.swa_utils.update_bn``.

    Args:
        start: number of the first step whose weights count, from 1.
        every: steps between two that count.
        network: which networks; see :class:`WeightAverage`.
        averages_buffers: average floating-point buffers too, instead of using the network's.
        swaps_in: the evaluations that use the average.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for a value outside its range (a ``ValueError``).
        ArgumentTypeError: for networks that are not named by strings.
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
