"""What was asked for and waits for the next safe point, and how all processes come to know of it.

A request may be made in any process and at any moment; it counts from the boundary on at which all
processes have agreed on it (DESIGN R4).
"""

from __future__ import annotations

from dataclasses import dataclass

from helios.engines.replicated import Replicas


@dataclass
class Requests:
    """What was asked for and waits for the next safe point (DESIGN R4)."""

    is_checkpoint_wanted: bool = False
    stop_reason: str = ""
    interruption: str = ""

    def merge(self, asked: Requests, replicas: Replicas, *, is_alarm: bool) -> bool:
        """Add what any process has asked for; all processes call it at one place.

        Args:
            asked: the requests of this process; a wish for a checkpoint is taken from it.
            replicas: the processes.
            is_alarm: whether this process has an error that all must hear of.

        Returns:
            Whether any process has one.
        """
        wanted, stops, interrupts, is_alarm = replicas.agree(
            asked.is_checkpoint_wanted, bool(asked.stop_reason), bool(asked.interruption), is_alarm
        )
        asked.is_checkpoint_wanted = False
        self.is_checkpoint_wanted |= wanted
        if stops or interrupts:
            texts = replicas.gather_objects((asked.stop_reason, asked.interruption))
            stop, interruption = (next(filter(None, said), "") for said in zip(*texts, strict=True))
            asked.stop_reason = self.stop_reason = self.stop_reason or stop
            asked.interruption = self.interruption = self.interruption or interruption
        return is_alarm
