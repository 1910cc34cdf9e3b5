"""Gathers the facts of a start, compares them with the last start, and writes them.

Those that take time to find are gathered in a thread.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from helios.checkpoint.run_listener import RunListener
from helios.data.source import Source
from helios.errors import LedgerError, RunMismatchError
from helios.launch.launcher import Launch
from helios.ledger.environment import (
    describe_environment,
    describe_switches,
    describe_variables,
)
from helios.ledger.manifest_file import (
    FILE_NAME,
    Effect,
    Manifest,
    ManifestChange,
    Section,
    compare_facts,
    read_manifest,
    write_manifest,
)
from helios.ledger.run_file import now
from helios.ledger.scrubbing import scrub, scrub_arguments
from helios.ledger.source_files import (
    describe_git,
    find_script_folder,
    hash_absent,
    hash_statements,
    hash_texts,
)
from helios.startup.trainer_call import Call
from helios.startup.trainer_options import ROWS, Options
from helios.storage import files
from helios.storage.type_converters import type_name
from helios.text import tuple_text


def manifest_facts(call: Call, source: Source | None) -> dict[str, Any]:
    """Return what is known of a start, by topic of the manifest.

    Args:
        call: the call of fit, after the setup of the model.
        source: the training data; ``None`` if it is not opened.
    """
    options, model = call.options, call.model
    return {
        "command": _describe_command(call.words),
        "program": {
            "model": type_name(type(model)),
            "datamodule": type_name(type(call.datamodule)),
            "plugins": {name: type_name(type(each)) for name, each in call.plugins.items()},
        },
        "options": manifest_options(options),
        "switches": describe_switches(),
        "seeds": {"random_seed": options.seed},
        **({} if source is None else {"data": _as_plain(source.description)}),
        "parameters": {
            path: _count_parameters(network) for path, network in model.discovery.modules().items()
        },
    }


def _as_plain(value: Any) -> Any:
    """Return a value as JSON has it: without ``None`` in tables, and objects as their types."""
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        # JSON has no infinities.
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, Path):
        return scrub(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_plain(
            {
                each.name: getattr(value, each.name)
                for each in dataclasses.fields(value)
                if each.init
            }
        )
    if isinstance(value, Mapping):
        pairs = ((_as_plain(name), _as_plain(each)) for name, each in value.items())
        return {str(name): each for name, each in pairs if each is not None}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [_as_plain(each) for each in value]
    return type_name(type(value))


def describe_topic(topic: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat table as a topic, if there is anything in it."""
    # No fact is None: it would stand for what was removed.
    known = {name: "None" if value is None else value for name, value in values.items()}
    return {topic: _as_plain(known)} if known else {}


def manifest_options(options: Options) -> dict[str, Any]:
    """Return the options of a trainer as resolved, by name."""
    recorded = {name: getattr(options, name) for name, row in ROWS.items() if row.is_recorded}
    found = _as_plain(recorded | {"gpus": options.gpu_ids})
    return {name: value for name, value in found.items() if value is not None}


def _describe_command(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "script": scrub(sys.argv[0]),
        "script_folder": scrub(str(find_script_folder())),
        "arguments": scrub_arguments(sys.argv[1:]),
        "python": scrub(sys.executable),
        "folder": scrub(str(Path.cwd())),
    }
    if words:
        found["words"] = scrub_arguments(words)
    if sys.flags.optimize:
        found["optimize"] = sys.flags.optimize
    launch = Launch.read()
    if launch.is_external:
        found |= {"launcher": launch.kind.value, "processes_here": launch.local_world_size}
    spec = vars(sys.modules["__main__"]).get("__spec__")
    # python -m package.module; a rank that was started by the script has its name, too.
    return found if spec is None else found | {"module": spec.name.removesuffix(".__main__")}


