"""Compares two starts of runs: what differs, and what a difference means for the bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


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
