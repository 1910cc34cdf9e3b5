"""Clips gradients at an update, by their norm or element by element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from helios.core.sharded_tensors import local_of
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

    def apply(
        self,
        parameters: Sequence[Tensor],
        norm: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> Tensor | None:
        """Clip the gradients of parameters, in place; returns their norm if it is limited.

        Args:
            parameters: the parameters.
            norm: returns the norm of gradients; ``None`` for PyTorch's.
        """
        if self.clip_norm is not None and norm is not None:
            return self._clip_by(norm, [p.grad for p in parameters if p.grad is not None])
        if self.clip_norm is not None:
            return clip_grad_norm_(parameters, self.clip_norm)
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        return None

    def _clip_by(
        self, norm: Callable[[Sequence[Tensor]], Tensor], gradients: Sequence[Tensor]
    ) -> Tensor:
        if not gradients:
            return torch.zeros(())
        assert self.clip_norm is not None
        total = norm(gradients)
        # As PyTorch's function does, also where nothing is clipped.
        factor = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        with torch.no_grad():
            torch._foreach_mul_([local_of(gradient) for gradient in gradients], factor)
        return total
