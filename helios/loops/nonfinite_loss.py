"""The first loss of a start that is not finite: one warning, and a line in the summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from helios.plugins.nonfinite_report import name_moment
from helios.session import Session

_LOGGER = logging.getLogger(__name__)


def name_nonfinite(session: Session, losses: Mapping[str, Any], *, waits: bool) -> None:
    """Warn of the first loss that is not finite, and note it for the summary.

    Args:
        session: the run.
        losses: numbers or tensors of one element.
        waits: whether to wait for losses on an accelerator, which are not looked at otherwise.
    """
    if session.nonfinite:
        return
    for name, loss in losses.items():
        if isinstance(loss, Tensor):
            if loss.ndim or not (loss.is_cpu or waits):
                continue
            loss = loss.item()
        # Neither is the difference of two infinities.
        if isinstance(loss, float) and loss - loss != 0:
            place = name_moment(session.state)
            session.nonfinite = f"{name} was {loss} ({place})"
            _LOGGER.warning(
                "%s is %s in %s, and no warning follows for later ones. The plugin NaNGuard names "
                "the samples, and keeps such losses from the weights.",
                name,
                loss,
                place,
            )
            return
