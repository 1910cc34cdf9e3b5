"""Checks of what users hand in, before anything starts."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping

from helios.core.distributed import launched_world_size
from helios.data.datamodule import DataModule
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.bus import overridden
from helios.hooks.events import EVENTS
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.plugins.plugin import Plugin

_LOGGER = logging.getLogger(__name__)

_KNOWN = (*EVENTS, "train_step", "valid_step", "test_step", "predict_step")
_FLAGS = {
    "training_batch": "process_training_batch",
    "validation_batch": "process_validation_batch",
    "testing_batch": "process_testing_batch",
}


def check_launch() -> None:
    """Check that this is the only process of the training.

    Raises:
        UsageError: under torchrun with several processes: each would train on its own.
    """
    count = launched_world_size()
    if count > 1:
        raise UsageError(
            f"This version of Helios trains in one process, but torchrun has started {count}. "
            "Start the script with plain python, or with --nproc-per-node 1."
        )


def check_subjects(model: Model, datamodule: DataModule) -> None:
    """Check what a call of the trainer is about.

    Raises:
        ArgumentTypeError: for something that is no model, or no data module.
    """
    if not isinstance(model, Model):
        raise ArgumentTypeError(f"Trainer.fit(model=...) must be a Model, got {model!r}.")
    if not isinstance(datamodule, DataModule):
        raise ArgumentTypeError(
            f"Trainer.fit(datamodule=...) must be a DataModule, got {datamodule!r}."
        )


def check_plugins(plugins: Mapping[str, Plugin]) -> None:
    """Check the flags of plugins, which may be set until a run starts.

    Raises:
        ArgumentError: if a flag of ``unique_overrides`` claims what is not overridden (H60).
    """
    for name, plugin in plugins.items():
        for flag, method in _FLAGS.items():
            claims = getattr(plugin.unique_overrides, flag)
            if claims and overridden(plugin, EVENTS[method]) is None:
                raise ArgumentError(
                    f"Plugin {name!r} sets unique_overrides.{flag}, but does not override {method}."
                    " Override it, or leave the flag out."
                )


def warn_of_unknown_hooks(owner: object) -> None:
    """Warn of methods that look like a hook or a step, but are none, and so are never called."""
    for kind in type(owner).__mro__:
        if kind.__module__.startswith("helios.") or kind is object:
            continue
        for name in vars(kind):
            close = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.75)
            looks_so = name.startswith(("on_", "process_")) or name.endswith("_step")
            if looks_so and name not in _KNOWN and close:
                _LOGGER.warning(
                    "%s.%s is neither a hook nor a step, and is never called by Helios; did you "
                    "mean %s?",
                    kind.__name__,
                    name,
                    close[0],
                )


def check_processor(model: Model) -> None:
    """Check, after a model's setup, that its training step has one owner.

    Raises:
        ArgumentError: if it names a batch processor and overrides ``train_step`` too.
    """
    kind = type(model)
    if model.batch_processor is None:
        return
    if not isinstance(model.batch_processor, BatchProcessor):
        raise ArgumentError(
            f"{kind.__name__}.batch_processor must be None or a BatchProcessor, got "
            f"{model.batch_processor!r}. Wrap a function by BatchProcessor.from_callable."
        )
    if kind.train_step is not Model.train_step:
        raise ArgumentError(
            f"{kind.__name__} must write its training step once, but names a batch_processor and "
            "overrides train_step. Remove one of them."
        )


def check_state_methods(model: Model) -> None:
    """Check that a model overrides both methods of its state, or none.

    Raises:
        ArgumentError: if it overrides one of them.
    """
    kind = type(model)
    overrides = {
        "state_dict": kind.state_dict is not Model.state_dict,
        "load_state_dict": kind.load_state_dict is not Model.load_state_dict,
    }
    if len(set(overrides.values())) > 1:
        present = next(name for name, is_there in overrides.items() if is_there)
        raise ArgumentError(
            f"{kind.__name__} must override both state_dict and load_state_dict or none of them, "
            f"got {present} only. Without them all networks, optimizers and schedulers among its "
            "attributes are saved."
        )
