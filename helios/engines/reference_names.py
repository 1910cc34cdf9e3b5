"""Names the replacement of each engine class of the reference.

Its nine classes combined the ways to distribute work with the ways to compute. Here these are
arguments of one engine, so the names are gone, and importing one raises an error with the remedy.
"""

from __future__ import annotations

from typing import NoReturn

_ALONE = "Engine(device)"
_SHARED = (
    "Engine(device), and a process for each GPU: Trainer(nproc=...), torchrun, or all GPUs that "
    "there are"
)
_FP16 = "precision=Precision.FP16, or BF16, which needs no scaling"
_APEX = f"{_FP16} (Apex is no longer maintained; for its O2 and O3 use a model in .bfloat16())"

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
"""The replacement of each of the nine engines."""


def explain(name: str) -> str:
    """Return the replacement of an engine that is given by name.

    Example:
        >>> explain("DeviceEngine")
        'Use helios.engines.engine.Engine instead of DeviceEngine: Engine(device).'
    """
    if name in REPLACEMENTS:
        return f"Use helios.engines.engine.Engine instead of {name}: {REPLACEMENTS[name]}."
    return (
        "The only engine class is helios.engines.engine.Engine: pass an instance of it or of a "
        "subclass, such as Engine.auto(precision=...)."
    )


def refuse_engine_name(name: str) -> NoReturn:
    """Refuse an attribute of ``helios.engines``, and name the replacement of an engine.

    Raises:
        ImportError: for one of the nine names.
        AttributeError: for any other name.
    """
    if name in REPLACEMENTS:
        raise ImportError(f"helios.engines has no {name}. {explain(name)}", name="helios.engines")
    raise AttributeError(f"module 'helios.engines' has no attribute {name!r}")
