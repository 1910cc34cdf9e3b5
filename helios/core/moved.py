"""Modules of helios-ml that are gone: to import one is an error that says what replaces it.

Python asks a finder for a module after everybody else has failed to find it. So nothing is there
that an editor would offer, and what exists is imported as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

from helios.errors import MovedModuleError

_REGISTRY = "to build one by its name, make a helios.core.registry.Registry of your own"

REPLACEMENTS = {
    "helios.optim": f"Build optimizers of torch.optim in Model.setup(); {_REGISTRY}",
    "helios.scheduler": f"Build those of torch.optim.lr_scheduler in Model.setup(); {_REGISTRY}",
    "helios.nn": f"Take torch.nn, and helios.plugins.EMA for averages of weights; {_REGISTRY}",
    "helios.losses": f"Take the losses of torch.nn; {_REGISTRY}",
    "helios.metrics": (
        "Return {name: (sum, weight)} from valid_step, or give objects of torchmetrics to the "
        "plugin helios.plugins.Metrics"
    ),
    "helios.data.transforms": "Take torchvision.transforms.v2",
    "helios.core.loggers": "Take helios.core.logging",
}
"""What to take in the place of each module."""


@final
class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in REPLACEMENTS:
            # Without a name: "from helios import optim" hides an error about what it looks for.
            raise MovedModuleError(
                f"helios has no module {fullname!r}, which helios-ml had. {REPLACEMENTS[fullname]}."
            )
        return None


def explain_moved_modules() -> None:
    """Let imports of modules that are gone say what replaces them; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
