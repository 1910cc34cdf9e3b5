"""How the processes of a run save together: rank 0 alone, or each what it holds."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from helios.checkpoint.rank_part import PartWriter, RankPart, SavePlan, split_sharded
from helios.checkpoint.record import Record
from helios.checkpoint.saver import Saver
from helios.checkpoint.sharded_commit import RankParts
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import CheckpointStore, Draft
from helios.distributed.process_groups import has_failed
from helios.replicas.replicas import Replicas
from helios.startup.launching.on_all_ranks import on_each, on_first


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint that is to be written.

    Attributes:
        path: where.
        payload: its content.
        sidecar: facts about it.
        safe_types: types that may be built when it is loaded.
    """

    path: Path
    payload: dict[str, Any]
    sidecar: Sidecar
    safe_types: Iterable[Any]


Describe = Callable[[Record], Description]
"""Completes a record on rank 0, and says how it is written."""


def make_saves(
    saver: Saver, replicas: Replicas, options: CheckpointStore, *, pins: bool
) -> RunSaves:
    """Return the saves of a run; the arguments are those of :class:`ShardedSaves`."""
    if replicas.share is not None:
        return ShardedSaves(saver, replicas, options, pins=pins)
    return RunSaves(saver, replicas)


class RunSaves:
    """The saves of a run whose models are whole: rank 0 writes them.

    All processes call each method together, unless it says otherwise.

    Args:
        saver: writes the files, on rank 0.
        replicas: the processes.
    """

    def __init__(self, saver: Saver, replicas: Replicas) -> None:
        self._saver = saver
        self._replicas = replicas

    def prepare(self, sizes: list[int]) -> None:
        """Allocate memory for copies of storages of these sizes; each process for itself."""
        if self._replicas.rank == 0:
            self._saver.prepare(sizes)

    def save(self, snapshot: dict[str, Any], describe: Describe) -> Path:
        """Save a snapshot; returns its path, which another thread may still be writing to.

        Args:
            snapshot: the content; may change after this returns.
            describe: called on rank 0.

        Raises:
            Exception: on all processes, the failure of this save, or of the one before.
        """

        def write() -> Path:
            told = describe(Record.from_payload(snapshot))
            return self._saver.save(
                told.payload,
                stem=told.path.stem,
                sidecar=told.sidecar,
                safe_types=told.safe_types,
            )

        return on_first(self._replicas, write)

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed, as far as this process knows; each process for itself."""
        return self._saver.failure is not None

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the training."""
        on_first(self._replicas, self._saver.raise_failure)

    def conclude_parts(self) -> None:
        """Wait until nothing but rank 0 writes."""

    def settle(self) -> Path | None:
        """Wait until this process writes nothing, and return the newest checkpoint of rank 0."""
        self._saver.wait()
        return self._saver.newest

    def close(self) -> None:
        """Wait until this process writes nothing, whatever has happened, and free its memory."""
        self._saver.close()


class ShardedSaves(RunSaves):
    """The saves of a run whose models are sharded: each process writes what it holds.

    Whether a failure ends the training is decided on rank 0, which learns of one by a file in the
    draft, or else at the next safe point.

    Args:
        saver: commits the checkpoints, on rank 0.
        replicas: the processes.
        options: how checkpoints are written.
        pins: whether the state is on CUDA devices.
    """

    def __init__(
        self, saver: Saver, replicas: Replicas, options: CheckpointStore, *, pins: bool
    ) -> None:
        super().__init__(saver, replicas)
        self._hashes = options.digest
        self._parts = PartWriter(replicas.rank, is_async=options.is_async, pins=pins)
        self._newest: RankParts | None = None

    def prepare(self, sizes: list[int]) -> None:
        """Allocate memory for copies of this process's shards."""
        self._parts.prepare(sizes)

    def save(self, snapshot: dict[str, Any], describe: Describe) -> Path:
        """Save a snapshot; see the base."""
        self.conclude_parts()
        payload, rows = split_sharded(snapshot)
        described: list[Description] = []

        def begin() -> tuple[Path, str]:
            told = describe(Record.from_payload(payload))
            described.append(told)
            committed = self._saver.begin(told.path.stem)
            return (committed, "") if committed is not None else (told.path, secrets.token_hex(8))

        path, token = on_first(self._replicas, begin)
        if not token:
            return path
        plan = SavePlan(path, token, self._replicas.num_processes, self._hashes)
        drafts: list[Draft] = []

        def draft() -> tuple[RankPart, bool]:
            part, is_own = self._parts.draft(plan, rows)
            if self._replicas.rank == 0:
                self._newest = RankParts(part, has_failed)
                drafts.append(self._draft(described[0], self._newest))
                is_own = is_own and drafts[0].is_own
            return part, is_own

        self._write(draft, drafts)
        return path

    def _draft(self, told: Description, parts: RankParts) -> Draft:
        return self._saver.draft(
            told.payload,
            stem=told.path.stem,
            sidecar=told.sidecar,
            safe_types=told.safe_types,
            parts=parts,
        )

    def _write(self, draft: Callable[[], tuple[RankPart, bool]], drafts: list[Draft]) -> None:
        own: list[RankPart] = []

        def prepare() -> bool:
            part, is_own = draft()
            own.append(part)
            return is_own

        # No process begins to write before all have drafted: an error would leave rank 0 waiting.
        is_now = not all(on_each(self._replicas, prepare))
        if self._replicas.rank:
            if not is_now:
                self._parts.start(own[0])
                return
            self._parts.write(own[0])
        elif not is_now:
            self._saver.write(drafts[0], is_now=False)
            return
        else:
            assert self._newest is not None
            self._newest.try_own()
        self.conclude_parts()
        on_first(self._replicas, lambda: self._saver.write(drafts[0], is_now=True))

    @property
    def has_failed(self) -> bool:
        """Whether a part or a whole save has failed, as far as this process knows."""
        return self._parts.has_failed or super().has_failed

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the training."""
        self._report_parts()
        super().raise_failure()

    def conclude_parts(self) -> None:
        """Wait until nothing but rank 0 writes, and let it know of parts that have failed."""
        self._parts.wait()
        self._report_parts()

    def _report_parts(self) -> None:
        reports = on_each(self._replicas, self._parts.take_failure)
        failures = [failure for failure in reports if failure is not None]
        if failures and self._newest is not None:
            for token, text in failures:
                self._newest.fail(token, text)
            self._saver.wait()

    def close(self) -> None:
        """Wait until this process writes nothing, and free its memory."""
        try:
            super().close()
        finally:
            self._parts.close()
