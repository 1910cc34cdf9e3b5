"""Finds by what runs differ: options, arguments of the command, seeds, topics of the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helios.errors import ArgumentError
from helios.ledger.line import hash_of
from helios.ledger.manifest_file import Effect, compare_facts, flatten
from helios.reports.document import shorten

_ABSENT = "not set"


def find_levels(facts: Sequence[Mapping[str, Any]], name: str) -> tuple[str, list[str]]:
    """Return the whole name of an entry of the manifest, and its value in each run.

    Args:
        facts: what the manifest of each run says, by topic.
        name: an argument of the command (``lr`` for ``--lr 0.1``), an option (``precision``), an
            entry with its topic (``seeds.random_seed``), or a topic.

    Raises:
        ArgumentError: if no run has it, or if several entries have that name.
    """
    arguments = [_parse_arguments(each.get("command", {}).get("arguments", ())) for each in facts]
    wanted = _normalize(name)
    if any(wanted in table for table in arguments):
        return f"--{wanted}", [table.get(wanted, _ABSENT) for table in arguments]
    if any(name in each for each in facts):
        return name, [_show(each[name]) if name in each else _ABSENT for each in facts]
    flat = [dict(flatten(each)) for each in facts]
    found = list(dict.fromkeys(key for table in flat for key in table if _has_name(key, name)))
    levels = [[_show(table[key]) if key in table else _ABSENT for table in flat] for key in found]
    if not found:
        raise ArgumentError(
            f"The manifest of no run has {name!r}. Name an argument of the command, an option, or "
            f"an entry such as seeds.random_seed; these differ: {', '.join(list_varying(facts))}."
        )
    if any(each != levels[0] for each in levels):
        raise ArgumentError(f"{name!r} may be {' or '.join(found)}. Pass one of these names.")
    # A seed is an option, too; as a seed, it is known to pairs and to parts of the variance.
    return min(found, key=lambda key: not key.startswith("seeds.")), levels[0]


def _has_name(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--name value`` and ``--name=value``; ``yes`` for one without."""
    found: dict[str, str] = {}
    name: str | None = None
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            key, equal, value = argument.partition("=")
            name = None if equal else _normalize(key)
            found[_normalize(key)] = value if equal else "yes"
        elif name is not None:
            found[name] = argument if found[name] == "yes" else f"{found[name]} {argument}"
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{hash_of(value)} (hash)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def list_varying(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the value in each run of every entry that differs and may change the training."""
    known = [each for each in facts if each]
    names = dict.fromkeys(
        change.name
        for other in known[1:]
        for change in compare_facts(known[0], other)
        if change.effect is not Effect.NONE
    )
    # What a constructor was given is told by the data itself, too.
    twice = {f"found.{name}" for name in names}
    told = [name for name in names if name not in twice]
    return {name: [shorten(_look_up(each, name), 80) for each in facts] for name in told}


def list_hyper_parameters(varying: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return, of the entries that differ, those that describe the training, without seeds.

    A value that was declared and also given to a constructor is listed once.

    Args:
        varying: what :func:`list_varying` returned.
    """
    found: dict[str, list[str]] = {}
    for topic in ("params", "found", "data", "options"):
        for name, values in varying.items():
            parts = name.split(".")
            is_seed = parts[-1].endswith("seed") or "seeds" in parts
            is_new = parts[0] == topic and not is_repeated(name, values, found)
            if is_new and not is_seed:
                found[name] = values
    return found


def is_repeated(name: str, values: Sequence[str], columns: Mapping[str, Sequence[str]]) -> bool:
    """Whether a column has the same values, under a name with the same end."""
    end = name.split(".")[-1]
    return any(each.split(".")[-1] == end and known == values for each, known in columns.items())


def _look_up(facts: Mapping[str, Any], name: str) -> str:
    if not facts:
        return "unknown"
    topic, _, rest = name.partition(".")
    if topic == "code":
        hashes = facts.get("code", {}).get(rest)
        return _ABSENT if hashes is None else str(hashes["text"])
    return next((_show(value) for key, value in flatten(facts) if key == name), _ABSENT)
