"""What was asked for and waits for the next safe point, and how all processes come to know of it.

A request may be made in any process and at any moment; it counts from the boundary on at which all
processes have agreed on it (DESIGN R4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

from helios.engines.replicated import Replicas


@dataclass
class Requests:
    """What was asked for and waits for the next safe point (DESIGN R4)."""

    is_checkpoint_wanted: bool = False
    stop_reason: str = ""
    interruption: str = ""


class Agreement(ABC):
    """What this process asks for, and what all of them know.

    Attributes:
        asked: the requests of this process.
        agreed: those that all processes know of.
    """

    asked: Requests
    agreed: Requests

    @abstractmethod
    def settle(self, *, is_alarm: bool) -> bool:
        """Add what any process has asked for; all processes call it at one place.

        Args:
            is_alarm: whether this process has an error that all must hear of.

        Returns:
            Whether any process has one.
        """

    def remember(self) -> Requests:
        """Return a copy of what this process asks for now."""
        return replace(self.asked)

    def take_back(self, remembered: Requests) -> None:
        """Withdraw what was asked for since :meth:`remember`."""
        vars(self.asked).update(vars(remembered))


@final
class LoneAgreement(Agreement):
    """One replica: a request counts at once."""

    def __init__(self) -> None:
        self.asked = self.agreed = Requests()

    def settle(self, *, is_alarm: bool) -> bool:
        """Return the error of this process, which is the only one."""
        return is_alarm


@final
class SharedAgreement(Agreement):
    """Several replicas: a request waits until all processes have agreed, also where there is one.

    Args:
        replicas: the processes.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.asked, self.agreed = Requests(), Requests()
        self._replicas = replicas

    def settle(self, *, is_alarm: bool) -> bool:
        """Add what any process has asked for; a wish for a checkpoint is taken from it."""
        asked, agreed = self.asked, self.agreed
        wanted, stops, interrupts, is_alarm = self._replicas.agree(
            asked.is_checkpoint_wanted, bool(asked.stop_reason), bool(asked.interruption), is_alarm
        )
        asked.is_checkpoint_wanted = False
        agreed.is_checkpoint_wanted |= wanted
        if stops or interrupts:
            texts = self._replicas.gather_objects((asked.stop_reason, asked.interruption))
            stop, interruption = (next(filter(None, said), "") for said in zip(*texts, strict=True))
            asked.stop_reason = agreed.stop_reason = agreed.stop_reason or stop
            asked.interruption = agreed.interruption = agreed.interruption or interruption
        return is_alarm


def make_agreement(replicas: Replicas) -> Agreement:
    """Return how the processes of a run agree; chosen once, at its start."""
    return LoneAgreement() if replicas.is_lone else SharedAgreement(replicas)