def _count_parameters(network: nn.Module) -> dict[str, int]:
    """Return how many elements a network's parameters have; lazy ones have none yet."""
    present = [each for each in network.parameters() if not is_lazy(each)]
    return {
        "all": sum(each.numel() for each in present),
        "trainable": sum(each.numel() for each in present if each.requires_grad),
    }


_LOGGER = logging.getLogger(__name__)
_MOST_NAMED = 8
# What the checkpoint holds is compared with it, before the first step.
_COMPARED_ELSEWHERE = ("params", "found")
# Lines of the start name words of the command line, and the version of PyTorch.
_SAID_ELSEWHERE = ("command.arguments", "versions.torch", "libraries.torch")
# What another version of PyTorch brings along, and imports itself: its own line covers them.
_COME_WITH_TORCH = ("triton", "sympy", "mpmath", "setuptools")
# Set where exact arithmetic goes to a GPU, or comes from one: the device is named already.
_WITH_A_GPU = ("environment.CUBLAS_WORKSPACE_CONFIG",)
# The training has the processor for most of the time while files are parsed.
_REST = 4.0
_LEAST_REST = 1e-3
_PAUSE = 0.05
_PATIENCE = 60.0


@functools.cache
def _describe_git(folder: Path) -> dict[str, Any]:
    # The process has imported its files once; later changes of them do not concern it.
    return describe_git(folder)


