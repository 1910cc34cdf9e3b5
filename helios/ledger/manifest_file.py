"""The file of a manifest: a section for the first start of a run, and one for each resume.

The first section is complete. Each later one holds what has changed since the one before, as a JSON
merge patch (RFC 7396): a value that is ``null`` was removed. Starts are compared by their facts:
what differs, and what a difference means for the bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

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


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables, with their whole names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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


class Effect(Enum):
    """What a difference between two starts may change; the strongest comes first."""

    TRAJECTORY = "trajectory-changing"
    ROUNDING = "order-preserving"
    NONE = "harmless"

    @property
    def strength(self) -> int:
        """The number of weaker effects."""
        return len(Effect) - 1 - list(Effect).index(self)


@dataclass(frozen=True)
class ManifestChange:
    """A difference between two starts.

    Attributes:
        name: what differs, as ``topic.name``.
        before: its value in the first one; ``None`` if it has none.
        after: its value in the second one.
        effect: what the difference may change.
        reason: why.
    """

    name: str
    before: Any
    after: Any
    effect: Effect
    reason: str

    @property
    def topic(self) -> str:
        """The topic, which ``Trainer(allow_changes=...)`` may name."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        """Return the change as ``name: before -> after``."""
        return f"{self.name}: {_show(self.before)} -> {_show(self.after)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the change as plain values."""
        return {**vars(self), "effect": self.effect.value}


class _Rule(NamedTuple):
    prefix: str
    effect: Effect
    reason: str


_KERNELS = "the order of samples and random numbers stay, but rounding may differ"
_UNSEEN = "Helios cannot know what it changes"
# The first rule whose prefix fits applies.
_RULES = (
    _Rule("command.arguments", Effect.TRAJECTORY, _UNSEEN),
    _Rule("command.optimize", Effect.TRAJECTORY, "assertions run only without it"),
    _Rule("command.", Effect.NONE, "it only says where programs are, and what has started them"),
    _Rule("program.", Effect.TRAJECTORY, "another model, data module or plugin is another program"),
    _Rule("options.enable_deterministic", Effect.ROUNDING, _KERNELS),
    _Rule("options.enable_cudnn_benchmark", Effect.ROUNDING, _KERNELS),
    _Rule("options.clip_", Effect.TRAJECTORY, "updates are clipped otherwise"),
    _Rule("options.accumulation_steps", Effect.TRAJECTORY, "other batches make up a step"),
    _Rule("options.train_unit", Effect.TRAJECTORY, "the run counts something else"),
    _Rule("options.precision", Effect.TRAJECTORY, "numbers have other types"),
    _Rule("options.engine", Effect.TRAJECTORY, _UNSEEN),
    _Rule("options.num_replicas", Effect.TRAJECTORY, "batches are divided otherwise"),
    _Rule("options.batch_limits", Effect.TRAJECTORY, "epochs have another length"),
    _Rule("options.", Effect.NONE, "it does not change the training itself"),
    _Rule("versions.python_build", Effect.NONE, "releases of one version of Python compute alike"),
    _Rule("versions.python", Effect.TRAJECTORY, _UNSEEN),
    _Rule("versions.", Effect.TRAJECTORY, "other versions may compute or draw otherwise"),
    _Rule("libraries.", Effect.TRAJECTORY, "the run has imported this package"),
    _Rule("system.kernel", Effect.NONE, "the kernel of the system does not compute"),
    _Rule("system.cores", Effect.NONE, "the number of threads decides, which is compared itself"),
    _Rule("system.", Effect.ROUNDING, _KERNELS),
    _Rule("gpu.", Effect.ROUNDING, _KERNELS),
    _Rule("environment.OMP_NUM_THREADS", Effect.NONE, "the threads in use are compared themselves"),
    _Rule("environment.CUDA_VISIBLE", Effect.NONE, "the GPUs are compared themselves"),
    _Rule("environment.TORCH_NCCL_", Effect.NONE, "launchers set it; it says how errors end a run"),
    _Rule("environment.CUDA_MODULE_LOADING", Effect.NONE, "PyTorch sets it; it does not compute"),
    _Rule("environment.PYTHON", Effect.TRAJECTORY, "the program itself may depend on it"),
    _Rule("environment.", Effect.ROUNDING, _KERNELS),
    _Rule("switches.default_dtype", Effect.TRAJECTORY, "numbers have other types"),
    _Rule("switches.interop_threads", Effect.NONE, "it does not divide a sum"),
    _Rule("switches.", Effect.ROUNDING, _KERNELS),
    _Rule("processes.", Effect.NONE, "the level of the run permits it"),
    _Rule("seeds.", Effect.TRAJECTORY, "other random numbers are drawn"),
    _Rule("data.num_workers", Effect.NONE, "the number of workers changes no bit"),
    _Rule("data.", Effect.TRAJECTORY, "the data is described otherwise"),
    _Rule("parameters.", Effect.TRAJECTORY, "the networks are others"),
    _Rule("params.", Effect.TRAJECTORY, "the run was declared with another value"),
    _Rule("found.", Effect.TRAJECTORY, "a constructor was given another value"),
    _Rule("git.", Effect.NONE, "the files that were imported are compared themselves"),
    _Rule("level.", Effect.NONE, "it follows from the rest"),
)
_UNKNOWN = _Rule("", Effect.TRAJECTORY, _UNSEEN)
_ABSENT = object()


