"""Finds what the constructors of optimizers and schedulers are given in ``Model.setup``.

Their attributes do not say it: a scheduler changes the groups of its optimizer, and keeps only a
part of its own arguments. So while ``setup`` runs, the constructors note what they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.constructor_arguments import bind_arguments
from helios.core.declared_values import describe_given
from helios.core.stored_values import compare_values

_PARAMETERS = ("params", "param_names")


class ConstructorCalls:
    """What the constructors of optimizers and schedulers were given, by object."""

    def __init__(self) -> None:
        # With the objects, so that no other one gets their ids.
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._nested: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what all constructors are given in the block."""
        kinds: list[Any] = [*_find_kinds(Optimizer), *_find_kinds(LRScheduler)]
        with ExitStack() as stack:
            for kind in kinds:
                if "__init__" in vars(kind):
                    stack.callback(setattr, kind, "__init__", kind.__init__)
                    kind.__init__ = self._wrap(kind.__init__)
            yield

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def construct(part: Any, *args: Any, **kwargs: Any) -> None:
            # The constructor of a base is given what this class makes of its own arguments.
            is_outermost = id(part) not in self._given
            if is_outermost:
                given = bind_arguments(original, (part, *args), kwargs)
                self._given[id(part)] = part, self._describe(part, given)
            original(part, *args, **kwargs)
            if is_outermost and isinstance(part, Optimizer):
                self._add_groups(part)

        return construct

    def _describe(self, part: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments without the object, and what it moves: parameters or an optimizer."""
        num_left_out = 2 if isinstance(part, Optimizer) else 1
        own = dict(islice(given.items(), num_left_out, None))
        kept = {name: each for name, each in own.items() if not isinstance(each, Optimizer)}
        return describe_given(kept, self._convert)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            return value.item()
        if isinstance(value, LRScheduler) and id(value) in self._given:
            self._nested.add(id(value))
            return self._given[id(value)][1]
        return value

    def _add_groups(self, optimizer: Optimizer) -> None:
        """Add what single groups of parameters were given."""
        given = self._given[id(optimizer)][1]
        # A wrapper may have neither.
        defaults = getattr(optimizer, "defaults", {})
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            own = {
                name: value
                for name, value in group.items()
                if name not in _PARAMETERS and (name in given or name not in defaults)
            }
            described = describe_given(own, self._convert)
            common = {name: given[name] for name in described if name in given}
            for change in compare_values(common, described):
                given[f"param_groups.{number}.{change.name}"] = change.after

    def settings(self, parts: Mapping[str, object]) -> dict[str, Any]:
        """Return what optimizers and schedulers were given, as a flat table.

        Args:
            parts: the objects by path. What is inside another scheduler is found there.
        """
        return {
            f"{path}.{name}": value
            for path, part in parts.items()
            if id(part) in self._given and id(part) not in self._nested
            for name, value in self._given[id(part)][1].items()
        }

    def names_of(self, optimizer: Optimizer) -> set[str]:
        """Return the names of the arguments of an optimizer; none if it was made elsewhere."""
        _, given = self._given.get(id(optimizer), (None, {}))
        return {name.partition(".")[0] for name in given}


def _find_kinds(base: type) -> Iterator[type]:
    yield base
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield from _find_kinds(kind)
