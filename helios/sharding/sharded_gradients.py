"""The gradients of sharded models: each process keeps its shard of their sum over all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.parameters import parameters_of
from helios.core.sharded_tensors import local_of
from helios.errors import UsageError
from helios.replicas.gradients import FindNetworks, Gradients
from helios.replicas.replicas import Replicas
from helios.sharding.fsdp_adapter import ShardedUnit
from helios.sharding.requirements import check_hooks
from helios.sharding.unit_calls import UnitCalls
from helios.sharding.unit_sum import UnitSum
from helios.sharding.waves import Waves


@final
class ShardedGradients(Gradients):
    """Gradients that FSDP scatters in each turn, added over turns and micro-batches.

    Args:
        replicas: the replicas of the run, in waves.
        units: the units of the networks, by name.
        parameters: all sharded parameters, by name.
    """

    def __init__(
        self, replicas: Replicas, units: Mapping[str, ShardedUnit], parameters: Mapping[str, Tensor]
    ) -> None:
        self._replicas = replicas
        self._waves = Waves(replicas.num_replicas, replicas.num_processes, replicas.rank)
        self.has_idle_turn = self._waves.has_idle_turn
        self._parameters = parameters
        self._trained = _trained(parameters)
        self._sums: dict[str, Tensor] = {}
        self._present: set[str] = set()
        self._calls = calls = UnitCalls(replicas, [*units])
        self._units = {
            name: UnitSum(self._waves, partial(calls.note_sum, number))
            for number, name in enumerate(units)
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        for number, (name, unit) in enumerate(units.items()):
            self._connect(unit, self._units[name], names)
            unit.before_gather(partial(calls.note_gather, number))
            unit.before_forward(lambda *_, number=number: calls.note_forward(number))
            unit.after_forward(lambda *given, number=number: calls.note_end(number, given[-1]))
            unit.watch_values(partial(_refuse_write, names))

    def _connect(self, unit: ShardedUnit, unit_sum: UnitSum, names: Mapping[int, str]) -> None:
        unit.use(unit_sum)
        unit.before_forward(unit_sum.count_forward)
        unit.watch_gradients(
            {
                id(parameter): partial(self._note, unit_sum, names[id(parameter)])
                for parameter in unit.parameters()
            }
        )

    def _note(self, unit_sum: UnitSum, name: str, gradient: Tensor) -> None:
        unit_sum.note_gradient(gradient)
        if not self._waves.is_idle:
            self._present.add(name)

    def sharded_parameters(self) -> Iterable[Tensor]:
        """Return the parameters of all networks."""
        return self._parameters.values()

    def drop_old(self, optimizer: Optimizer) -> None:
        """Set the gradients to None, and check that the same parameters are trained.

        Raises:
            UsageError: if parameters were frozen or unfrozen since ``setup``, or have hooks.
        """
        optimizer.zero_grad()
        check_hooks(self._parameters)
        changed = self._trained ^ _trained(self._parameters)
        if changed:
            raise UsageError(
                f"requires_grad of {', '.join(sorted(changed))} was changed after setup(), but "
                'Trainer(sharding="full") fixes there what is trained. Set it in setup(), or use '
                'sharding="none".'
            )

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Take what the processes have added in this turn."""
        self.end_turn()

    def end_turn(self) -> None:
        """End a turn, in which this process has trained a replica or has only run along.

        Raises:
            UsageError: if a unit took part in some turns of this iteration, but not in all.
        """
        self.is_open = True
        waves = self._waves
        for unit in self._units.values():
            unit.add_late()
        self._calls.end_turn()
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or not waves.is_last:
                continue
            if name in self._sums:
                with torch.no_grad():
                    local_of(self._sums[name]).add_(local_of(gradient))
            else:
                self._sums[name] = gradient
        for name, unit in self._units.items():
            unit.end_turn(name)
        waves.turn = 0 if waves.is_last else waves.turn + 1

    def finish(self, optimizer: Optimizer) -> None:
        """Set ``.grad`` to the sums; to None where no replica has a gradient."""
        parameters = parameters_of(optimizer)
        there = self._find_present(sorted(self._trained))
        sums = {id(self._parameters[name]): self._sums.get(name) for name in there}
        for parameter in parameters:
            parameter.grad = sums.get(id(parameter))
        self._sums, self._present, self.is_open = {}, set(), False

    def _find_present(self, names: Sequence[str]) -> list[str]:
        self._calls.compare()
        flags = self._replicas.agree(*(name in self._present for name in names))
        return [name for name, is_there in zip(names, flags, strict=True) if is_there]

    def compare_calls(self) -> None:
        """Compare the calls of units with those of other processes.

        Raises:
            UsageError: if they differ.
        """
        self._calls.compare()

    def close_window(self) -> None:
        """Drop what was collected and not used."""
        self._sums, self._present, self.is_open = {}, set(), False


def _refuse_write(names: Mapping[int, str], parameter: Tensor) -> None:
    raise UsageError(
        f"A forward of a sharded model must not write to parameters, but {names[id(parameter)]} "
        "was changed in place. It is gathered for this forward only, so the change would be lost. "
        'Make it a buffer, or train with sharding="none".'
    )


def _trained(parameters: Mapping[str, Tensor]) -> set[str]:
    return {name for name, parameter in parameters.items() if parameter.requires_grad}
