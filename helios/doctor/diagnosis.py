"""One thing that an examination of the machine has found, and how serious it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """What a finding means to a training; the most serious comes last."""

    NOTE = "note"
    WRONG = "wrong"
    UNUSABLE = "unusable"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that has found nothing more serious."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was found.

    Attributes:
        topic: what it belongs to, such as ``"gpu"``.
        severity: how serious it is.
        text: what it is, in a sentence.
        remedy: what to do, in a sentence.
    """

    topic: str
    severity: Severity
    text: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {**vars(self), "severity": self.severity.value}