class RunManifest(RunListener):
    """The manifest of a run, which rank 0 writes.

    Args:
        folder: the run's folder.
        run: hash of the run's definition.
        describe: returns what is known of this start, by topic; the thread adds what takes time.
        begin: where and from which checkpoint the run starts.
        after: the iteration of the checkpoint that the run continues from; ``None`` for a new run.
        allowed: topics and options that may differ.
        has_stepped: returns whether the first iteration has ended, which nothing must delay.
        is_strict: whether a difference that may change the training refuses the start.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        describe: Callable[[], Mapping[str, Any]],
        *,
        begin: Mapping[str, Any],
        after: int | None,
        allowed: Sequence[str],
        has_stepped: Callable[[], bool],
        is_strict: bool,
    ) -> None:
        self.changes: list[ManifestChange] = []
        self._folder = folder
        self._run = run
        self._facts: dict[str, Any] = {}
        self._parsed: Mapping[str, Mapping[str, str]] = {}
        self._start: dict[str, Any] = {}
        self._begin = begin
        self._after = after
        self._allowed = frozenset(allowed)
        self._has_stepped = has_stepped
        self._is_strict = is_strict
        self._manifest: Manifest | None = None
        self._is_damaged = False
        self._failures: list[str] = []
        self._add(describe)
        # The training may change them.
        self._add(lambda: {"environment": describe_variables()})
        # What is imported later is no fact of the start.
        self._modules = sys.modules.copy()
        self._hurries = threading.Event()
        self._is_compared = threading.Event()
        self._is_decided = threading.Event()
        self._is_written = threading.Event()
        self._thread = threading.Thread(target=self._work, name="helios-manifest", daemon=True)
        self._thread.start()

    def checked(self) -> str:
        """Return a sentence on what differs from the start that has written the checkpoint.

        Returns:
            The sentence; empty if nothing differs, and for what another line says.

        Raises:
            RunMismatchError: if the start is strict, naming all differences that may change the
                training, or why there is nothing to compare with.
        """
        if self._after is None:
            return ""
        if not self._is_compared.wait(_PATIENCE):
            self._failures.append(f"it could not be compared within {_PATIENCE:.0f} seconds")
        if self._is_strict:
            self._refuse()
        self._report_failures()
        return self._describe_changes()

    def _refuse(self) -> None:
        if self._failures or self._manifest is None:
            why = "; ".join(self._failures) or f"there is no {FILE_NAME} in {self._folder}"
            raise RunMismatchError(
                'Trainer(reproducibility="strict") cannot compare this start with the one that '
                f"has written the checkpoint: {why}. If you know that nothing has changed, pass "
                'reproducibility="warn" once.'
            )
        changes = self._select(Effect.TRAJECTORY)
        if changes:
            topics = sorted({each.topic for each in changes})
            raise RunMismatchError(
                'Trainer(reproducibility="strict") refuses to resume, because what may change the '
                f"training has changed since the checkpoint was written: {_list(changes)}. Undo "
                f"the change, or allow it with Trainer(allow_changes={tuple_text(topics)})."
            )

    def opened(self) -> None:
        """Let the thread write."""
        self._start = {"time": now(), **self._begin}
        self._is_decided.set()

    def before_commit(self) -> None:
        """Wait until the section of this start is on the disk: no checkpoint is without one."""
        self._hurries.set()
        self._is_written.wait(_PATIENCE)

    def closed(self) -> None:
        """Wait until the file is written; if the start was refused, it stays as it is."""
        self._hurries.set()
        self._is_decided.set()
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        try:
            self._add(lambda: {"code": hash_texts(self._modules)})
            if self._after is not None:
                self._add(self._read)
                self._add(lambda: describe_environment(self._modules))
                self._add(self._compare)
        finally:
            self._is_compared.set()
        try:
            self._wait()
            if not self._is_refused:
                self._gather()
            self._is_decided.wait()
            if self._start:
                self._report_failures()
                self._write()
        finally:
            self._is_written.set()

    @property
    def _is_refused(self) -> bool:
        return self._is_decided.is_set() and not self._start

    def _add(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Add facts; no evidence is worth a training, so no error may end it."""
        try:
            self._facts |= describe()
        except Exception as error:
            self._failures.append(f"not all facts of this start could be found ({error!r})")

    def _gather(self) -> None:
        """Add what takes long, and is no part of the comparison."""
        self._add(self._hash_statements)
        self._add(self._describe_git)
        if self._after is None:
            self._add(lambda: describe_environment(self._modules))

    def _describe_git(self) -> dict[str, Any]:
        found = _describe_git(find_script_folder())
        return {"git": found} if found else {}

    def _hash_statements(self) -> dict[str, Any]:
        code = self._facts.get("code", {})
        return {"code": code | hash_statements(self._modules, code, self._parsed, self._rest)}

    def _compare(self) -> dict[str, Any]:
        """Compare this start with the one that has written the checkpoint."""
        if self._manifest is None or self._after is None:
            return {}
        sections = self._manifest.sections
        # A start from this iteration or a later one has written no checkpoint of it.
        writers = [each for each in sections if each.start.get("iteration", 0) < self._after]
        before = (writers or sections[:1])[-1].facts
        earlier = before.get("code", {})
        # Another version of Python may have other syntax trees.
        known = earlier if _python_of(before) == _python_of(self._facts) else {}
        code = hash_statements(self._modules, self._facts.get("code", {}), known, lambda _: None)
        self._parsed = self._facts["code"] = code | hash_absent(earlier, code, known)
        # What one side says nothing of cannot be compared.
        topics = before.keys() & self._facts.keys() - {*_COMPARED_ELSEWHERE}
        sides = [{name: side[name] for name in topics} for side in (before, self._facts)]
        self.changes = compare_facts(*sides)
        return {}

    def _wait(self) -> None:
        """Wait for the end of the first iteration, or until somebody waits for this thread.

        What follows needs the interpreter for long, so that the iteration would wait for it.
        """
        while not self._has_stepped() and not self._hurries.wait(_PAUSE):
            pass

    def _rest(self, seconds: float) -> None:
        # A file that was parsed earlier takes microseconds, and waiting for less takes more.
        if _REST * seconds >= _LEAST_REST:
            self._hurries.wait(_REST * seconds)

    def _read(self) -> dict[str, Any]:
        try:
            self._manifest = read_manifest(self._folder)
        except LedgerError as error:
            self._is_damaged = True
            self._failures.append(str(error))
        return {}

    def _select(self, effect: Effect) -> list[ManifestChange]:
        """Return the changes of an effect that the user has not allowed."""
        return [
            each
            for each in self.changes
            if each.effect is effect
            and self._allowed.isdisjoint((each.topic, each.name.rpartition(".")[2]))
        ]

    def _report_failures(self) -> None:
        for text in self._failures:
            _LOGGER.warning("%s is incomplete: %s", FILE_NAME, text)
        self._failures.clear()

    def _describe_changes(self) -> str:
        told = {*_SAID_ELSEWHERE}
        # The versions of some packages are facts of their own.
        for change in self._select(Effect.TRAJECTORY):
            topic, _, package = change.name.partition(".")
            if topic == "versions":
                told.add(f"libraries.{package}")
        if any(each.name == "versions.torch" for each in self.changes):
            told.add("versions.torch_build")
            told.update(f"libraries.{name}" for name in _COME_WITH_TORCH)
        gpus = [each for each in self.changes if each.topic == "gpu"]
        if any(each.name == "gpu.devices" and None in (each.before, each.after) for each in gpus):
            told.update(_WITH_A_GPU, (each.name for each in gpus))
        parts = []
        for effect, text in (
            (Effect.TRAJECTORY, "what may change the training"),
            (Effect.ROUNDING, "what may change the rounding of numbers"),
        ):
            found = [each for each in self._select(effect) if each.name not in told]
            if found:
                parts.append(f"in {text}: {_list(found)}")
        if not parts:
            return ""
        differences = "; and ".join(parts)
        return f"This start differs from the one that has written the checkpoint {differences}."

    def _write(self) -> None:
        manifest = self._manifest or Manifest(self._run)
        manifest.sections.append(Section(self._start, self._facts))
        try:
            if self._is_damaged or self._is_of_another_run():
                target = files.rename_aside(self._folder / FILE_NAME)
                _LOGGER.warning("Renamed the earlier %s to %s.", FILE_NAME, target.name)
            write_manifest(self._folder, manifest)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            _LOGGER.warning(
                "The manifest %s could not be written: %s. The training does not depend on it.",
                self._folder / FILE_NAME,
                error,
            )

    def _is_of_another_run(self) -> bool:
        """Whether a new run finds the manifest of another one, whose checkpoints are gone."""
        if self._after is not None or not (self._folder / FILE_NAME).exists():
            return False
        try:
            found = read_manifest(self._folder)
        except LedgerError:
            return True
        return found is not None and found.run != self._run