def compare_facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ManifestChange]:
    """Return the differences between two starts, those with the strongest effect first.

    Args:
        before: the facts of the first start, by topic, as in a section of a manifest.
        after: those of the second one.
    """
    apart = ("code", "libraries", "imported")
    plain = [
        {name: value for name, value in side.items() if name not in apart}
        for side in (before, after)
    ]
    found = [
        _classify(name, one, other) for name, one, other in _pair(plain[0], plain[1], prefix="")
    ]
    found += _compare_libraries(before, after)
    found += _compare_code(before.get("code", {}), after.get("code", {}))
    return sorted(found, key=lambda change: -change.effect.strength)


def _pair(
    before: Mapping[str, Any], after: Mapping[str, Any], *, prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ, with their whole names."""
    for name in [*before, *(name for name in after if name not in before)]:
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            inner = [value if isinstance(value, Mapping) else {} for value in (one, other)]
            yield from _pair(inner[0], inner[1], prefix=f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other


def _classify(name: str, before: Any, after: Any) -> ManifestChange:
    rule = next((rule for rule in _RULES if name.startswith(rule.prefix)), _UNKNOWN)
    if before is None and name.startswith("data."):
        rule = _Rule("", Effect.NONE, "the data did not state it before")
    if None in (before, after) and name.startswith("switches."):
        rule = _Rule("", Effect.NONE, "only one of the two versions of PyTorch has this setting")
    return ManifestChange(name, before, after, rule.effect, rule.reason)


def _compare_libraries(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[ManifestChange]:
    imported = {*before.get("imported", ()), *after.get("imported", ())}
    for name, one, other in _pair(
        before.get("libraries", {}), after.get("libraries", {}), prefix="libraries."
    ):
        if name.partition(".")[2] in imported:
            yield _classify(name, one, other)
        else:
            yield ManifestChange(name, one, other, Effect.NONE, "the run has not imported it")


def _compare_code(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> Iterator[ManifestChange]:
    for module in [*before, *(module for module in after if module not in before)]:
        one, other = before.get(module), after.get(module)
        name = f"code.{module}"
        if one is None or other is None:
            # A module that is imported anew changes nothing unless another file uses it.
            effect = Effect.TRAJECTORY if other is None else Effect.NONE
            reason = "the run no longer imports it" if other is None else "it is imported as well"
            yield ManifestChange(name, _file_of(one), _file_of(other), effect, reason)
        elif one["text"] != other["text"]:
            is_equal = one.get("code", _ABSENT) == other.get("code")
            effect = Effect.NONE if is_equal else Effect.TRAJECTORY
            what = "only comments or docstrings" if is_equal else "statements"
            reason = f"{what} of {other['file']} differ"
            yield ManifestChange(name, one["text"], other["text"], effect, reason)


def _file_of(hashes: Mapping[str, str] | None) -> str | None:
    return None if hashes is None else hashes["file"]


def _show(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
