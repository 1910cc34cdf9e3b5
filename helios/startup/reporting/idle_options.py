"""Warns of options that have no effect with this model and this data."""

from __future__ import annotations

import difflib
import logging

from helios.checkpoint.options import CheckpointStore
from helios.model.model import Model
from helios.schedule import Schedule
from helios.startup.options.object_checks import own_methods

_LOGGER = logging.getLogger(__name__)

_STEP = "valid_step"
_CALLED = (
    *(_STEP, "on_validation_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_end",
)


def warn_of_idle_options(
    schedule: Schedule, store: CheckpointStore | None, model: Model, *, has_validation: bool
) -> None:
    """Warn of a training without a step, and of validations that compute nothing.

    Args:
        schedule: what is due when.
        store: the rules by which checkpoints are kept; ``None`` for none.
        model: the model, after its setup.
        has_validation: whether there is validation data.
    """
    if schedule.total_steps == 0:
        _LOGGER.warning(
            "Trainer(total_steps=0) trains nothing: fit makes no step. Pass the number of epochs, "
            'or that of steps with train_unit="iteration".'
        )
    validates = schedule.valid_frequency is not None
    if validates and not has_validation:
        _LOGGER.warning(
            "There is no validation data, so valid_frequency and early_stop_cycles have no "
            "effect. Assign self._valid_dataset in the data module's setup()."
        )
    elif validates and _computes_nothing(model):
        _LOGGER.warning(
            "%s has no valid_step, so validations compute no scores. %s",
            type(model).__name__,
            _suggest(model),
        )
    rule = None if store is None else store.keep_best
    if rule is not None and not (validates and has_validation):
        _LOGGER.warning(
            "There is no validation, so CheckpointStore(keep_best=...) finds no %r, and keeps no "
            "checkpoint. Set valid_frequency, or omit keep_best.",
            rule.metric,
        )


def _computes_nothing(model: Model) -> bool:
    """Whether a validation calls no code of the user's model."""
    return model.batch_processor is None and not any(_is_own(model, name) for name in _CALLED)


def _is_own(model: Model, name: str) -> bool:
    return getattr(getattr(model, name), "__func__", None) is not getattr(Model, name)


def _suggest(model: Model) -> str:
    close = difflib.get_close_matches(_STEP, own_methods(model), n=1, cutoff=0.5)
    if close:
        return f"Rename {close[0]} to valid_step if it is meant to be that."
    return "Write valid_step(self, batch, step), which returns {name: (sum, weight)}."
