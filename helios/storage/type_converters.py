"""Converts values of the standard library and NumPy to plain parts and back.

A converter is a pair of functions. The parts are plain values, or values with a converter of their
own. Nothing is looked up by a name from a file.

Values of users' types are represented by the name of the type, with plain contents. Loading a file
creates no instance of a type that it names: the caller resolves it against known types, and no
constructor runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import fractions
import functools
import uuid
import zoneinfo
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

import numpy as np
import torch

INLINE_BYTES = 4096
"""Longer memory is a tensor of bytes: in a pickle, bytes would be escaped as text."""


@dataclasses.dataclass(frozen=True)
class Converter:
    """Conversion of values of some exact types.

    Attributes:
        tag: its name in files.
        types: the exact types, without subclasses.
        to_parts: converts a value to its parts.
        from_parts: converts the parts back to a value.
    """

    tag: str
    types: tuple[type, ...]
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any], Any]


def _pack(data: bytes) -> Any:
    if len(data) <= INLINE_BYTES:
        return data.decode("latin-1")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _unpack(packed: Any) -> bytes:
    if isinstance(packed, str):
        return packed.encode("latin-1")
    return bytes(packed.numpy().tobytes())


@functools.cache
def describe(dtype: np.dtype[Any]) -> Any:
    """Return plain values that describe a type of elements, as ``.npy`` files do."""
    return np.lib.format.dtype_to_descr(dtype)


def dtype_of(description: Any) -> np.dtype[Any]:
    """Invert :func:`describe`.

    Raises:
        ValueError: if its elements would be objects: bytes of a file must not become addresses.
    """
    is_text = isinstance(description, str)
    dtype = np.dtype(description) if is_text else np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise ValueError("an array of a file cannot hold objects")
    return dtype


def objects_to_array(shape: Sequence[int], items: Collection[Any]) -> np.ndarray[Any, Any]:
    """Return an array of objects; assigning a list would unpack objects that are sequences."""
    flat = np.empty(len(items), object)
    for number, item in enumerate(items):
        flat[number] = item
    return cast("np.ndarray[Any, Any]", flat.reshape(tuple(shape)))


def _timezone_to_parts(value: datetime.timezone) -> list[Any]:
    # The name is stored only if it was given explicitly and not derived from the offset.
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [offset] if name == datetime.timezone(offset).tzname(None) else [offset, name]


def _zone_to_key(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise ValueError("a time zone that was read from a file has no key")
    return value.key


def _by_fields(tag: str, kind: Any, fields: str) -> Converter:
    names = fields.split()

    def build(parts: Sequence[Any]) -> Any:
        is_folded = names[-1] == "fold"
        return kind(*parts[:-1], fold=parts[-1]) if is_folded else kind(*parts)

    return Converter(tag, (kind,), lambda v: [getattr(v, name) for name in names], build)


_CLOCK = "hour minute second microsecond tzinfo fold"
_CONVERTERS = (
    Converter("bytes", (bytes,), _pack, _unpack),
    Converter(
        "bytearray", (bytearray,), lambda v: _pack(bytes(v)), lambda p: bytearray(_unpack(p))
    ),
    _by_fields("complex", complex, "real imag"),
    _by_fields("range", range, "start stop step"),
    _by_fields("slice", slice, "start stop step"),
    _by_fields("fraction", fractions.Fraction, "numerator denominator"),
    _by_fields("timedelta", datetime.timedelta, "days seconds microseconds"),
    _by_fields("date", datetime.date, "year month day"),
    _by_fields("datetime", datetime.datetime, f"year month day {_CLOCK}"),
    _by_fields("time", datetime.time, _CLOCK),
    Converter("decimal", (Decimal,), str, Decimal),
    Converter("uuid", (uuid.UUID,), str, uuid.UUID),
    # Concrete paths are loaded as paths of the system that loads the file.
    Converter("path", (PosixPath, WindowsPath), lambda v: v.as_posix(), Path),
    Converter("posixpath", (PurePosixPath,), str, PurePosixPath),
    Converter("windowspath", (PureWindowsPath,), str, PureWindowsPath),
    Converter(
        "timezone", (datetime.timezone,), _timezone_to_parts, lambda p: datetime.timezone(*p)
    ),
    Converter("zoneinfo", (zoneinfo.ZoneInfo,), _zone_to_key, zoneinfo.ZoneInfo),
)

BY_TYPE = {kind: converter for converter in _CONVERTERS for kind in converter.types}
BY_TAG = {converter.tag: converter for converter in _CONVERTERS}


_OF_SCRIPT, _OF_STARTED_RANK = "__main__.", "__mp_main__."


def in_every_process(name: str) -> str:
    """Return the full name of a type as the script has it, also if a rank that it started wrote it.

    Python imports the script again in such a rank, as a module of another name.
    """
    is_of_rank = name.startswith(_OF_STARTED_RANK)
    return _OF_SCRIPT + name.removeprefix(_OF_STARTED_RANK) if is_of_rank else name


@dataclasses.dataclass(frozen=True)
class ShardedValue:
    """A sharded tensor, whose rows are in other files.

    Attributes:
        name: its name there.
    """

    name: str
