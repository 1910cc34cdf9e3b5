"""Handles imports of modules that were moved or removed.

Importing an old path of Helios returns the module at its present path, the same object, with a
``DeprecationWarning``. Importing a module that only helios-ml had raises an error that names the
replacement. Python calls this finder after all others, so existing modules are not affected.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
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


_NEW_NAMES = {
    "core": {
        "buffers": "storage.staging",
        "codec": "storage.codec",
        "converters": "storage.type_converters",
        "declared": "core.unsaved_attributes",
        "digest": "storage.digest",
        "files": "storage.files",
        "garbage": "core.gc_pause",
        "group": "distributed.process_groups",
        "lock": "storage.folder_lock",
        "named": "storage.user_types",
        "progress": "terminal.progress",
        "records": "storage.archive_records",
        "rows": "storage.row_file",
        "screen": "terminal.screen",
        "sharing": "storage.shared_storages",
        "signals": "core.signal_watch",
        "tagged": "storage.weights_only",
        "tensorboard": "storage.tensorboard_writer",
        "transfer": "distributed.pickling",
        "unknown": "storage.placeholders",
    },
    "engines": {
        "assignment": "replicas.assignment",
        "buffers": "replicas.module_buffers",
        "children": "launch.worker",
        "collectives": "engines.metric_sync",
        "experiment_parts": "engines.components",
        "experiment_state": "engines.components",
        "flat": "replicas.flat_gradients",
        "gradients": "replicas.gradients",
        "handover": "launch.ipc",
        "launch": "launch.launcher",
        "manual_join": "engines.process_member",
        "message": "replicas.messages",
        "names": "engines.reference_names",
        "packing": "engines.components",
        "peer": "engines.process_member",
        "processes": "engines.process_member",
        "ranks": "replicas.messages",
        "reduce": "replicas.tree_reducer",
        "replicated": "replicas.replicas",
        "sending": "replicas.gradients",
        "sharing": "replicas.window_exchange",
        "supervisor": "launch.supervisor",
        "tables": "replicas.named_sums",
        "tree": "replicas.reduction_tree",
        "turns": "replicas.turns",
        "wrapping": "engines.data_parallel",
    },
    "checkpoint": {
        "layout": "checkpoint.file_names",
        "level": "checkpoint.reproducibility",
        "live": "hooks.live_run",
        "migrating": "migration.folder_migration",
        "migrations": "checkpoint.schema_upgrades",
        "old_files": "migration.helios_ml",
        "space": "checkpoint.disk_space",
    },
    "data": {
        "deal": "data.sharding_plan",
        "drawn": "data.replayed_sampler",
        "foreign": "data.external_loader",
        "generators": "data.sampler_generators",
        "identity": "data.fingerprint",
        "legacy": "data.numpy_global_rng",
        "limited": "data.truncated",
        "passes": "data.interfaces",
        "several": "data.multi_loader",
        "share": "data.shard",
        "trial": "data.loader_state_check",
    },
    "run_state": {
        "bits": "storage.checksums",
        "blocks": "run_state.shared_views",
        "classes": "run_state.class_attributes",
        "coverage": "run_state.state_dict_coverage",
        "data_members": "run_state.dataset_attributes",
        "effects": "run_state.step_effects",
        "forms": "run_state.tensor_formats",
        "found": "run_state.walk_result",
        "hooks": "run_state.registered_hooks",
        "links": "run_state.shared_containers",
        "look": "run_state.value_scan",
        "losses": "run_state.missing_state",
        "marks": "run_state.value_hash",
        "members": "run_state.attribute_rules",
        "names": "run_state.object_names",
        "networks": "run_state.network_parts",
        "obstacles": "run_state.unsupported_values",
        "omissions": "run_state.custom_state_dicts",
        "owners": "run_state.owner_states",
        "parts": "run_state.module_state",
        "scene": "run_state.owner_scan",
        "scripted": "run_state.torchscript",
        "size": "run_state.state_size",
        "ties": "run_state.tied_tensors",
        "values": "run_state.plain_values",
    },
    "plugins": {
        "buffers": "plugins.window_buffers",
        "cuda": "plugins.cuda_plugin",
        "findings": "plugins.nonfinite_report",
        "holders": "plugins.metric_state",
        "intake": "plugins.metric_inputs",
        "states": "plugins.plugin_states",
        "trials": "plugins.quick_trials",
        "weights": "plugins.averaged_weights",
    },
    "loops": {
        "even": "loops.uneven_inputs",
        "states": "loops.loop_states",
        "trial": "loops.sanity_validation",
    },
    "model": {
        "trace": "model.snapshot",
    },
    "startup": {
        "alike": "startup.launching.rank_consistency",
        "arguments": "startup.options.trainer_options",
        "banner": "startup.reporting.banner",
        "call": "startup.launching.trainer_call",
        "checks": "startup.options.object_checks",
        "claims": "startup.reporting.loader_claims",
        "evaluate": "startup.runs.evaluation_run",
        "fit": "startup.runs.fit_run",
        "folder": "startup.checkpoint_search.run_folder",
        "migrated": "startup.checkpoint_search.migrated_cursor",
        "newest": "startup.checkpoint_search.newest_checkpoint",
        "outputs": "startup.building.run_outputs",
        "owners": "startup.building.state_owners",
        "preparation": "startup.building.model_preparation",
        "processes": "startup.launching.process_plan",
        "promise": "startup.reporting.reproducibility_level",
        "registration": "startup.options.plugin_table",
        "resume": "startup.checkpoint_search.resume_point",
        "roots": "startup.options.root_loops",
        "run": "startup.runs.base_run",
        "signals": "startup.runs.signal_policy",
        "together": "startup.launching.on_all_ranks",
        "weights": "startup.building.warm_start",
    },
}

RENAMED = {
    f"helios.{package}.{old}": f"helios.{new}"
    for package, names in _NEW_NAMES.items()
    for old, new in names.items()
}
"""The present path of each module that Helios has moved or renamed."""


@final
class _Alias(Loader):
    """Loads a module by importing it under its present path."""

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns this entry instead of the empty module.
        sys.modules[module.__name__] = importlib.import_module(RENAMED[module.__name__])


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
        if fullname in RENAMED:
            warnings.warn(
                f"{fullname} is now {RENAMED[fullname]}. Import it from there.",
                DeprecationWarning,
                stacklevel=2,
            )
            return ModuleSpec(fullname, _Alias())
        return None


def install_moved_modules() -> None:
    """Install the import finder for old paths; does nothing if it is installed already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
