"""The banner: versions, the device, the run, and its level of reproducibility."""

from __future__ import annotations

import logging
from typing import Any

import torch

from helios.core.utils import get_env_info_str
from helios.engines.engine import Engine
from helios.model.model import Model

_LOGGER = logging.getLogger(__name__)
# What a resume says once more: the rest is that of the first start, or named where it differs.
_AGAIN = ("run", "seed", "processes", "reproducibility")


def machine(engine: Engine) -> dict[str, str]:
    """Return what the bits of the arithmetic depend on, besides the run."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": str(torch.__version__), "device": name}


def describe_other_machine(stored: dict[str, str], engine: Engine) -> str:
    """Return a sentence if hardware or PyTorch have changed, so that bits may differ; else ""."""
    changed = [
        f"{name} {stored[name]} -> {value}"
        for name, value in machine(engine).items()
        if name in stored and stored[name] != value
    ]
    if not changed:
        return ""
    return (
        f"The run resumes where equal bits are not guaranteed: {', '.join(changed)}. Order and "
        "randomness stay exact; arithmetic may differ in the last bits."
    )


def say_what_does_not_seed(torch_seed: int, seed: int) -> None:
    """Log that a seed which the script has given to PyTorch is not that of the run.

    Args:
        torch_seed: what PyTorch was seeded with.
        seed: the default seed, which the run uses.
    """
    # Without a call, and after a run, PyTorch has a seed of 64 random bits.
    if torch_seed < 1 << 32 and torch_seed != seed:
        _LOGGER.info(
            "PyTorch was seeded with %d (torch.manual_seed), which does not seed the training: it "
            "uses the default seed %d. Pass Trainer(random_seed=%d).",
            torch_seed,
            seed,
            torch_seed,
        )


def show_banner(model: Model, lines: dict[str, Any], *, where: str | None) -> None:
    """Log the banner, with what the model appends to it; at a resume, one line of it.

    Args:
        model: may append to the banner.
        lines: facts of this run, by label.
        where: the checkpoint that the run resumes from; ``None`` for a first start.
    """
    if where is None:
        facts = {"start": "from the beginning", **lines}
        rows = [get_env_info_str(), *(f"{label}: {fact}" for label, fact in facts.items())]
        text = "\n".join(rows)
    else:
        facts = {label: lines[label] for label in _AGAIN}
        text = "; ".join(f"{label}: {fact}" for label, fact in facts.items())
        text = f"Resumed from {where}; {text}."
    _LOGGER.info("%s", model.append_to_banner(text))
