"""Options of audits: gradients that are computed a second time, to find hardware that errs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helios.core.tracebacks import with_short_constructor
from helios.errors import ArgumentError


@with_short_constructor
@dataclass(frozen=True)
class Audit:
    """Which steps are audited, and what a mismatch leads to: ``Trainer(audit=Audit(...))``.

    In an audited step the gradient of one replica is computed a second time, before the update,
    from the same weights, buffers, batch and random numbers, and compared on bytes. With several
    processes another one than that of the replica does it, in rotation. The bits of the training
    do not change.

    Attributes:
        every: audit every n-th optimizer step of the run.
        on_mismatch: ``"warn"`` to log a warning and continue with the first gradient; ``"raise"``
            to raise ``AuditError`` on all processes.

    Raises:
        ArgumentError: if ``every`` is not a positive int, or ``on_mismatch`` is neither.
    """

    every: int = 1000
    on_mismatch: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ArgumentError(
                f"Audit(every=...) must be a positive int, got {self.every!r}. Pass e.g. 1000."
            )
        if self.on_mismatch not in ("warn", "raise"):
            raise ArgumentError(
                'Audit(on_mismatch=...) must be "warn" or "raise", got '
                f"{self.on_mismatch!r}. Omit it for a warning."
            )


def as_audit(value: Audit | None) -> Audit | None:
    """Return the options of audits; ``None`` for none.

    Raises:
        ArgumentError: for something that is not an ``Audit``.
    """
    if value is not None and not isinstance(value, Audit):
        raise ArgumentError(
            f"Trainer(audit=...) must be None or an Audit, got {value!r}. Pass e.g. "
            "Audit(every=1000)."
        )
    return value
