"""Clips gradients at an update, by their norm or element by element."""

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
    """The limits of gradients. Without a limit nothing is clipped.

    Attributes:
        clip_norm: maximum 2-norm of all gradients together.
        clip_value: maximum magnitude of each element.

    Raises:
        ArgumentError: if a limit is not a positive number, or if both are set.
    """

    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < float(value) < math.inf):
                raise ArgumentError(
                    f"Engine({name}=...) must be None or a positive number, got {value!r}. Pass "
                    "None to disable it."
                )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ArgumentError(
                "Engine(clip_value=...) must be None if clip_norm is set, got "
                f"{self.clip_value!r}. Pass only one of them."
            )

    @property
    def set_options(self) -> list[str]:
        """The names of the limits that are set."""
        return [name for name, value in dataclasses.asdict(self).items() if value is not None]

    def apply(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Clip the gradients of parameters, in place; returns their norm if it is limited."""
        if self.clip_norm is not None:
            return clip_grad_norm_(parameters, self.clip_norm)
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        return None
