"""Formats numbers of bytes for messages."""

from __future__ import annotations

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
