"""Quick trials: a few batches of validation before the training, and short passes over the data."""

from __future__ import annotations

from typing import ClassVar

from helios.errors import ArgumentError
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import Phase


def _check_count(name: str, value: object, remedy: str) -> None:
    if type(value) is not int or value < 1:
        raise ArgumentError(f"{name} must be a positive int, got {value!r}. {remedy}")


@PLUGIN_REGISTRY.register
class SanityCheck(Plugin):
    """Validates a few batches before the first step, so that an error there does not come late.

    ``Trainer(sanity_steps=...)`` does the same without a plugin.

    The trial runs at a first start only, and where there is validation data. It leaves no trace:
    what the model, its networks and the plugins hold is put back, no number is logged, and random
    numbers, order and counters are those of a run without it (C17, K14). An error ends the run.

    Args:
        steps: batches of each loader.
        plug_id: the plugin's name.

    Raises:
        ArgumentError: for something else than a positive number of steps.

    Example:
        >>> SanityCheck().sanity_steps
        2
    """

    _internals: ClassVar[str] = "sanity_steps"

    def __init__(self, steps: int = 2, *, plug_id: str = "sanity-check") -> None:
        super().__init__(plug_id)
        _check_count("SanityCheck(steps=...)", steps, "Leave out the plugin for no check.")
        self.sanity_steps = steps

    def setup(self) -> None:
        """Nothing to prepare."""


@PLUGIN_REGISTRY.register
class LimitBatches(Plugin):
    """Ends each pass over data after some batches: the first ones of each epoch's order.

    ``Trainer(batch_limits=...)`` does the same without a plugin.

    An epoch is complete then, with its validation, schedulers and checkpoints. The limit of the
    training belongs to what defines a run: a resume with another one stops, unless
    ``allow_changes=("limit_batches",)`` lets the epoch go on where it stood.

    Args:
        train: the most batches of an epoch; ``None`` for all.
        valid: the most batches of each loader in a validation.
        test: the same in a test.
        predict: the same in a prediction.
        plug_id: the plugin's name.

    Raises:
        ArgumentError: for something else than a positive number, and if nothing is limited.

    Example:
        >>> LimitBatches(train=10, valid=2).batch_limits[Phase.TRAINING]
        10
    """

    _internals: ClassVar[str] = "batch_limits"

    def __init__(
        self,
        train: int | None = None,
        valid: int | None = None,
        test: int | None = None,
        predict: int | None = None,
        *,
        plug_id: str = "limit-batches",
    ) -> None:
        super().__init__(plug_id)
        limits = {
            "train": (Phase.TRAINING, train),
            "valid": (Phase.VALIDATION, valid),
            "test": (Phase.TESTING, test),
            "predict": (Phase.PREDICTION, predict),
        }
        given = {name: pair for name, pair in limits.items() if pair[1] is not None}
        if not given:
            raise ArgumentError(
                "LimitBatches(...) must limit something, got None for all phases. Pass e.g. "
                "train=10, or leave out the plugin."
            )
        for name, (_, limit) in given.items():
            _check_count(f"LimitBatches({name}=...)", limit, "Leave it out for all batches.")
        self.batch_limits = {phase: limit for phase, limit in given.values() if limit is not None}

    def setup(self) -> None:
        """Nothing to prepare."""
