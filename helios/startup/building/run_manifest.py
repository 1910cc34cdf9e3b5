"""Gathers the facts of a start in a thread, compares them with the last start, and writes them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helios.errors import LedgerError, RunMismatchError
from helios.ledger.manifest.environment import describe_environment
from helios.ledger.manifest.git_state import describe_git
from helios.ledger.manifest.manifest_changes import Effect, ManifestChange, compare_facts
from helios.ledger.manifest.manifest_file import (
    FILE_NAME,
    Manifest,
    Section,
    read_manifest,
    write_manifest,
)
from helios.ledger.manifest.source_files import find_script_folder, hash_sources
from helios.storage import files

_LOGGER = logging.getLogger(__name__)
_MOST_NAMED = 8
# The training has the processor for most of the time while files are parsed.
_REST = 4.0


@functools.cache
def _describe_git(folder: Path) -> dict[str, Any]:
    # The process has imported its files once; later changes of them do not concern it.
    return describe_git(folder)


class RunManifest:
    """The manifest of a run, which rank 0 writes.

    Args:
        folder: the run's folder.
        run: hash of the run's definition.
        known: facts of this start, by topic; the thread adds what takes time to find out.
        is_resume: whether the run continues from a checkpoint in this folder.
        allowed: topics and options that may differ.
        is_strict: whether a difference that may change the training refuses the start.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        known: Mapping[str, Any],
        *,
        is_resume: bool,
        allowed: Sequence[str],
        is_strict: bool,
    ) -> None:
        self.changes: list[ManifestChange] = []
        self._folder = folder
        self._run = run
        self._facts = dict(known)
        self._start: dict[str, Any] = {}
        self._is_resume = is_resume
        self._allowed = frozenset(allowed)
        self._is_strict = is_strict
        self._manifest: Manifest | None = None
        self._is_damaged = False
        self._hurries = threading.Event()
        self._is_gathered = threading.Event()
        self._is_decided = threading.Event()
        self._thread = threading.Thread(target=self._work, name="helios-manifest", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Refuse the start if it is strict and a difference may change the training.

        Raises:
            RunMismatchError: naming all such differences.
        """
        if not self._is_strict or not self._is_resume:
            return
        self._hurries.set()
        self._is_gathered.wait()
        found = [str(each) for each in self._select(Effect.TRAJECTORY)]
        if found:
            topics = sorted({each.topic for each in self._select(Effect.TRAJECTORY)})
            raise RunMismatchError(
                'Trainer(reproducibility="strict") refuses to resume, because what may change the '
                f"training differs from the last start: {'; '.join(found)}. Undo the change, or "
                f"allow it with Trainer(allow_changes=({', '.join(map(repr, topics))},))."
            )

    def open(self, start: Mapping[str, Any]) -> None:
        """Let the thread write, once nothing can refuse the start any more.

        Args:
            start: when, where and from which checkpoint the run starts.
        """
        self._start = dict(start)
        self._is_decided.set()

    def close(self) -> None:
        """Wait until the file is written; if the start was refused, it stays as it is."""
        self._hurries.set()
        self._is_decided.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._gather()
        except Exception as error:
            # No evidence is worth a training.
            _LOGGER.warning("Not all facts for %s could be found: %r.", FILE_NAME, error)
        finally:
            self._is_gathered.set()
        self._is_decided.wait()
        if self._start:
            self._report()
            self._write()

    def _gather(self) -> None:
        if self._is_resume:
            self._read()
        self._facts |= describe_environment()
        git = _describe_git(find_script_folder())
        self._facts |= {"git": git} if git else {}
        self._facts["code"] = hash_sources(lambda seconds: self._rest(seconds))
        if self._manifest is not None and self._manifest.sections:
            self.changes = compare_facts(self._manifest.sections[-1].facts, self._facts)

    def _rest(self, seconds: float) -> None:
        self._hurries.wait(_REST * seconds)

    def _read(self) -> None:
        try:
            self._manifest = read_manifest(self._folder)
        except LedgerError as error:
            self._is_damaged = True
            _LOGGER.warning("%s It is renamed, and a new one begins with this start.", error)

    def _select(self, effect: Effect) -> list[ManifestChange]:
        """Return the changes of an effect that the user has not allowed."""
        return [
            each
            for each in self.changes
            if each.effect is effect
            and self._allowed.isdisjoint((each.topic, each.name.rpartition(".")[2]))
        ]

    def _report(self) -> None:
        for effect, text in (
            (Effect.TRAJECTORY, "what may change the training"),
            (Effect.ROUNDING, "what may change the rounding of numbers"),
        ):
            found = [f"{each} ({each.reason})" for each in self._select(effect)]
            if found:
                more = len(found) - _MOST_NAMED
                _LOGGER.warning(
                    "This start differs from the last one in %s: %s%s.",
                    text,
                    "; ".join(found[:_MOST_NAMED]),
                    f"; and {more} more, see {FILE_NAME}" if more > 0 else "",
                )

    def _write(self) -> None:
        manifest = self._manifest or Manifest(self._run)
        manifest.sections.append(Section(self._start, self._facts))
        try:
            if self._is_damaged or self._is_of_another_run():
                target = files.rename_aside(self._folder / FILE_NAME)
                _LOGGER.warning("Renamed the earlier %s to %s.", FILE_NAME, target.name)
            write_manifest(self._folder, manifest)
        except OSError as error:
            _LOGGER.warning(
                "The manifest %s could not be written: %s. The training does not depend on it.",
                self._folder / FILE_NAME,
                error,
            )

    def _is_of_another_run(self) -> bool:
        """Whether a new run finds the manifest of another one, whose checkpoints are gone."""
        if self._is_resume or not (self._folder / FILE_NAME).exists():
            return False
        try:
            found = read_manifest(self._folder)
        except LedgerError:
            return True
        return found is not None and found.run != self._run
