"""What a process keeps of one turn in an audited iteration, and what it sends to all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from helios.audit.gradient_copies import GradientCopy
from helios.distributed import pickling
from helios.model.snapshot import Snapshot
from helios.run_state.replica_watch import TurnWatch

Parcel: TypeAlias = tuple[Tensor, Tensor]
"""Two rows of bytes: what a step starts from, and its gradients."""


@dataclass
class WatchedTurn:
    """One turn of this process in an audited iteration.

    Attributes:
        inputs: what the step started from; empty if another turn is audited.
        old: the gradients before the step, by name of the parameter, if there were any.
        generators: their states when backward began.
        gradients: those after it.
        version: counts changes of the loss in place.
        num_writes: counts changes of the weights, when the step has ended.
        before: what the model and the plugins held before the step, if it changes that.
        watch: notices what is changed, while the step or its backward run.
        num_collectives: exchanges of this process when that began.
        changed: paths of what the step has changed besides gradients and buffers.
        reason: why this step cannot be audited.
    """

    inputs: bytes = b""
    old: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    gradients: GradientCopy = field(default_factory=lambda: GradientCopy({}))
    version: int = 0
    num_writes: int = 0
    before: Snapshot | None = None
    watch: TurnWatch | None = None
    num_collectives: int = 0
    changed: set[str] = field(default_factory=set)
    reason: str = ""

    def pack(self) -> Parcel:
        """Return what another process needs to compute the gradients again."""
        rest = (self.inputs, self.old, self.generators, self.gradients.forms())
        head = torch.frombuffer(bytearray(pickling.dumps(rest)), dtype=torch.uint8)
        return head, self.gradients.content()

    @classmethod
    def unpack(cls, parcel: Parcel, device: torch.device) -> WatchedTurn:
        """Return the turn of another process.

        Args:
            parcel: what :meth:`pack` has returned there.
            device: the device of this process.
        """
        head, gradients = parcel
        inputs, old, generators, forms = pickling.loads(head.numpy().tobytes(), device)
        return cls(inputs, old, generators, GradientCopy.read(forms, gradients))


@dataclass(frozen=True)
class TurnNote:
    """What each process sends to all others before a gradient is computed again.

    Attributes:
        changed: see :class:`WatchedTurn`.
        reason: likewise.
        is_kept: whether this process can put back what its step has changed.
        sizes: bytes of the rows of its parcel.
        host: the name of its machine.
        device: its device.
    """

    changed: list[str]
    reason: str
    is_kept: bool
    sizes: tuple[int, ...]
    host: str
    device: str

    @property
    def place(self) -> str:
        """Host and device, for messages."""
        return f"{self.host}, {self.device}"