def _python_of(facts: Mapping[str, Any]) -> Any:
    return facts.get("versions", {}).get("python")


def report_changed_start(
    folder: Path,
    describe: Callable[[], Mapping[str, Any]],
    *,
    after: int,
    allowed: Sequence[str],
) -> None:
    """Warn of what differs from the start that has written the last checkpoint of a finished run.

    Nothing is written. See :class:`RunManifest` for the arguments.
    """
    manifest = RunManifest(
        folder,
        "",
        describe,
        begin={},
        after=after,
        allowed=allowed,
        has_stepped=lambda: False,
        is_strict=False,
    )
    differences = manifest.checked()
    if differences:
        _LOGGER.warning("%s", differences)
    manifest.closed()


def _list(changes: Sequence[ManifestChange]) -> str:
    """Return changes as text, with the reason of each, or of several one after another."""
    named = changes[:_MOST_NAMED]
    reasons = [each.reason for each in named]
    ends = [one != other for one, other in zip(reasons, [*reasons[1:], ""], strict=True)]
    texts = [
        f"{each} ({each.reason})" if ends_here else f"{each}"
        for each, ends_here in zip(named, ends, strict=True)
    ]
    shown = "; ".join(texts)
    more = len(changes) - _MOST_NAMED
    return f"{shown}; and {more} more" if more > 0 else shown
