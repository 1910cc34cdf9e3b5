"""Plugins: the base class, and the built-in plugins."""

from helios.hooks.events import asks_nothing
from helios.plugins.averaging import EMA, SWA
from helios.plugins.channels import HookContext, HookHandle, PipelineHooks
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.metrics import Metrics
from helios.plugins.monitors import GradientNormMonitor, LearningRateMonitor
from helios.plugins.nan_guard import NaNGuard
from helios.plugins.plugin import (
    PLUGIN_REGISTRY,
    CUDAPlugin,
    Plugin,
    UniquePluginOverrides,
    create_plugin,
)
from helios.plugins.profiler import Profiler
from helios.plugins.row_loggers import CSVLogger, JSONLLogger
from helios.plugins.server_loggers import MlflowLogger, WandbLogger
from helios.plugins.time_limit import TimeLimit

__all__ = [
    "CSVLogger",
    "CUDAPlugin",
    "EMA",
    "EarlyStopping",
    "GradientNormMonitor",
    "HookContext",
    "HookHandle",
    "JSONLLogger",
    "LearningRateMonitor",
    "Metrics",
    "MlflowLogger",
    "NaNGuard",
    "PLUGIN_REGISTRY",
    "PipelineHooks",
    "Plugin",
    "Profiler",
    "SWA",
    "TimeLimit",
    "UniquePluginOverrides",
    "WandbLogger",
    "asks_nothing",
    "create_plugin",
]
