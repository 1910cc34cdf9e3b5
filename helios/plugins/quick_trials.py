"""``SanityCheck`` and ``LimitBatches``: validate a few batches first, and shorten passes."""

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
    """Validates a few batches before the first step, to find errors early.

    ``Trainer(sanity_steps=...)`` does the same without a plugin.

    It runs in new runs only, if there is validation data. It has no side effects: the state of the
    model, its networks and the plugins is restored, no number is logged, and random numbers, order
    and counters are those of a run without it. An error ends the run.

    Args:
        steps: batches of each loader.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for anything but a positive number of steps.

    Example:
        >>> SanityCheck().sanity_steps
        2
    """

    _internals: ClassVar[str] = "sanity_steps"

    def __init__(self, steps: int = 2, *, plug_id: str = "sanity-check") -> None:
        super().__init__(plug_id)
        _check_count("SanityCheck(steps=...)", steps, "Remove the plugin for no check.")
        self.sanity_steps = steps

    def setup(self) -> None:
        """Nothing to prepare."""


@PLUGIN_REGISTRY.register
class LimitBatches(Plugin):
    """Ends each pass over data after some batches: the first ones of each epoch's order.

    ``Trainer(batch_limits=...)`` does the same without a plugin.

    The epoch is then complete, with its validation, schedulers and checkpoints. The limit of the
    training is part of what defines a run: a resume with another limit is an error, unless
    ``allow_changes=("limit_batches",)`` lets the epoch continue at its position.

    Args:
        train: maximum number of batches of an epoch; ``None`` for all.
        valid: maximum number of batches of each loader in a validation.
        test: the same in a test.
        predict: the same in a prediction.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for anything but a positive number, and if nothing is limited.

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
                "train=10, or remove the plugin."
            )
        for name, (_, limit) in given.items():
            _check_count(f"LimitBatches({name}=...)", limit, "Omit it for all batches.")
        self.batch_limits = {phase: limit for phase, limit in given.values() if limit is not None}

    def setup(self) -> None:
        """Nothing to prepare."""
