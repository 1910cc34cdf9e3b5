"""Copies of gradients, compared on bytes.

NaN equals NaN here, and -0.0 differs from 0.0: a computation that is repeated gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias, final

import torch
from torch import Tensor

_Form: TypeAlias = tuple[torch.dtype, torch.Size]
Forms: TypeAlias = dict[str, list[_Form]]


@dataclass(frozen=True)
class GradientMismatch:
    """Where two gradients differ.

    Attributes:
        parameter: the first parameter that differs.
        place: the index of its first element that differs; ``None`` if the gradients have
            different forms, or if only one of them exists.
        values: the element in both gradients, as text, or their forms.
        num_elements: elements of this parameter that differ.
        num_parameters: parameters that differ.
    """

    parameter: str
    place: tuple[int, ...] | None
    values: tuple[str, str]
    num_elements: int
    num_parameters: int


@final
class GradientCopy:
    """The gradients of some parameters at one moment.

    Args:
        parts: the tensors that make up each gradient, by name of the parameter; none if there is
            no gradient.
    """

    def __init__(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        self._parts = parts

    @classmethod
    def take(cls, parameters: Mapping[str, Tensor]) -> GradientCopy:
        """Copy the gradients that parameters have now."""
        return cls(
            {
                name: [part.clone() for part in _parts_of(parameter.grad)]
                for name, parameter in parameters.items()
            }
        )

    @classmethod
    def read(cls, forms: Forms, content: Tensor) -> GradientCopy:
        """Return the gradients of another process.

        Args:
            forms: what :meth:`forms` returned there.
            content: what :meth:`content` returned there.
        """
        flat = [form for table in forms.values() for form in table]
        pieces = iter(torch.split(content, [shape.numel() * d.itemsize for d, shape in flat]))
        return cls(
            {
                name: [next(pieces).clone().view(dtype).reshape(shape) for dtype, shape in table]
                for name, table in forms.items()
            }
        )

    def forms(self) -> Forms:
        """Return types and shapes, by name of the parameter."""
        return {
            name: [(part.dtype, part.shape) for part in parts]
            for name, parts in self._parts.items()
        }

    def content(self) -> Tensor:
        """Return all bytes, on the CPU."""
        parts = [_bytes_of(part).cpu() for table in self._parts.values() for part in table]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes."""
        return sha256(self.content().numpy().data).hexdigest()

    def difference(self, other: GradientCopy) -> GradientMismatch | None:
        """Return where the gradients of another computation differ; ``None`` if they do not."""
        names = [*self._parts, *(name for name in other._parts if name not in self._parts)]
        found = [
            part
            for name in names
            if (part := _compare(name, self._parts.get(name, ()), other._parts.get(name, ())))
        ]
        if not found:
            return None
        name, place, values, num_elements = found[0]
        return GradientMismatch(name, place, values, num_elements, len(found))


def _parts_of(gradient: Tensor | None) -> list[Tensor]:
    if gradient is None:
        return []
    gradient = gradient.detach()
    if gradient.layout is torch.sparse_coo:
        whole = gradient.coalesce()
        return [whole.indices(), whole.values()]
    return [gradient if gradient.layout is torch.strided else gradient.to_dense()]


def _bytes_of(part: Tensor) -> Tensor:
    whole = part.resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


_Found: TypeAlias = tuple[str, tuple[int, ...] | None, tuple[str, str], int]


def _compare(name: str, first: Sequence[Tensor], second: Sequence[Tensor]) -> _Found | None:
    """Return what a ``GradientMismatch`` says of one parameter."""
    forms = [[(part.dtype, part.shape) for part in parts] for parts in (first, second)]
    if forms[0] != forms[1]:
        return name, None, (_describe(first), _describe(second)), 0
    for one, other in zip(first, second, strict=True):
        if one.numel() == 0:
            continue
        rows = [_bytes_of(part).view(one.numel(), -1) for part in (one, other.to(one.device))]
        differing = (rows[0] != rows[1]).any(1)
        if differing.any():
            place = int(differing.nonzero()[0])
            index = tuple(map(int, torch.unravel_index(torch.tensor(place), one.shape)))
            return name, index, (_show(one, index), _show(other, index)), int(differing.sum())
    return None


def _describe(parts: Sequence[Tensor]) -> str:
    if not parts:
        return "no gradient"
    return ", ".join(f"{part.dtype} of shape {tuple(part.shape)}" for part in parts)


def _show(part: Tensor, index: tuple[int, ...]) -> str:
    value = part[index]
    # In the order in which people write digits.
    digits = bytes(reversed(_bytes_of(value).tolist())).hex()
    return f"{value.item()!r} (0x{digits})"
