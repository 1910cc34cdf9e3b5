"""What is done to a model around its setup."""

from __future__ import annotations

import copy
import inspect

import torch

from helios.errors import ArgumentError, UsageError
from helios.model.model import Model
from helios.model.processor import BatchProcessor


def take_own_processor(model: Model) -> None:
    """Give a model a copy of the processor that its class names.

    As an attribute its state is saved. A copy, so that models of one class do not share it: what
    another one has done in this process would not be there in the next.

    Raises:
        ArgumentError: if it cannot be copied.
    """
    named = inspect.getattr_static(model, "batch_processor")
    if "batch_processor" in vars(model) or not isinstance(named, BatchProcessor):
        return
    try:
        model.batch_processor = copy.deepcopy(named)
    except Exception as error:
        raise ArgumentError(
            f"{type(model).__name__}.batch_processor must be one that can be copied, as each model "
            f"gets its own, but copy.deepcopy failed: {error!r}. Assign self.batch_processor in "
            "setup() instead."
        ) from error


def move_networks(model: Model, device: torch.device) -> None:
    """Move the networks that a setup has made to the device of the engine.

    Those that lie there are left, and so is everything on a CPU.

    Raises:
        UsageError: where the device makes new parameters of them, which optimizers do not know.
    """
    if device.type == "cpu":
        return
    for path, network in model.discovery.modules().items():
        before = list(network.parameters())
        network.to(device)
        if any(old is not new for old, new in zip(before, network.parameters(), strict=True)):
            raise UsageError(
                f"The network {path!r} gets new parameters on {device}, which optimizers that "
                "were built before do not know. Build it there: .to(self.device) in Model.setup()."
            )
