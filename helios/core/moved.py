"""Says what replaces modules and engines that only helios-ml had, in the error of their imports.

Python calls the finder after all others, so existing modules are not affected. The nine engines
combined the ways to distribute work with the ways to compute. Here these are arguments of one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn, final

from helios.errors import MovedModuleError

_REGISTRY = "to build them by name, create your own helios.core.registry.Registry"

REPLACEMENTS = {
    "helios.optim": f"Create optimizers of torch.optim in Model.setup(); {_REGISTRY}",
    "helios.scheduler": (
        f"Create schedulers of torch.optim.lr_scheduler in Model.setup(); {_REGISTRY}"
    ),
    "helios.nn": f"Use torch.nn, and helios.plugins.EMA for averages of weights; {_REGISTRY}",
    "helios.losses": f"Use the losses of torch.nn; {_REGISTRY}",
    "helios.metrics": (
        "Return {name: (sum, weight)} from valid_step, or pass torchmetrics objects to the "
        "plugin helios.plugins.Metrics"
    ),
    "helios.data.transforms": "Use torchvision.transforms.v2",
    "helios.core.loggers": "Use helios.core.logging",
}
"""The replacement of each module of helios-ml."""


@final
class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in REPLACEMENTS:
            # Without ``name=``: "from helios import optim" hides an error that names the module.
            raise MovedModuleError(
                f"Helios has no module {fullname!r}, which helios-ml had. {REPLACEMENTS[fullname]}."
            )
        return None


def install_moved_modules() -> None:
    """Install the import finder for such modules; does nothing if it is installed already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


_ALONE = "Engine(device)"
_SHARED = (
    "Engine(device), and a process for each GPU: Trainer(nproc=...), torchrun, or all GPUs that "
    "there are"
)
_FP16 = "precision=Precision.FP16, or BF16, which needs no scaling"
_APEX = f"{_FP16} (Apex is no longer maintained; for its O2 and O3 use a model in .bfloat16())"

ENGINES = {
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
    if name in ENGINES:
        return f"Use helios.engines.engine.Engine instead of {name}: {ENGINES[name]}."
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
    if name in ENGINES:
        raise ImportError(f"helios.engines has no {name}. {explain(name)}", name="helios.engines")
    raise AttributeError(f"module 'helios.engines' has no attribute {name!r}")
