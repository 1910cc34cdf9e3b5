"""Calls a step of the model, between the events of the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helios.core.loss_means import WeightedLoss
from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.model.processor import Processed
from helios.session import Session

_CONTRACT = (
    "train_step must return a scalar loss tensor, a WeightedLoss, a dict with one of them under "
    "'loss' (or yield such losses), or None when the model does backward and steps its optimizers "
    "itself"
)


def take_step(session: Session, step: str, batch: Any, *args: Any, has_begun: bool = False) -> Any:
    """Run a step of the model on a batch that is on the device; returns what it returned.

    Args:
        session: the run.
        step: the name of the step, such as ``"train_step"``.
        batch: the batch; a batch processor's transforms are applied to it here.
        args: arguments of the step after the batch.
        has_begun: whether :func:`begin_forward` has been called and has returned this batch.
    """
    if not has_begun:
        batch = begin_forward(session, batch)
    if session.is_plain:
        return session.hooks.active[step](batch, *args)
    with session.engine.autocast():
        return session.hooks.call(step, batch, *args)


def begin_forward(session: Session, batch: Any) -> Any:
    """Emit the start of a forward pass; returns the batch with the processor's transforms."""
    processor = session.model.batch_processor
    if processor is not None:
        batch = processor._transform(batch)
    session.batch = batch
    if "on_forward_start" in session.hooks.active:
        session.hooks.emit("on_forward_start", session.context)
        record_changes(session, "on_forward_start")
    return batch


def record_changes(session: Session, hook: str) -> None:
    """Note what a hook has changed in the turn of a replica, if that is watched."""
    if session.turns.watch is not None:
        session.turns.watch.conclude(hook)


def end_forward(session: Session, result: Any, loss: Tensor | WeightedLoss | None) -> None:
    """Emit the end of a forward pass, with its outputs and its loss in the context."""
    session.model_outputs = result.outputs if isinstance(result, Processed) else result
    session.attached_loss = loss.mean if isinstance(loss, WeightedLoss) else loss
    if "on_forward_end" in session.hooks.active:
        session.hooks.emit("on_forward_end", session.context)
        record_changes(session, "on_forward_end")


def losses_in(result: Any) -> dict[str, Tensor]:
    """Return the losses in what a training step returned, by name."""
    if isinstance(result, Processed):
        result = result.loss
    weighted = weighted_in(result)
    if weighted is not None:
        result = {**(result if isinstance(result, dict) else {}), "loss": weighted.sum}
    if isinstance(result, Tensor):
        return {"loss": result}
    if odd := [name for name, value in result.items() if isinstance(value, WeightedLoss)]:
        raise UsageError(
            f"A WeightedLoss must be under 'loss', got it under {', '.join(map(repr, odd))}. A "
            "window has one sum of weights: add the sums up under 'loss'."
        )
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, Tensor) and value.requires_grad and value.numel() == 1
    }


def weighted_in(result: Any) -> WeightedLoss | None:
    """Return the loss in what a training step returned, if it has a weight."""
    loss = result.loss if isinstance(result, Processed) else result
    if isinstance(loss, dict):
        loss = loss.get("loss")
    return loss if isinstance(loss, WeightedLoss) else None


def loss_of(result: Any, *, takes_several: bool = False, is_yielded: bool = False) -> Tensor | None:
    """Return the loss in what a training step returned; ``None`` for a manual step.

    Args:
        result: what it returned.
        takes_several: whether a dict without ``"loss"`` stands for the sum of its losses.
        is_yielded: whether the step has yielded it, so that ``None`` is an error.

    Raises:
        UsageError: if it is none.
    """
    loss = result.loss if isinstance(result, Processed) else result
    if loss is None and not is_yielded:
        return None
    if isinstance(loss, dict) and "loss" in loss:
        loss = loss["loss"]
    elif isinstance(loss, dict) and takes_several and (losses := losses_in(loss)):
        loss = torch.stack([each.reshape(()) for each in losses.values()]).sum()
    if not isinstance(loss, Tensor):
        loss = _sum_of(loss)
    if type(loss) is not Tensor and is_sharded(loss):
        raise UsageError(
            "A loss must not be computed of sharded parameters outside of a forward, where they "
            "are not whole, but train_step has returned such a loss. Compute the penalty in the "
            "forward of the module that holds the parameters."
        )
    if loss.numel() != 1:
        raise make_loss_error(loss)
    return loss


def make_loss_error(loss: Tensor) -> UsageError:
    """Make the error for a tensor of several elements, or one without a graph."""
    return UsageError(
        f"{_CONTRACT}; got a tensor of shape {tuple(loss.shape)} with requires_grad="
        f"{loss.requires_grad}. Reduce it (loss.mean()) and do not detach it."
    )


def _sum_of(loss: Any) -> Tensor:
    """Return the sum of a loss with a weight, which is the only other one that there may be."""
    if isinstance(loss, WeightedLoss):
        return loss.sum
    shown = "None" if loss is None else type(loss).__name__
    if isinstance(loss, dict):
        shown = (
            f"a dict of {', '.join(map(repr, loss)) or 'nothing'}. Add the losses up under "
            "'loss', or override Model.backward(losses) to make one gradient of several"
        )
    raise UsageError(f"{_CONTRACT}, got {shown}.")
