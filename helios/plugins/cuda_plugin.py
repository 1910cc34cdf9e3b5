"""``CUDAPlugin``, a historical name: the engine moves batches now."""

from __future__ import annotations

from helios.core.cuda import requires_cuda_support
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin


@PLUGIN_REGISTRY.register
class CUDAPlugin(Plugin):
    """Accepted for scripts of Helios 1: ``Model.batch_to_device`` moves batches.

    Raises:
        RuntimeError: without CUDA.
    """

    plugin_id = "cuda"

    def __init__(self) -> None:
        requires_cuda_support()
        super().__init__(self.plugin_id)

    def setup(self) -> None:
        """Nothing to prepare."""
