"""What users attach to a training: plugins.

Nothing here may import more than hooks and what lies below.
"""

from helios.plugins.cuda import CUDAPlugin
from helios.plugins.plugin import (
    PLUGIN_REGISTRY,
    Plugin,
    UniquePluginOverrides,
    create_plugin,
)

__all__ = ["CUDAPlugin", "PLUGIN_REGISTRY", "Plugin", "UniquePluginOverrides", "create_plugin"]
