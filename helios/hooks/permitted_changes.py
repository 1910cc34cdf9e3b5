"""What a hook may change: one table, which the page of events and errors show.

Everything else of the context is only read. A batch or a loss that a hook exchanged there would be
taken by some of Helios, and not by the rest.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from helios.errors import ReadOnlyError


@dataclass(frozen=True)
class Change:
    """A row of the table.

    Attributes:
        what: what a hook may do.
        by: how, in Markdown.
        attributes: what users assign to instead.
    """

    what: str
    by: str
    attributes: tuple[str, ...] = ()


CHANGES = (
    Change(
        "map the batch",
        "return it from `process_*_batch`, in one plugin",
        ("batch", "raw_batch"),
    ),
    Change(
        "change gradients",
        "change `parameter.grad`, from `on_backward_end` to `on_optimizer_step_start`",
    ),
    Change(
        "skip an update",
        "call `self.context.skip_step(reason)`, until `on_optimizer_step_start`",
        ("is_optimizer_step_committed",),
    ),
    Change(
        "stop, interrupt or save",
        "call `request_stop(reason)`, `interrupt(reason)` or `request_checkpoint()`",
        ("max_epoch", "max_step"),
    ),
    Change("log", "call `self.context.log({name: number})`"),
    Change("say that scores are summed", "call `declare_summed(scores)`"),
    Change(
        "change weights, buffers, optimizers and schedulers",
        "change the objects themselves, between updates",
        ("model", "optimizer", "optimizers", "lr_scheduler", "lr_schedulers"),
    ),
    Change(
        "change the loss or the outputs",
        "return others from `train_step`; a hook cannot",
        ("loss", "model_outputs"),
    ),
)


def refuse_assignment(name: str, known: Sequence[str]) -> ReadOnlyError:
    """Make the error for an assignment to the context.

    Args:
        name: the attribute.
        known: the attributes that it has.
    """
    rule = f"context.{name} must not be assigned: hooks only read the context."
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        meant = f" Did you mean to read context.{close[0]}?" if close else ""
        return ReadOnlyError(f"{rule} It has no such attribute.{meant} Keep values in self.{name}.")
    for change in CHANGES:
        if name in change.attributes:
            way = change.by.replace("`", "")
            return ReadOnlyError(f"{rule} To {change.what}, {way}.")
    return ReadOnlyError(f"{rule} Copy the value, and change the copy.")
