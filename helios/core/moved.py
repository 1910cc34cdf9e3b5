"""Says what replaces modules that only helios-ml had, in the error of their imports.

Python calls this finder after all others, so existing modules are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

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
