"""Runs ``Model.setup`` without values, and records what it would have given values to.

On the meta device a tensor has a shape and no memory, and what is written to it is lost. This is as
it should be where an initializer writes, which is called again; anything else must be named.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helios.errors import UsageError

INITIALIZERS = ("reset_parameters", "_reset_parameters")
"""Methods that give a module's own tensors their initial values, the first that exists."""

META = torch.device("meta")
_COPIES = ("clone", "_to_copy")
_NOT_USERS = (
    *("<", str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), copy.__file__),
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What last gave values to some memory.

    Attributes:
        has_values: False if it was only allocated.
        place: file and line of the code that did, as in messages; empty if it is not known.
        writers: the modules whose initializers were running, the outermost first.
        sources: the memory from which the values were copied, if they were.
    """

    has_values: bool = True
    place: str = ""
    writers: tuple[nn.Module, ...] = ()
    sources: tuple[int, ...] = ()


def memory_of(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor; its views have the same."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - an identity


@final
class Values:
    """What ``setup`` has given values to, without having any."""

    def __init__(self) -> None:
        self._origins: dict[int, Origin] = {}
        # Kept, so that no other memory gets the same identity.
        self._storages: dict[int, Any] = {}

    def record(self, tensor: Tensor, origin: Origin) -> None:
        """Record what has given values to a tensor."""
        place = memory_of(tensor)
        self._origins[place] = origin
        self._storages[place] = tensor.untyped_storage()

    def origin_of(self, place: int) -> Origin:
        """Return what last gave values to some memory."""
        return self._origins.get(place, Origin())

    def forget(self) -> Callable[[], list[str]]:
        """Release all memory; returns what lists the places at which memory in use was made."""
        left = [
            (_watch(storage), self._origins[place].place)
            for place, storage in self._storages.items()
        ]
        # The modules that have written are among what may keep memory alive.
        self._storages, self._origins = {}, {}

        def list_left() -> list[str]:
            if any(is_alive() for is_alive, _ in left):
                gc.collect()
            return sorted({place for is_alive, place in left if is_alive()})

        return list_left


def _watch(storage: Any) -> Callable[[], bool]:
    """Return what returns whether a storage is in use."""
    reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return lambda: not reference.expired()


@contextmanager
def without_values() -> Iterator[Values]:
    """Let tensors be made on the meta device, unless code names another one.

    Raises:
        UsageError: for code that reads a value.
    """
    values = Values()
    try:
        with META, _Constants(values), _Writes(values):
            yield values
    except (RuntimeError, TypeError) as error:
        if isinstance(error, UsageError) or not re.search(r"\bmeta\b", str(error)):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if _is_users(f.filename)]
        why = str(error).rstrip(".")
        raise UsageError(
            'Trainer(init="keyed") builds a model without values, but Model.setup() needs one at '
            f"{where[-1] if where else 'an unknown place'}: {why}. Make that tensor in "
            '"with self.device:", which gives it values, or do this in Model.init_unit.'
        ) from error


@final
class _Constants(TorchFunctionMode):
    """Records what ``torch.tensor`` makes, which no dispatcher sees."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.tensor and found.is_meta:
            self._values.record(found, _find_origin())
        return found


@final
class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what writes to memory on the meta device, and what makes it."""

    def __init__(self, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        found = func(*args, **given)
        written = list(tensors_written(func, args, given))
        known = {memory_of(each) for each in _metas_in((args, given))}
        made = [each for each in _metas_in(found) if memory_of(each) not in known]
        affected = [each for each in (*written, *made) if each.is_meta]
        if affected:
            origin = self._describe(func, args)
            for each in affected:
                self._values.record(each, origin)
        return found

    def _describe(self, func: Any, args: Sequence[Any]) -> Origin:
        name = func.overloadpacket.__name__
        found = _find_origin()
        if name.removeprefix("new_").startswith("empty"):
            return dataclasses.replace(found, has_values=False)
        if name in _COPIES and args[0].is_meta:
            source = memory_of(args[0])
            origin = self._values.origin_of(source)
            sources = (*origin.sources, source)
            return dataclasses.replace(origin, sources=sources, place=found.place)
        return found


def tensors_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to, as its schema says."""
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no other way
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def _metas_in(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_meta]


def _find_origin() -> Origin:
    place, writers = "", list[nn.Module]()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no other way
    while frame is not None:
        code = frame.f_code
        if code.co_name in INITIALIZERS and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module):
                writers.append(owner)
        if not place and _is_users(code.co_filename):
            place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return Origin(place=place, writers=tuple(reversed(writers)))


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_USERS)
