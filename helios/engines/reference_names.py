"""The engines of the reference by name: what stands for each of them here.

Nine classes crossed the ways to share work with the ways to compute. Here these are arguments of
one engine, so the names are gone; who asks for one is told what to write (E2, E27, E28).
"""

from __future__ import annotations

from typing import NoReturn

_ALONE = "Engine(device)"
_SHARED = (
    "Engine(device), and a process for each GPU: Trainer(nproc=...), torchrun, or all GPUs that "
    "there are"
)
_FP16 = "precision=Precision.FP16, or BF16, which needs no scaling"
_APEX = f"{_FP16} (Apex is no longer maintained; its levels O2 and O3 are a model in .bfloat16())"

REPLACEMENTS = {
    "DeviceEngine": _ALONE,
    "AMPEngine": f"{_ALONE} with {_FP16}",
    "APEXEngine": f"{_ALONE} with {_APEX}",
    "DataParallelEngine": _SHARED,
    "DataParallelAMPEngine": f"{_SHARED}; with {_FP16}",
    "DataParallelApexEngine": f"{_SHARED}; with {_APEX}",
    "DistributedDataParallelEngine": _SHARED,
    "DistributedDataParallelAMPEngine": f"{_SHARED}; with {_FP16}",
    "DistributedDataParallelApexEngine": f"{_SHARED}; with {_APEX}",
}
"""What stands for each of the nine engines."""


def explain(name: str) -> str:
    """Return what to take in the place of an engine that is asked for by name.

    Example:
        >>> explain("DeviceEngine")
        'Take helios.engines.engine.Engine for DeviceEngine: Engine(device).'
    """
    if name in REPLACEMENTS:
        return f"Take helios.engines.engine.Engine for {name}: {REPLACEMENTS[name]}."
    return (
        "There is one class, helios.engines.engine.Engine: pass an object of it, or of a class "
        "derived from it, such as Engine.auto(precision=...)."
    )


def refuse(name: str) -> NoReturn:
    """Refuse an attribute of ``helios.engines``; says what replaces an engine of the reference.

    Raises:
        ImportError: for one of the nine names.
        AttributeError: for any other one.
    """
    if name in REPLACEMENTS:
        raise ImportError(f"helios.engines has no {name}. {explain(name)}", name="helios.engines")
    raise AttributeError(f"module 'helios.engines' has no attribute {name!r}")
