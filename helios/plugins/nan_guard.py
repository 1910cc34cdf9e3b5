"""``NaNGuard``: keep losses and gradients that are not finite from reaching the weights.

Losses are recorded without waiting for the device. At each update, one number is read that says
whether all losses and gradients are finite; the causes are searched for only if they are not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.sharded_tensors import local_of
from helios.core.utils import parameters_of
from helios.core.wrappers import BareNames
from helios.errors import ArgumentError, UsageError
from helios.hooks.context import Context
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import Cursor, TrainingState
from helios.state_graph.rollback import BufferCopies
from helios.text import with_step

_LOGGER = logging.getLogger(__name__)

_ACTIONS = ("raise", "skip", "stop")
_CHECKS = ("loss", "gradients", "both")
_LIMIT = 10
_MOST_SAMPLES = _MOST_NAMES = 5


class _Note(NamedTuple):
    """One backward of the open window."""

    place: Cursor
    replica: int
    loss: Tensor


class _BadLoss(NamedTuple):
    """A loss that is not finite.

    Attributes:
        place: position of its batch.
        replica: the replica.
        value: its value.
    """

    place: Cursor
    replica: int
    value: float


class _Report(NamedTuple):
    """What is not finite in a window.

    Attributes:
        losses: the losses.
        gradients: names of parameters, by their number in the optimizer.
    """

    losses: list[_BadLoss]
    gradients: dict[int, str]

    @property
    def is_empty(self) -> bool:
        """Whether everything is finite."""
        return not (self.losses or self.gradients)


@PLUGIN_REGISTRY.register
class NaNGuard(Plugin):
    """Checks that losses and gradients are finite before they reach the weights.

    The message names the epoch, the iteration, the batches, the indices of their first five samples
    and the parameters. Losses are those on which Helios does backward; gradients are those of the
    whole window, averaged and not yet clipped. In manual mode only ``model.loss_items`` can be
    checked, after the model has made its update, so ``action="skip"`` and ``checks="gradients"``
    are errors there.

    A skipped update is discarded with its gradients: schedulers and, in ITERATION unit,
    ``current_iteration`` do not advance, and what was due at that count is not repeated. The
    buffers of all networks are restored to their values at the start of the window, because a
    running average of BatchNorm would keep the NaN; ``"skip"`` and ``"stop"`` keep a copy for this.

    With several replicas, one of them is enough: all processes skip the update, with the same
    message. As long as everything is finite, this costs no communication.

    Args:
        action: ``"raise"`` an error; ``"skip"`` the update, with a warning, and continue;
            ``"stop"``: skip it and end the run regularly.
        checks: ``"loss"``, ``"gradients"`` or ``"both"``.
        limit: maximum number of skipped windows in a row with ``"skip"``, 10 by default; one more
            is an error.
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
        "_action _buffers _found _has_skipped _keeps_buffers _knows_manual _limit "
        "_num_in_a_row _sees_gradients _sees_losses _window num_skipped"
    )

    def __init__(
        self,
        action: Literal["raise", "skip", "stop"] = "raise",
        checks: Literal["loss", "gradients", "both"] = "both",
        *,
        limit: int | None = None,
        plug_id: str = "nan-guard",
    ) -> None:
        super().__init__(plug_id)
        for name, value, known in (("action", action, _ACTIONS), ("checks", checks, _CHECKS)):
            if value not in known:
                raise ArgumentError(
                    f"NaNGuard({name}=...) must be one of {', '.join(known)}, got {value!r}. "
                    f"Omit it for {known[0] if name == 'action' else known[-1]!r}."
                )
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ArgumentError(
                f"NaNGuard(limit=...) must be None or a positive int, got {limit!r}. Pass the "
                "number of windows in a row that may be skipped."
            )
        if limit is not None and action != "skip":
            _LOGGER.warning('NaNGuard(limit=...) has no effect without action="skip".')
        self._action = action
        self._sees_losses = checks != "gradients"
        self._sees_gradients = checks != "loss"
        self._limit = limit or _LIMIT
        self._buffers = BufferCopies()
        self.num_skipped = 0
        self._num_in_a_row = 0
        self._forget()

    def _forget(self) -> None:
        self._window: list[_Note] = []
        self._found: _Report | None = None
        self._has_skipped = False
        self._knows_manual = False
        self._keeps_buffers = self._action != "raise"
        self._buffers.forget()

    def setup(self) -> None:
        """Start without counts; a checkpoint restores them."""
        self.num_skipped = self._num_in_a_row = 0
        self._forget()

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Find the buffers again: a hook may have changed the networks."""
        self._buffers.look_again()

    def on_training_step_start(self, state: TrainingState) -> None:
        """Keep the buffers as they are before the window."""
        if self._keeps_buffers:
            self._buffers.keep(self.context.model.discovery.modules)

    def on_backward_start(self, loss: Tensor) -> None:
        """Record a loss and the position of its batch."""
        context = self.context
        self._window.append(_Note(context.place, context.replica, loss.detach().reshape(())))

    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Check the window; reads a single number if everything is finite."""
        if self._seems_finite(optimizer):
            return
        found = self._find(optimizer)
        if found.is_empty:
            return
        # Other processes may have found nothing; they learn that the update is skipped.
        self._found = found
        self.context.skip_step(f"plugin {self.plug_id!r}: a loss or gradient is not finite")

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Handle what any replica has found, in the same way on all processes.

        All processes skip an update or none does, so no communication is needed if it was made.

        Raises:
            UsageError: if something is not finite and ``action`` says so.
        """
        context = self.context
        if context.is_optimizer_step_committed:
            return
        found = _merge_reports(context.gather(self._found))
        self._found = None
        if not found.is_empty:
            self._act(_describe(self.context, found, self._window))

    def _act(self, text: str) -> None:
        """Raise, or report the skipped update, as ``action`` says."""
        if self._action == "raise":
            raise UsageError(
                f"{text} The weights are unchanged. The same command would fail here again: "
                'correct the data or the model, or pass NaNGuard(action="skip").'
            )
        if self._action == "stop":
            self._request_stop()
        self._skip(text)

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Check the losses of a manual step, whose update was made already.

        Raises:
            UsageError: if one is not finite and ``action`` says so, or for invalid options.
        """
        context = self.context
        if context._run.attached_loss is not None:
            return
        if not self._knows_manual:
            self._knows_manual = True
            self._settle_manual()
        bad = self._bad_items()
        if not bad:
            return
        text = (
            f"In {_name_iteration(context.state)} not finite: the losses {', '.join(bad)} of "
            f"{_name_batch(context, context.place)}. The model has made its update itself, so "
            "the weights may be damaged."
        )
        if self._action == "raise":
            raise UsageError(f"{text} Go back to an earlier checkpoint.")
        self._request_stop()
        _LOGGER.warning("%s The run is ended.", text)

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Close the window."""
        if not self._has_skipped:
            self._num_in_a_row = 0
        self._has_skipped = False
        self._window.clear()

    def teardown(self) -> None:
        """Release losses and buffers."""
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; no window is open when a checkpoint is taken."""
        return {"num_skipped": self.num_skipped, "num_in_a_row": self._num_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.num_skipped = state_dict["num_skipped"]
        self._num_in_a_row = state_dict["num_in_a_row"]

    def _seems_finite(self, optimizer: Optimizer) -> bool:
        """Whether losses and gradients are finite; False also if only their sum overflows."""
        values = [note.loss for note in self._window] if self._sees_losses else []
        if self._sees_gradients:
            gradients = [
                local_of(part.grad) for part in parameters_of(optimizer) if part.grad is not None
            ]
            if any(gradient.is_sparse for gradient in gradients):
                gradients = list(map(_numbers_of, gradients))
            if gradients:
                with torch.no_grad():
                    values += torch._foreach_norm(gradients)  # noqa: SLF001 - one pass over all
        return _are_finite(values)

    def _skip(self, text: str) -> None:
        if not self._has_skipped:
            self._has_skipped = True
            self._num_in_a_row += 1
        if self._action == "skip" and self._num_in_a_row > self._limit:
            raise UsageError(
                f"{text} This is window number {self._num_in_a_row} in a row, and "
                f"NaNGuard(limit={self._limit}) allows no more to be skipped: the training does "
                "not recover. Go back to an earlier checkpoint, or lower the learning rate."
            )
        self.num_skipped += 1
        self._buffers.put_back()
        _LOGGER.warning(
            "%s The update is skipped: window number %d in a row, update number %d in all.%s",
            text,
            self._num_in_a_row,
            self.num_skipped,
            " The run is ended." if self._action == "stop" else "",
        )

    def _request_stop(self) -> None:
        self.context.request_stop(
            f"NaNGuard: a loss or gradient was not finite ({_name_iteration(self.context.state)})"
        )

    def _find(self, optimizer: Optimizer) -> _Report:
        """Look for values that are not finite; the report is empty if there are none."""
        bad = [note for note in self._window if self._sees_losses and not _is_fine(note.loss)]
        return _Report(
            [_BadLoss(note.place, note.replica, note.loss.item()) for note in bad],
            self._name_gradients(optimizer) if self._sees_gradients else {},
        )

    def _name_gradients(self, optimizer: Optimizer) -> dict[int, str]:
        names = {
            id(parameter): f"{path}.{bare.of(name)}"
            for path, network in self.context.model.discovery.modules().items()
            for bare in (BareNames(network),)
            for name, parameter in network.named_parameters()
        }
        return {
            number: names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
            for number, parameter in enumerate(parameters_of(optimizer))
            if parameter.grad is not None and not _is_fine(_numbers_of(parameter.grad))
        }

    def _settle_manual(self) -> None:
        """Report options that cannot work because the model steps its optimizers itself."""
        self._keeps_buffers = False
        self._buffers.forget()
        why = "train_step returns None, so the model makes its updates itself"
        if self._action == "skip":
            raise UsageError(
                f'NaNGuard(action="skip") must come with a train_step that returns the loss, but '
                f'{why}. Skip the update there, or pass action="raise" or "stop".'
            )
        if not self._sees_losses:
            raise UsageError(
                f'NaNGuard(checks="gradients") must come with a train_step that returns the loss, '
                f'but {why}. Check the gradients there, or pass checks="loss".'
            )
        if self._sees_gradients:
            _LOGGER.warning(
                "Plugin %r checks the losses in loss_items only, after the update: %s.",
                self.plug_id,
                why,
            )
        if not self.context.model.loss_items:
            _LOGGER.warning(
                "Plugin %r has nothing to check: the model puts no loss into loss_items.",
                self.plug_id,
            )

    def _bad_items(self) -> list[str]:
        """Return which losses of the current batch are not finite; reads the device once."""
        items = self.context.model.loss_items.items()
        tensors = {name: item.detach() for name, item in items if isinstance(item, Tensor)}
        bad = [name for name, item in items if _is_bad_number(item)]
        if not _are_finite([tensor.sum() for tensor in tensors.values()]):
            bad += [name for name, tensor in tensors.items() if not _is_fine(tensor)]
        return bad


def _are_finite(values: list[Tensor]) -> bool:
    """Whether the sum of some zero-dimensional tensors is finite; waits for the device once."""
    if not values:
        return True
    device = values[0].device
    if any(value.device != device for value in values):
        values = [value.to(device) for value in values]
    return math.isfinite(torch.stack(values).sum().item())


def _is_bad_number(item: object) -> bool:
    return isinstance(item, int | float) and not math.isfinite(item)


def _is_fine(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _numbers_of(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)


def _merge_reports(findings: Iterable[_Report | None]) -> _Report:
    """Merge the reports of several processes, in the order of batches and replicas."""
    found = [part for part in findings if part is not None]
    losses = [loss for part in found for loss in part.losses]
    losses.sort(key=lambda loss: (*_key(loss.place), loss.replica))
    # Gradients are sums over all replicas, of which a process may hold only a shard.
    gradients = {number: name for part in found for number, name in part.gradients.items()}
    return _Report(losses, dict(sorted(gradients.items())))


def _describe(context: Context, found: _Report, window: Iterable[_Note]) -> str:
    """Describe what is not finite, and which samples it may come from.

    Args:
        context: the run.
        found: the report.
        window: the backwards of the window, for gradients that may come from any of them.
    """
    bad: dict[tuple[int, int], dict[int, _BadLoss]] = {}
    for loss in found.losses:
        bad.setdefault(_key(loss.place), {})[loss.replica] = loss
    parts = [_name_losses(context, list(losses.values())) for losses in bad.values()]
    if found.gradients:
        names = list(found.gradients.values())
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        parts.append(f"the gradients of {', '.join(names[:_MOST_NAMES])}{more}")
    if not bad:
        places = {_key(note.place): note.place for note in window}
        batches = " and ".join(_name_batch(context, place) for place in places.values())
        parts[-1] += f", which come from {batches}"
    return f"In {_name_iteration(context.state)} not finite: {', and '.join(parts)}."


def _name_iteration(state: TrainingState) -> str:
    """Return the epoch and iteration for messages, with the step at its end."""
    step = state.global_step + (state.is_step_boundary and state.is_step_committed)
    iteration = with_step(state.global_iteration, step)
    return f"epoch {state.global_epoch}, iteration {iteration}"


def _name_batch(context: Context, place: Cursor, replica: int = 0) -> str:
    """Return the name of a batch for messages, with its first samples, beginning with a replica."""
    text = f"batch {place.batch} (from 0) of epoch {place.epoch + 1}"
    found = context.indices_of(place)
    if found is None:
        return f"{text}, samples unknown (the sampler has a state)"
    whose = context.choose("", f" (those of replica {replica} first)")
    indices = [index.item() if isinstance(index, Tensor) else index for index in found]
    start = replica * (len(indices) // context.num_replicas)
    shown = ", ".join(map(str, [*indices[start:], *indices[:start]][:_MOST_SAMPLES]))
    more = len(indices) - _MOST_SAMPLES
    return f"{text}, samples{whose} {shown}{f' and {more} more' if more > 0 else ''}"


def _name_losses(context: Context, losses: list[_BadLoss]) -> str:
    """Name the bad losses of one batch."""
    text: str = context.choose(_name_only_loss, _name_by_replica)(
        _name_batch(context, losses[0].place, losses[0].replica), losses
    )
    return text


def _name_only_loss(batch: str, losses: list[_BadLoss]) -> str:
    (loss,) = losses
    return f"the loss of {batch} ({loss.value})"


def _name_by_replica(batch: str, losses: list[_BadLoss]) -> str:
    owners = " and ".join(f"of replica {loss.replica} ({loss.value})" for loss in losses)
    return f"the loss {owners} in {batch}"


def _key(place: Cursor) -> tuple[int, int]:
    return place.epoch, place.batch
