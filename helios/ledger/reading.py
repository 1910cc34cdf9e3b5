"""Finds and reads ledgers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helios.core.local_paths import as_local_path
from helios.errors import LedgerError
from helios.ledger.book import FILE_NAME
from helios.ledger.line import OLDEST, VERSION, end_of, is_scores


def find_ledger(place: str | Path) -> Path:
    """Return the ledger of a run.

    Args:
        place: the ledger itself, the folder that holds it, or a folder above a single run.

    Raises:
        LedgerError: if there is none, or more than one run.
    """
    path = as_local_path("The run", place)
    if path.is_file():
        return path
    found = (
        [path / FILE_NAME] if (path / FILE_NAME).is_file() else sorted(path.glob(f"*/{FILE_NAME}"))
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise LedgerError(
            f"There is no {FILE_NAME} in {path} or directly below it. A run writes one beside its "
            'checkpoints, unless Trainer(ledger="off") is set. Pass the folder of a run.'
        )
    names = ", ".join(each.parent.name for each in found)
    raise LedgerError(f"{path} holds several runs: {names}. Pass the folder of one.")


def read_lines(path: Path, mark: Mapping[str, Any] | None = None) -> Iterator[bytes]:
    """Yield the lines of a ledger's chain, with their ends; arguments and errors are as below."""
    return (data for data in read_all_lines(path, mark) if not is_scores(data))


def read_all_lines(path: Path, mark: Mapping[str, Any] | None = None) -> Iterator[bytes]:
    """Yield the lines of a ledger, with their ends, also those of scores.

    Args:
        path: the ledger.
        mark: its size and hash in a checkpoint, after which to begin; ``None`` for all lines.

    Raises:
        LedgerError: if the ledger cannot be read, or does not match the checkpoint.
    """
    try:
        with path.open("rb") as handle:
            if mark is not None:
                tail = end_of(mark.get("tail", mark["hash"]))
                handle.seek(max(0, mark["size"] - len(tail)))
                if handle.read(len(tail)) != tail:
                    raise LedgerError(f"The ledger {path} does not match the checkpoint.")
            yield from handle
    except OSError as error:
        raise LedgerError(f"The ledger {path} cannot be read: {error}.") from error


def parse_header(data: bytes, path: Path) -> dict[str, Any]:
    """Return the content of a ledger's first line.

    Raises:
        LedgerError: if it is not a header, or that of another version.
    """
    try:
        header = json.loads(data)
        version = header["ledger"]
        header["run"], header["every"], header["after"]
    except (ValueError, LookupError, TypeError) as error:
        raise LedgerError(f"{path} is not a ledger, or its first line is damaged.") from error
    if version not in range(OLDEST, VERSION + 1):
        raise LedgerError(
            f"{path} is a ledger of version {version}, but this version of Helios reads versions "
            f"up to {VERSION}. Use the version of Helios that wrote it."
        )
    found: dict[str, Any] = header
    return found
