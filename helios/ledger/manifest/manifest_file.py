"""The file of a manifest: a section for the first start of a run, and one for each resume.

The first section is complete. Each later one holds what has changed since the one before, as a JSON
merge patch (RFC 7396): a value that is ``null`` was removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helios.errors import LedgerError
from helios.storage import files

FILE_NAME = "run.json"
VERSION = 1


@dataclass(frozen=True)
class Section:
    """What a start of a run was made on and with.

    Attributes:
        start: when, on which host, and from which checkpoint; never compared.
        facts: everything else, by topic.
    """

    start: dict[str, Any]
    facts: dict[str, Any]


@dataclass
class Manifest:
    """The manifest of a run.

    Attributes:
        run: the hash of the run's definition, as in the header of its ledger.
        sections: one for each start, from the first to the newest.
    """

    run: str
    sections: list[Section] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the content of the file."""
        before: dict[str, Any] = {}
        sections: list[dict[str, Any]] = []
        for section in self.sections:
            key = "changed" if sections else "facts"
            sections.append({"start": section.start, key: make_patch(before, section.facts)})
            before = section.facts
        content = {"manifest": VERSION, "run": self.run, "sections": sections}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        # Names that are no text, such as those of files, become escapes of JSON.
        return text.encode("utf-8", "backslashreplace").decode()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in the folder of a run; ``None`` without one.

    Raises:
        LedgerError: if it is damaged, or of another version.
    """
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["manifest"] != VERSION:
            raise LedgerError(
                f"{path} is a manifest of version {content['manifest']}, but this version of "
                f"Helios reads version {VERSION}. Use the version of Helios that wrote it."
            )
        found = Manifest(content["run"])
        facts: dict[str, Any] = {}
        for section in content["sections"]:
            patch = section["changed"] if found.sections else section["facts"]
            facts = apply_patch(facts, patch)
            _check_types(section["start"], facts)
            found.sections.append(Section(section["start"], facts))
        found.sections[-1]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"The manifest {path} is damaged or cannot be read ({error}). Rename it to go on "
            "without it."
        ) from error
    return found


def _check_types(start: Any, facts: Mapping[str, Any]) -> None:
    """Check what readers rely on; raises ``TypeError`` or ``LookupError``."""
    tables = {name: value for name, value in facts.items() if name != "imported"}
    if not all(isinstance(value, dict) for value in (start, *tables.values())):
        raise TypeError("a topic is no table")
    if not all(isinstance(name, str) for name in [*facts.get("imported", [])]):
        raise TypeError("imported must be a list of names")
    for entry in facts.get("code", {}).values():
        for name in ("file", "text"):
            if not isinstance(entry[name], str):
                raise TypeError(f"{name} of a source file must be a text")
    if not all(isinstance(each, dict) for each in facts.get("parameters", {}).values()):
        raise TypeError("parameters must be a table of tables")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest atomically.

    Raises:
        OSError: if the disk fails; the old file stays.
    """
    if not folder.exists():
        files.make_folder(folder)
    files.write_text_durably(folder / FILE_NAME, manifest.to_json())


def make_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes ``after`` of ``before``; neither may hold ``None``."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            inner = make_patch(old, value)
            if inner:
                patch[name] = inner
        elif name not in before or type(old) is not type(value) or old != value:
            patch[name] = value
    return patch


def apply_patch(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a merge patch makes of a dictionary, which stays as it is.

    What the patch does not name is shared with it.
    """
    found = dict(before)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = apply_patch(found[name], value)
        else:
            found[name] = value
    return found
