"""How gradients are clipped at an update: by their norm, or element by element (R39)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from helios.errors import ArgumentError


@final
@dataclasses.dataclass(frozen=True)
class Clipping:
    """The limits of gradients; without any nothing is clipped.

    Attributes:
        clip_norm: largest 2-norm of all gradients together.
        clip_value: largest magnitude of an element of them.

    Raises:
        ArgumentError: for a limit that is no positive number, and for both limits at once.
    """

    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < float(value) < math.inf):
                raise ArgumentError(
                    f"Engine({name}=...) must be None or a positive number, got {value!r}. Pass "
                    "None to switch it off."
                )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ArgumentError(
                "Engine(clip_value=...) must be None where clip_norm is set, got "
                f"{self.clip_value!r}. Clip by one of both."
            )

    @property
    def set_options(self) -> list[str]:
        """The names of the limits that are set."""
        return [name for name, value in dataclasses.asdict(self).items() if value is not None]

    def apply(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of parameters, in place."""
        if self.clip_norm is not None:
            clip_grad_norm_(parameters, self.clip_norm)
        elif self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
