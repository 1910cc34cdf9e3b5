"""Format values for messages, tables, logs and JSON: bytes, scores, rates, places of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

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


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> count_text(1, "process"), count_text(2, "process"), count_text(0, "replica")
        ('1 process', '2 processes', '0 replicas')
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def tuple_text(names: Iterable[str]) -> str:
    """Return names as a tuple in Python, to be pasted.

    Example:
        >>> tuple_text(["lr"]), tuple_text(["lr", "steps"])
        ('("lr",)', '("lr", "steps")')
    """
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    return f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"


def some_text(names: Iterable[object], most: int = 6) -> str:
    """Return the first names, and how many more there are.

    Example:
        >>> some_text("ab", 2), some_text("abcd", 2)
        ('a, b', 'a, b and 2 more')
    """
    texts = [*map(str, names)]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def number_text(number: float, digits: int = 6) -> str:
    """Return a number with at least so many significant digits; only whole numbers look whole.

    Example:
        >>> number_text(0.123456789), number_text(0.99996, 4), number_text(2.0)
        ('0.123457', '0.99996', '2')
    """
    text = f"{number:.{digits}g}"
    # What rounding errors of sums leave is not shown.
    while text.lstrip("-").isdecimal() and not math.isclose(float(text), number, rel_tol=1e-12):
        digits += 1
        text = f"{number:.{digits}g}"
    return text


def with_step(iteration: int, step: int | None) -> str:
    """Return an iteration for messages: with its step, if that is another number.

    Args:
        iteration: its number, which files are named after.
        step: how many optimizer steps were made by its end; ``None`` if unknown.

    Example:
        >>> with_step(120, 120), with_step(120, 60), with_step(120, None)
        ('120', '120 (step 60)', '120')
    """
    return str(iteration) if step in (None, iteration) else f"{iteration} (step {step})"


def rate_text(rate: float) -> str:
    """Return a learning rate with up to four digits, as you would write it in a script.

    Example:
        >>> rate_text(0.1), rate_text(0.00082), rate_text(1e-3), rate_text(0.0)
        ('0.1', '8.2e-4', '1e-3', '0')
    """
    if not math.isfinite(rate) or rate == 0 or abs(rate) >= 0.01:
        return number_text(rate, 4)
    digits, _, power = f"{rate:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def as_json(value: float) -> float | str:
    """Return a number for JSON: NaN and infinities become strings that ``float`` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_value(value: Any) -> Any:
    """Return any value for JSON: NaN and infinities as text, other objects by their types."""
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        # JSON has neither infinities nor NaN.
        number = float(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = (each.name for each in dataclasses.fields(value) if each.init)
        return json_value({name: getattr(value, name) for name in own})
    if isinstance(value, Mapping):
        return {str(json_value(key)): json_value(x) for key, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(json_value, value)]
    return f"{type(value).__module__}.{type(value).__qualname__}"
