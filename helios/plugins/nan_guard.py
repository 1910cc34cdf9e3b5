"""``NaNGuard``: keep losses and gradients that are not finite from reaching the weights.

Each update reads one number that says whether all losses and gradients are finite; only if they are
not, the causes are searched for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from helios.core.sharded_tensors import local_of
from helios.core.utils import parameters_of
from helios.core.wrappers import name_parameters
from helios.counters import Cursor, TrainingState
from helios.errors import ArgumentError, UsageError
from helios.hooks.context import Context
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.replicas.module_buffers import Buffers
from helios.text import some_text

_LOGGER = logging.getLogger(__name__)

_MOST = 5


class _Loss(NamedTuple):
    """The loss of a replica for one batch."""

    place: Cursor
    replica: int
    value: Any


_Report: TypeAlias = tuple[list[_Loss], list[str]]
"""The losses of a window, and names of parameters whose gradients are not finite."""


@PLUGIN_REGISTRY.register
class NaNGuard(Plugin):
    """Checks that losses and gradients are finite before they reach the weights.

    The message names the epoch, the iteration, the batches, the indices of their first five samples
    and the parameters. Losses are those on which Helios runs backward; gradients are those of the
    whole window, averaged and not yet clipped.

    A skipped update is discarded with its gradients: schedulers and, in ITERATION unit,
    ``current_iteration`` do not advance, and logs, validations and saves at that count are not
    repeated. The buffers of all networks are restored to their values at the start of the window,
    because a running average of BatchNorm would keep the NaN; ``"skip"`` and ``"stop"`` keep a copy
    for this.

    With several replicas, one of them is enough: all processes skip the update, with the same
    message. As long as everything is finite, this costs no communication.

    Args:
        action: ``"raise"`` an error; ``"skip"`` the update, with a warning, and continue;
            ``"stop"``: skip it and finish the run.
        checks: ``"loss"``, ``"gradients"`` or ``"both"``.
        limit: maximum number of skipped windows in a row with ``"skip"``; one more is an error.
        plug_id: unique id of the plugin.

    Attributes:
        num_skipped: number of updates skipped in the whole run.

    Raises:
        ArgumentError: if a value is invalid.

    Example:
        >>> NaNGuard(action="skip", limit=3).num_skipped
        0
    """

    _internals: ClassVar[str] = (
        "_action _before _buffers _checks _found _has_skipped _knows_buffers _limit "
        "_num_in_a_row _window num_skipped"
    )

    def __init__(
        self,
        action: Literal["raise", "skip", "stop"] = "raise",
        checks: Literal["loss", "gradients", "both"] = "both",
        *,
        limit: int = 10,
        plug_id: str = "nan-guard",
    ) -> None:
        super().__init__(plug_id)
        if action not in ("raise", "skip", "stop") or checks not in ("loss", "gradients", "both"):
            raise ArgumentError(
                'NaNGuard needs an action ("raise", "skip" or "stop") and checks ("loss", '
                f'"gradients" or "both"), got action={action!r} and checks={checks!r}.'
            )
        if type(limit) is not int or limit < 1:
            raise ArgumentError(f"NaNGuard(limit=...) must be a positive int, got {limit!r}.")
        self._action = action
        self._checks = checks
        self._limit = limit
        self.teardown()
        self.setup()

    def setup(self) -> None:
        """Start without counts; a checkpoint restores them."""
        self.num_skipped = self._num_in_a_row = 0
        self._window: list[_Loss] = []
        self._found: _Report | None = None
        self._has_skipped = False

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Find the buffers again in the next window: a hook may have changed the networks."""
        self._knows_buffers = False

    def on_training_step_start(self, state: TrainingState) -> None:
        """Keep the buffers as they are before the window."""
        if self._action != "raise":
            if not self._knows_buffers:
                self._buffers = Buffers(self.context.model.discovery.modules().values())
                self._knows_buffers = True
            self._before = self._buffers.copies()

    def on_backward_start(self, loss: Tensor) -> None:
        """Record a loss and the position of its batch."""
        context = self.context
        self._window.append(_Loss(context.place, context.replica, loss.detach().reshape(())))

    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Check the window; reads a single number if everything is finite."""
        found = self._find(optimizer)
        if found is not None:
            # Other processes may have found nothing; they learn that the update is skipped.
            self._found = found
            self.context.skip_step(f"plugin {self.plug_id!r}: a loss or gradient is not finite")

    def _find(self, optimizer: Optimizer) -> _Report | None:
        losses = [loss.value for loss in self._window] if self._checks != "gradients" else []
        gradients = {
            parameter: _numbers_of(parameter.grad)
            for parameter in (parameters_of(optimizer) if self._checks != "loss" else ())
            if parameter.grad is not None
        }
        numbers = [*losses, get_total_norm(list(gradients.values()))] if gradients else losses
        if math.isfinite(_sum_of(numbers)):
            return None
        bad = [part for part, values in gradients.items() if not values.isfinite().all()]
        if not bad and all(loss.isfinite() for loss in losses):
            # Only their sum overflows.
            return None
        names = name_parameters(self.context.model.discovery.modules(), self.context.optimizers)
        window = [loss._replace(value=loss.value.item()) for loss in self._window]
        return window, [".".join(names.get(part, ("of shape", f"{part.shape}"))) for part in bad]

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Handle the findings of all replicas, in the same way on all processes.

        All processes skip an update or none does, so no communication is needed without a skip.

        Raises:
            UsageError: if something is not finite, with ``action="raise"`` or beyond the limit.
        """
        context = self.context
        if context.is_optimizer_step_committed:
            return
        found = [report for report in context.gather(self._found) if report is not None]
        self._found = None
        if not found:
            return
        text = _describe(context, found)
        if self._action == "raise":
            raise UsageError(
                f"{text} The weights are unchanged. The same command would fail here again: "
                'fix the data or the model, or pass NaNGuard(action="skip").'
            )
        if self._action == "skip" and self._num_in_a_row == self._limit:
            raise UsageError(
                f"{text} The {self._limit} updates before it were skipped too, and NaNGuard(limit="
                f"{self._limit}) allows no more: training does not recover. Go back to an "
                "earlier checkpoint, or lower the learning rate."
            )
        if self._action == "stop":
            context.request_stop(f"NaNGuard: {text}")
        self._has_skipped = True
        self.num_skipped += 1
        self._buffers.put(self._before)
        _LOGGER.warning("%s The update is skipped (number %d).", text, self.num_skipped)

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Close the window.

        Raises:
            UsageError: if the model makes its updates itself, so that they cannot be checked
                before.
        """
        if self.context._run.is_manual:
            raise UsageError(
                "NaNGuard must come with a train_step that returns the loss, but it returns None: "
                "the model has made its update already. Check the loss there, or return it."
            )
        self._num_in_a_row = self._num_in_a_row + 1 if self._has_skipped else 0
        self._has_skipped = False
        self._window.clear()

    def teardown(self) -> None:
        """Release the buffers."""
        self._buffers, self._before, self._knows_buffers = Buffers(), [], False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; no window is open when a checkpoint is taken."""
        return {"num_skipped": self.num_skipped, "num_in_a_row": self._num_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.num_skipped = state_dict["num_skipped"]
        self._num_in_a_row = state_dict["num_in_a_row"]


def _sum_of(numbers: list[Tensor]) -> float:
    """Return the sum of some zero-dimensional tensors; waits for the device once."""
    if not numbers:
        return 0.0
    return torch.stack([number.to(numbers[0].device) for number in numbers]).sum().item()


def _numbers_of(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)


def _describe(context: Context, found: Iterable[_Report]) -> str:
    """Describe what is not finite, by the reports of all processes, and where it comes from."""
    state = context.state
    losses = [loss for window, _ in found for loss in window]
    losses.sort(key=lambda loss: (loss.place.epoch, loss.place.batch, loss.replica))
    bad = [loss for loss in losses if not math.isfinite(loss.value)]
    names = sorted({name for _, each in found for name in each})
    shown = some_text((_name(context, loss) for loss in bad or losses), _MOST)
    text = (
        f"A loss or gradient is not finite in epoch {state.global_epoch}, iteration "
        f"{state.global_iteration}. Loss: {shown}."
    )
    return f"{text} Gradients: {some_text(names, _MOST)}." if names else text


def _name(context: Context, loss: _Loss) -> str:
    place, indices = loss.place, context.indices_of(loss.place)
    samples = "unknown samples (the sampler has a state)"
    if indices is not None:
        size = len(indices) // context.num_replicas
        own = indices[loss.replica * size : (loss.replica + 1) * size]
        numbers = [index.item() if isinstance(index, Tensor) else index for index in own]
        samples = f"samples {some_text(numbers, _MOST)}"
    return f"{loss.value} of batch {place.batch} (from 0) of epoch {place.epoch + 1}, {samples}"
