"""What ``helios replay`` asks of the script that it runs: to replay a call of fit, and to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from helios.ledger.differences import Replay
from helios.startup.options.replay_options import ReplayOptions
from helios.state import Phase


@dataclass
class ReplayRequest:
    """A replay that waits for its call of fit: the first one, or that of a named run.

    Attributes:
        options: what is repeated.
        save_name: the ``save_name`` of the model; ``None`` for the first call of fit.
        skipped: the calls of the trainer that came before, which did nothing.
        result: the result; ``None`` until there is one.
        failure: why there is none, also if the script has caught the error.
        rank: the rank of this process in the replay.
        current: the request that waits in this process; ``None`` outside ``helios replay``.
    """

    options: ReplayOptions
    save_name: str | None = None
    skipped: list[str] = field(default_factory=list)
    result: Replay | None = None
    failure: Exception | None = None
    rank: int = 0
    current: ClassVar[ReplayRequest | None] = None

    @property
    def is_answered(self) -> bool:
        """Whether the call that is waited for has come."""
        return self.result is not None or self.failure is not None

    def takes(self, phase: Phase, save_name: str) -> bool:
        """Return whether a call is the one to replay; any other one is noted as skipped."""
        is_fit, wanted = phase is Phase.TRAINING, self.save_name
        if is_fit and wanted in (None, save_name):
            return True
        self.skipped.append(f"{'fit' if is_fit else phase.value} of {save_name!r}")
        return False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the request wait for its call, for a block."""
        ReplayRequest.current = self
        try:
            yield
        finally:
            ReplayRequest.current = None
