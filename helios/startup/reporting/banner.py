"""The banner: versions, the device, the run, and its level of reproducibility."""

from __future__ import annotations

import logging
from typing import Any

import torch

from helios.core.utils import get_env_info_str
from helios.engines.engine import Engine
from helios.model.model import Model
from helios.model.schedulers import find_epoch_like
from helios.schedule import Schedule

_LOGGER = logging.getLogger(__name__)


def machine(engine: Engine) -> dict[str, str]:
    """Return what the bits of the arithmetic depend on, besides the run."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": str(torch.__version__), "device": name}


def warn_of_other_machine(stored: dict[str, str], engine: Engine) -> None:
    """Warn if hardware or PyTorch have changed, so that equal bits are not guaranteed."""
    changed = [
        f"{name} {stored[name]} -> {value}"
        for name, value in machine(engine).items()
        if name in stored and stored[name] != value
    ]
    if changed:
        _LOGGER.warning(
            "The run resumes where equal bits are not guaranteed: %s. Order and randomness stay "
            "exact; arithmetic may differ in the last bits.",
            ", ".join(changed),
        )


def describe_schedulers(model: Model, schedule: Schedule) -> dict[str, str]:
    """Return a line about schedulers that seem to count epochs, but count steps; or nothing."""
    if not schedule.is_by_epoch:
        return {}
    schedulers = model.discovery.schedulers()
    found = find_epoch_like(schedulers, model.scheduler_interval, schedule.total_steps)
    if not found:
        return {}
    names, intervals = ", ".join(found), dict.fromkeys(found, "epoch")
    text = (
        f"{names}: stepped after every optimizer step, not after every epoch. For epochs, set "
        f"Model.scheduler_interval = {intervals}"
    )
    return {"schedulers": text}


def show_banner(model: Model, lines: dict[str, Any], *, where: str | None) -> None:
    """Log the banner, with what the model appends to it.

    Args:
        model: may append to the banner.
        lines: facts of this run, by label.
        where: the checkpoint that the run resumes from; ``None`` for a first start.
    """
    facts = {"start": "from the beginning" if where is None else f"resumed from {where}", **lines}
    text = "\n".join([get_env_info_str(), *(f"{label}: {fact}" for label, fact in facts.items())])
    _LOGGER.info("%s", model.append_to_banner(text))
