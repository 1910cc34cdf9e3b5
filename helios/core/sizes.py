"""Formats numbers of bytes for messages, and parses them."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(I?)B|B?)", re.IGNORECASE)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in a suitable unit, with at most one decimal.

    Example:
        >>> size_text(1000), size_text(64 << 20), size_text(5 << 19)
        ('1000 bytes', '64 MiB', '2.5 MiB')
    """
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    number = f"{num_bytes:.0f}" if unit == _UNITS[0] else f"{num_bytes:.1f}"
    return f"{number.removesuffix('.0')} {unit}"


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``500MB`` names.

    KB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024; a number without a unit
    counts bytes.

    Raises:
        ValueError: if it names no positive number of bytes.

    Example:
        >>> parse_size("5GB"), parse_size("1.5 KiB"), parse_size("800")
        (5000000000, 1536, 800)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size")
    number, unit, is_binary = found.groups()
    power = 1 + "KMGT".index(unit.upper()) if unit else 0
    size = int(Fraction(number) * (1024 if is_binary else 1000) ** power)
    if not size:
        raise ValueError(f"{text!r} is less than a byte")
    return size
